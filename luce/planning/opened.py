"""The opened files of a model, and what a plan of them takes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from luce import native as _native
from luce.errors import ArgumentError, OutOfMemory, UnsupportedError, about
from luce.files.probe import Facts, probe
from luce.files.tokenizer import Tokenizer
from luce.native import File, Model, Progress
from luce.native.files import is_assistant
from luce.native.structs import EngineParams, Memory
from luce.planning import cpus
from luce.planning.plan import (
    PART,
    Auto,
    Options,
    Plan,
    plan,
    smaller,
    trunk_layers,
    with_copies,
    with_room,
    with_slots,
)
from luce.planning.split import are_ranks, devices_of, lacking, names_of

OWN_LAYERS = "give each device layers of its own"  # So the core ends where matrices of a model cannot be shared out.


class Files:
    """The opened files of a model: its GGUF, another one that the NextN head is taken from or that is an
    assistant, and one that holds a DFlash drafter. Where an assistant is given as the drafter, it is the head: it
    chains. It is a context manager. Nothing is loaded yet; raises what opening the files raises, and
    ArgumentError where both are chains, or where there is no such device. `device` is where they are to run; with None
    a plan decides. What drafts lies on a `draft_device`, where one is given."""

    def __init__(
        self,
        path: str | Path,
        head: str | Path | None = None,
        device: str | None = None,
        drafter: str | Path | None = None,
        draft_device: str | None = None,
    ):
        self.device, self.draft_device = device, draft_device
        with ExitStack() as opened:
            self.file = opened.enter_context(File(path))
            self.head = opened.enter_context(File(head)) if head is not None else None
            self.drafter = opened.enter_context(File(drafter)) if drafter is not None else None
            for name in re.split("[,+]", device or "auto"):
                if name != "auto":
                    _native.default().device(name)  # No file is to blame where one is missing.
            if self.drafter is not None and is_assistant(self.drafter.kv.get("general.architecture")):
                if self.head is not None:
                    both = f"{drafter} is an assistant, and {head} drafts in its place"
                    raise ArgumentError(f"{both}: leave one out")
                self.head, self.drafter = self.drafter, None
            self._opened = opened.pop_all()

    def on(self, device: str | None) -> Files:
        """Returns the same opened files for another device. They stay this one's to close."""
        _ = self.tokenizer  # One serves both.
        other = copy(self)
        other.device, other._opened = device, ExitStack()
        for name in ("facts", "head_facts", "drafter_facts"):
            other.__dict__.pop(name, None)
        return other

    @cached_property
    def facts(self) -> Facts:
        with about(self.file.path):
            return probe(self.file, device=self.device or "auto")

    @property
    def warnings(self) -> list[str]:
        """Returns what whoever runs these files should be told."""
        said = self.facts.warnings if self.head is None else []
        return [f"{self.file.path}: {line}" for line in said]

    @cached_property
    def head_facts(self) -> Facts | None:
        if self.head is None:
            return None
        with about(self.head.path):
            return probe(self.head, device=self.device or "auto")

    @cached_property
    def drafter_facts(self) -> tuple[str, Facts] | None:
        """Returns the path of the drafter's file, and the facts of it."""
        if self.drafter is None:
            return None
        with about(self.drafter.path):
            return str(self.drafter.path), probe(self.drafter, device=self.device or "auto")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        with about(self.file.path):
            return Tokenizer(self.file.kv)

    def plan(self, options: Options, prompt: int = 0, new: int | None = None) -> Plan:
        """Returns the plan of these files on their device. Where auto would draft and lacks the memory for
        it, the plan is a smaller one."""
        drafts_on = self.draft_device if options.resolved_spec not in ("off", "lookup") else None
        device = devices_of(self.device, options.split, _native.default().devices(), drafts_on)
        options = replace(options, device=device, draft_device=drafts_on)
        chosen = plan(self.facts, options, self.head_facts, prompt, new, cpus.usable(), self.drafter_facts)
        if options.cpu_experts == "auto":
            chosen = with_room(chosen, trunk_layers(self.facts), self.memory)
        if options.expert_slots == "auto":
            chosen = with_slots(chosen, self.facts.experts or 0, self.memory)
        shared = "," in chosen.device and not chosen.layers
        chosen = self._shared_out(chosen) if shared else chosen
        while isinstance(chosen.draft, Auto) and (less := smaller(chosen, self.memory(chosen))):
            chosen = self._shared_out(less) if shared else less
        if options.copies and not _device(chosen).startswith("cpu"):
            chosen = with_copies(chosen, self.memory)
        return chosen

    def _shared_out(self, chosen: Plan) -> Plan:
        """Returns the plan with the numbers of layers that the core finds for its engine."""
        devices = self.memory(replace(chosen, layers=())).devices
        why = "as many as leave the fullest device as empty as can be"
        return chosen.because("layers", why, layers=tuple(each.n_layers for each in devices if each.n_layers))

    def memory(self, chosen: Plan, ctx: int | None = None) -> Memory:
        """Returns the memory that a plan needs, in bytes. `ctx` replaces the plan's context."""
        params = params_of(chosen, _device(chosen), self.facts.vocab_size or 0)
        params = params if ctx is None else replace(params, n_ctx=ctx)
        head, drafter = self._drafters([chosen])
        with _cut(chosen.device):
            return self.file.plan_memory(
                chosen.device, params, head, drafter, chosen.cpu_experts, layers=chosen.layers,
                copy_bytes=chosen.copy_bytes, draft_device=chosen.draft_device,
                experts_at_home=chosen.expert_slots is not None,
            )  # fmt: skip

    def load(self, plans: Collection[Plan], progress: Progress | None = None) -> Model:
        """Loads the weights onto the device for engines of these plans, which share them: with the drafters
        that any plan names, and with the most experts in host memory, or all where any plan has slots for them. Raises
        what the core raises and then leaves nothing open: FileError where a drafter does not fit, OutOfMemory,
        Cancelled (from `progress`), DeviceError and others."""
        cpu_experts, (first, *_) = max(each.cpu_experts for each in plans), plans
        drafts_on = next((each.draft_device for each in plans if each.draft_device), None)
        if len(names_of(first.device)) > 1 or drafts_on:
            for each in plans:
                if lack := lacking(self.memory(replace(each, layers=first.layers, draft_device=drafts_on))):
                    raise OutOfMemory(lack)
        return Model(
            self.file, first.device, progress, *self._drafters(plans), cpu_experts,
            layers=first.layers, copy_bytes=self._copies(list(plans)), draft_device=drafts_on,
            experts_at_home=any(each.expert_slots is not None for each in plans),
        )  # fmt: skip

    def _copies(self, plans: list[Plan]) -> int:
        """Returns the bytes of copies that engines of all these plans leave room for."""
        most = min(each.copy_bytes for each in plans)
        if most == 0 or len(plans) == 1:
            return most
        engines = [self.memory(replace(each, copy_bytes=0)).devices for each in plans]
        left = min(
            of[0].free - of[0].weights - sum(each.parts - each.weights for each in of)
            for of in zip(*engines, strict=True)
        )
        return min(most, max(left // 2, 0))

    def _drafters(self, plans: Collection[Plan]) -> tuple[File | None, File | None]:
        """Returns the files of the NextN head and of the DFlash drafter, where a plan names them."""
        head = (self.head or self.file) if any(each.drafts for each in plans) else None
        return head, self.drafter if any(each.blocks for each in plans) else None

    def close(self) -> None:
        """Unmaps the files; a second call does nothing."""
        self._opened.close()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _cut(device: str) -> Iterator[None]:
    """Says what concerns a model of which devices cannot have equal parts."""
    try:
        yield
    except UnsupportedError as error:
        if not are_ranks(device) or not str(error).endswith(OWN_LAYERS):
            raise
        raise UnsupportedError(str(error), "tensor_split") from error


def _device(chosen: Plan) -> str:
    """Returns the device of a plan: what "auto" takes is the first."""
    return _native.default().devices()[0].name if chosen.device == "auto" else chosen.device


def params_of(chosen: Plan, device: str, n_vocab: int) -> EngineParams:
    """Returns how the core opens the engine on a device, of a model with so many tokens. On a CPU a row costs
    too much to be spent on a next best candidate, so auto keeps none there. Its NextN head drafts among a part of
    a large vocabulary too. (An assistant does not: in its vocabulary single characters come last.)"""
    if not isinstance(chosen.draft, Auto):
        return chosen.params
    kind, large = device.partition(":")[0], n_vocab >= 2 * PART
    return replace(
        chosen.params,
        n_top=0 if kind == "cpu" else chosen.params.n_top,
        n_part=PART if chosen.draft.gamma and large and chosen.draft.head != "assistant" else 0,
    )
