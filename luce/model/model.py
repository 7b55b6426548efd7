"""The Python API: a model that is loaded once, and asked from any thread."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, overload

from luce.data import BOX, BOX_DRAFTER
from luce.decode.scheduler import Happened, Job, put_all
from luce.errors import ArgumentError, Busy, StateError, about
from luce.images.sight import FEWEST_TOKENS, MOST_TOKENS, Sight
from luce.model.answer import Answer
from luce.model.defaults import with_defaults
from luce.model.loaded import Loaded, Settings
from luce.model.options import How, HowChat, HowReply, Loading, Range, require, require_known
from luce.model.prompting import Asked, Message, Prompting, Schema, tool_of
from luce.model.stream import Stream
from luce.native.structs import MAX_U32
from luce.planning import cpus
from luce.planning.opened import Files
from luce.planning.plan import MAX_BUDGET, MAX_GAMMA, MAX_THREADS, SPECS, Options, require_supported
from luce.speculate.prices import MAX_ROWS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from luce.native import Progress
    from luce.prompts.cache import Pin

Text = str | Sequence[int]  # A prompt: a text, or token ids.
Batch = list[str] | list[list[int]]  # Several.
RANGES = {
    "ctx": Range(1, MAX_U32, whole=True),
    "parallel": Range(1, MAX_ROWS, whole=True),
    "gamma": Range(0, MAX_GAMMA, whole=True),
    "budget": Range(1, MAX_BUDGET, whole=True),
    "threads": Range(1, 512, whole=True),
    "checkpoints": Range(0, 1024, whole=True),
    "max_waiting": Range(0, MAX_U32, whole=True),
    "image_tokens": Range(FEWEST_TOKENS, MOST_TOKENS, whole=True),
}


@dataclass(frozen=True)
class Info:
    """What a model is, and how it was opened. `ctx` counts the tokens of a prompt and its answer, `parallel` the
    answers that are generated at once, and `memory_bytes` what weights and engine take on the `device`. `draft`
    is what drafts: "auto", "mtp", "dflash", "lookup" or "plain". `plan` has each choice with its reason."""

    path: str
    name: str | None
    architecture: str
    device: str
    ctx: int
    parallel: int
    n_params: int
    n_vocab: int
    memory_bytes: int
    draft: str
    plan: dict[str, Any]


class Model:
    """A model on a device, which luce.load opens. Any thread may ask it, and any number of them at once: one
    thread of its own runs the engine, whose steps serve as many answers as the model has room for in parallel,
    and the others wait their turn. What else runs changes no token of an answer.

    It is a context manager. Closed, by close() or as nobody holds it any more, it ends what runs, which raises
    Cancelled for who waits for it, and frees all memory; who asks it then gets StateError.

    Options of all methods are those of luce.How, and in conversations those of luce.HowChat too. What is wrong
    with them raises ArgumentError, a prompt that does not fit ContextFull, and Busy where as many requests wait as
    `max_waiting` allows."""

    def __init__(self, files: Files, loaded: Loaded, prompting: Prompting, opened: ExitStack):
        self.loaded, self._prompting, self._path = loaded, prompting, str(files.file.path)
        self._close = weakref.finalize(self, _close, loaded, opened)

    # ---- text

    def stream(self, prompt: Text, *, schema: Schema | None = None, **how: Unpack[How]) -> Stream:
        """Continues a prompt, and returns the pieces as they come. `schema` is a JSON schema that the text has
        to fit."""
        return self._streams([self.text(prompt, schema, how)])[0]

    @overload
    def generate(self, prompt: str, *, schema: Schema | None = None, **how: Unpack[How]) -> Answer: ...
    @overload
    def generate(self, prompt: Batch, *, schema: Schema | None = None, **how: Unpack[How]) -> list[Answer]: ...
    @overload
    def generate(self, prompt: Sequence[int], *, schema: Schema | None = None, **how: Unpack[How]) -> Answer: ...

    def generate(
        self, prompt: Text | Batch, *, schema: Schema | None = None, **how: Unpack[How]
    ) -> Answer | list[Answer]:
        """Continues a prompt to its end. Several prompts are one batch: their answers, which are those of each
        alone, come in their order. Where one fails, the others are cancelled."""
        single, prompts = batch_of(prompt)
        streams = self._streams([self.text(each, schema, how) for each in prompts])
        try:
            answers = [stream.answer for stream in streams]
            return answers[0] if single else answers
        finally:
            for stream in streams:
                stream.cancel()

    # ---- conversations

    def chat(self, messages: Sequence[Message], **how: Unpack[HowChat]) -> Answer:
        """Answers messages, each {"role", "content"}, in the file's chat template. The model may call `tools`,
        {"name", "description", "parameters"} each: `tool_choice` is "auto", "none", "required" or the name of
        one. `schema` is what the text has to fit, after all reasoning; `think` turns that on or off, and None
        leaves it to the template. Sampling is by default what the file asks for. Raises UnsupportedError where
        the file has no chat template, and TemplateFailed where that refuses the messages.

        Content is a text, or parts: {"type": "text", "text"}, {"type": "image", "image"} with a file's path or its
        bytes, and {"type": "image_url", "image_url": {"url"}} with a data URL."""
        return self.chat_stream(messages, **how).answer

    def chat_stream(self, messages: Sequence[Message], **how: Unpack[HowChat]) -> Stream:
        """Answers as chat() does, and returns the pieces as they come."""
        return self._streams([self.conversation(messages, how)])[0]

    # ---- beginnings

    def prefix(self, beginning: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> Prefix:
        """Reads the beginning of a text, or of a conversation with `tools`, and keeps it: what begins with it is
        read from its end on. It is kept until it is closed, be it on the device or in host memory. Raises
        ArgumentError where the model was loaded with no checkpoints."""
        pin, asked = self.pinned(beginning, tools)
        try:
            self._streams([asked])[0].answer  # noqa: B018 (It reads to the end.)
        except BaseException:
            pin.release()
            raise
        return Prefix(self, beginning, tools, pin)

    # ---- what it is

    @property
    def info(self) -> Info:
        """Returns what the model is, and how it was opened."""
        self._require_open()
        engine, facts, info = self.loaded.engine, self.loaded.facts, self.loaded.info
        return Info(
            path=self._path,
            name=facts.name,
            architecture=facts.architecture,
            device=engine.model.info.device,
            ctx=info.n_ctx,
            parallel=info.n_sequences,
            n_params=engine.model.info.n_params,
            n_vocab=engine.model.info.n_vocab,
            memory_bytes=engine.model.info.weight_bytes + info.memory_bytes,
            draft=engine.plan.draft.mode,
            plan=engine.plan.as_json(),
        )

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Returns the tokens of a text. Control tokens that it spells are such if `special`; `bos` puts the
        model's first token before them where it has one."""
        if not isinstance(text, str):
            raise ArgumentError(f"the text is {text!r:.80}: it is a string")
        return self.loaded.tokenizer.encode(text, special=special, add_bos=bos)

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Returns the text of tokens, with control tokens spelled out if `special`."""
        ids = list(tokens) if isinstance(tokens, Iterable) else None
        if ids is None or not all(isinstance(each, Integral) for each in ids):
            raise ArgumentError(f"the tokens are {tokens!r:.80}: they are token ids")
        return self.loaded.tokenizer.decode(ids, special=special)

    def close(self) -> None:
        """Ends what runs and frees all memory; a second call does nothing. Any thread may call it."""
        self._close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what streams and AsyncModel stand on

    def text(self, prompt: Text, schema: Schema | None, how: How) -> Asked:
        """Returns the request that stream() hands to the engine."""
        self._require_open()
        return self._prompting.text(prompt, schema, how)

    def conversation(self, messages: Sequence[Message], how: HowChat) -> Asked:
        """Returns the request that chat_stream() hands to the engine."""
        self._require_open()
        return self._prompting.chat(messages, how)

    def pinned(self, beginning: str | Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Pin, Asked]:
        """Returns what keeps a beginning, and the request that reads it."""
        self._require_open()
        if self.loaded.cache is None:
            raise ArgumentError("the model keeps no beginnings: load it with 1 or more checkpoints")
        asked = self._prompting.beginning(beginning, [tool_of(tool) for tool in tools])
        return self.loaded.cache.pin(list(asked.request.prompt)), asked

    def submit(self, job: Job, admitted: bool) -> None:
        """Runs a job. Raises Busy where too many wait, and StateError where the model is closed."""
        self._require_open()
        try:
            self.loaded.scheduler.submit(job, admitted)
        except Busy:
            self._require_open()
            raise

    def _streams(self, asked: Sequence[Asked]) -> list[Stream]:
        """Starts answers, of which all wait as soon as the first one may."""
        streams = [Stream(self, each) for each in asked]
        for n, stream in enumerate(streams):
            stream.start(admitted=n > 0)
        return streams

    def _require_open(self) -> None:
        if not self._close.alive:
            raise StateError("the model is closed")


class Prefix:
    """A beginning that a model has read and keeps, for any number of continuations. `beginning` is what
    Model.prefix was given, and `kept_tokens` counts those that continuations do not read again: all up to a
    multiple of 64, on a GPU of 128, and of a file with weights that ggml multiplies up to where a step ended. It is
    a context manager; closed, or as nobody holds it any more, it is evicted when room lacks. Its methods are
    Model's."""

    def __init__(
        self, model: Model, beginning: str | Sequence[Message], tools: Sequence[Mapping[str, Any]], pin: Pin
    ):
        self._model, self.beginning, self._tools = model, beginning, tools
        self.kept_tokens = pin.at
        self._close = weakref.finalize(self, pin.release)

    def stream(self, rest: str, *, schema: Schema | None = None, **how: Unpack[How]) -> Stream:
        """Continues the beginning and `rest`."""
        return self._model.stream(self.text(rest), schema=schema, **how)

    @overload
    def generate(self, rest: str, *, schema: Schema | None = None, **how: Unpack[How]) -> Answer: ...
    @overload
    def generate(self, rest: list[str], *, schema: Schema | None = None, **how: Unpack[How]) -> list[Answer]: ...

    def generate(
        self, rest: str | list[str], *, schema: Schema | None = None, **how: Unpack[How]
    ) -> Answer | list[Answer]:
        """Continues the beginning and `rest` to the end; several are one batch."""
        if isinstance(rest, str):
            return self._model.generate(self.text(rest), schema=schema, **how)
        return self._model.generate([self.text(each) for each in rest], schema=schema, **how)

    def chat(self, messages: Sequence[Message], **how: Unpack[HowReply]) -> Answer:
        """Answers the beginning and more messages, with its tools."""
        return self.chat_stream(messages, **how).answer

    def chat_stream(self, messages: Sequence[Message], **how: Unpack[HowReply]) -> Stream:
        """Answers the beginning and more messages, with its tools, and returns the pieces as they come."""
        require_known(how, HowReply)
        return self._model.chat_stream(self.messages(messages), tools=self._tools, **how)

    def text(self, rest: str) -> str:
        """Returns the beginning, which is a text, and `rest`."""
        if not isinstance(self.beginning, str):
            raise ArgumentError("the beginning is a conversation: chat() goes on with it")
        return self.beginning + rest

    def messages(self, more: Sequence[Message]) -> list[Message]:
        """Returns the beginning, which is a conversation, and `more` messages."""
        if isinstance(self.beginning, str):
            raise ArgumentError("the beginning is a text: stream() and generate() go on with it")
        return [*self.beginning, *more]

    def close(self) -> None:
        """Lets the beginning be evicted; a second call does nothing."""
        self._close()

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(
    path: str | Path | None = None,
    *,
    device: str = "auto",
    draft_device: str | None = None,
    ctx: int | None = None,
    parallel: int = 1,
    draft: str = "auto",
    drafter: str | Path | None = None,
    head: str | Path | None = None,
    gamma: int | None = None,
    budget: int | None = None,
    kv_type: str | None = None,
    threads: int | None = None,
    cpu_experts: int | str | None = None,
    expert_slots: int | str | None = None,
    prompt_copies: bool | None = None,
    checkpoints: int = 8,
    prefill_model: str | Path | None = None,
    max_waiting: int | None = None,
    progress: Progress | None = None,
    mmproj: str | Path | None = None,
    image_tokens: int | None = None,
) -> Model:
    """Opens the model of a GGUF, or the one that comes with luce where no path is given.

    device: "auto" (CUDA if there is any), "cpu", "cuda" or "cuda:N", or several: "cuda:0,cuda:1" have consecutive
        layers each, "cuda:0+cuda:1" an equal part of each matrix, which may give other tokens than one device
    draft_device: "cpu" or "cuda:N", has no layers: what drafts lies there, and the output; None: with the last layers
    ctx: room for so many tokens of a prompt and its answer; None: as many as were trained, up to 32768, and fit
    parallel: so many answers are generated at once; the others wait
    draft: "auto" (as it pays), "mtp" (the NextN head, or an assistant), "dflash" (a drafter), "lookup" (what
        followed earlier in the text) or "off"; no token depends on it
    drafter, head: the files of a DFlash drafter, and of a NextN head in place of the model's own; either may name
        an assistant
    gamma, budget: the most drafts of the head or assistant, and the most candidates of a tree or a lookup, a round
    kv_type: "f16" (the default), "q8_0", "q4_0" or "f32"
    threads: CPU threads; None: one for each usable CPU, to 16
    cpu_experts: keep the experts of so many layers in host memory, where the CPU multiplies them, or "auto"
    expert_slots: keep all experts in host memory, where the GPU reads them, and on the GPU those that were used most of
        late, so many of each layer, or "auto"; no token depends on it
    prompt_copies: make F16 copies of the layers' matrices in half of what is left of a GPU's memory, with which prompts
        are read faster; no token depends on it. None: where there is no prefill_model, which wants memory too
    checkpoints: keep so many beginnings of prompts on the device; 0 keeps none
    prefill_model: the file of a small model that chooses what is read of prompts with `prefill_keep`
    max_waiting: raise Busy where so many requests wait; None: any number may wait
    progress: is called with the part that is loaded, 0 to 1; Cancelled is raised where it returns what is true
    mmproj: the file of a vision tower, with which the model sees images; it needs luce's extra vision
    image_tokens: reduce images that take more tokens, 64 to 16384; None: none is reduced, and one that is too large for
        memory is refused

    Raises FileError, UnsupportedError, ArgumentError, OutOfMemory and DeviceError."""
    given: Loading = {
        "device": device, "draft_device": draft_device, "ctx": ctx, "parallel": parallel, "draft": draft,
        "drafter": drafter, "head": head,
        "gamma": gamma, "budget": budget, "kv_type": kv_type, "threads": threads, "cpu_experts": cpu_experts,
        "expert_slots": expert_slots, "prompt_copies": prompt_copies,
        "checkpoints": checkpoints, "prefill_model": prefill_model, "max_waiting": max_waiting,
        "progress": progress, "mmproj": mmproj, "image_tokens": image_tokens,
    }  # fmt: skip
    return opened(path, given)


def opened(
    path: str | Path | None, given: Loading, hand_over: Callable[[Happened], None] = put_all
) -> Model:
    """Opens a model as load() does, with what happens given to `hand_over` (Scheduler)."""
    require_known(given, Loading)
    for name, allowed in RANGES.items():
        if (value := given.get(name)) is not None or name in ("parallel", "checkpoints"):
            require(name, given.get(name, 1) if value is None else value, allowed)
    scorer, mmproj = given.get("prefill_model"), given.get("mmproj")
    _require_files(
        path=path, drafter=given.get("drafter"), head=given.get("head"), mmproj=mmproj, prefill_model=scorer
    )
    if given.get("image_tokens") is not None and mmproj is None:
        raise ArgumentError("image_tokens bounds images, which a model sees with mmproj: give both")
    cpu_experts = given.get("cpu_experts")
    if cpu_experts not in (None, "auto") and not Range(0, MAX_U32, whole=True).holds(cpu_experts):
        raise ArgumentError(f"cpu_experts is {cpu_experts!r:.80}: it is a number of layers, or 'auto'")
    expert_slots = given.get("expert_slots")
    if expert_slots not in (None, "auto") and not Range(0, MAX_U32, whole=True).holds(expert_slots):
        raise ArgumentError(f"expert_slots is {expert_slots!r:.80}: it is a number of experts, or 'auto'")
    draft = given.get("draft", "auto")
    if draft not in SPECS:
        raise ArgumentError(f"draft is {draft!r:.80}: it is one of {', '.join(SPECS)}")
    drafter = given.get("drafter")
    if path is None and drafter is None and draft in ("auto", "dflash"):
        drafter = BOX_DRAFTER
    device, drafts_on = given.get("device", "auto"), given.get("draft_device")
    if drafts_on is not None and draft in ("off", "lookup"):
        raise ArgumentError(f"draft_device is {drafts_on!r:.80}, and draft {draft!r} has no drafter: leave one out")
    asked = Options(
        device=None if device == "auto" else device,
        ctx=given.get("ctx"),
        kv_type=given.get("kv_type"),
        threads=given.get("threads"),
        sequences=given.get("parallel", 1),
        checkpoints=given.get("checkpoints", 8),
        cpu_experts=cpu_experts,  # type: ignore[arg-type] # No other word comes here.
        expert_slots=expert_slots,  # type: ignore[arg-type]
        copies=scorer is None if (copies := given.get("prompt_copies")) is None else copies,
        spec=draft,
        gamma=given.get("gamma"),
        budget=given.get("budget"),
        gaps=scorer is not None,
    )
    settings = Settings(asked, host_bytes=0, max_waiting=given.get("max_waiting"))
    with ExitStack() as stack:
        files = stack.enter_context(Files(path or BOX, given.get("head"), asked.device, drafter, drafts_on))
        with about(files.file.path):
            require_supported(files.facts)
        for line in files.warnings:
            warnings.warn(line, stacklevel=3)
        sight = None
        if mmproj is not None:
            threads, say = asked.threads or min(cpus.usable(), MAX_THREADS), warnings.warn
            sight = stack.enter_context(Sight(mmproj, threads, device, given.get("image_tokens"), say))
            if misnamed := sight.misnamed(files.facts.name):
                warnings.warn(misnamed, stacklevel=3)
        options = with_defaults(files, asked, shrink=True, image=sight.at_once if sight else 0)
        with sight.beside() if sight else nullcontext():
            loaded = stack.enter_context(
                Loaded(files, options, settings, given.get("progress"), hand_over=hand_over)
            )
        if sight:
            sight.require_fit(loaded.engine.model)
        prompting = Prompting(files, loaded, sight, scorer)
        stack.callback(prompting.close)
        return Model(files, loaded, prompting, stack.pop_all())


def _require_files(**paths: object) -> None:
    """Raises ArgumentError where an option that names a file does not."""
    for name, path in paths.items():
        if path is not None and not isinstance(path, str | PathLike):
            raise ArgumentError(f"{name} is {path!r:.80}: it is the path of a GGUF file")


def batch_of(prompt: Text | Batch) -> tuple[bool, Sequence[Text]]:
    """Returns whether a prompt is a single one, and all that it is."""
    single = isinstance(prompt, str | bytes | bytearray) or not isinstance(prompt, Sequence)
    single = single or any(isinstance(each, Integral) for each in prompt)
    return single, [prompt] if single else prompt  # type: ignore[return-value, list-item]


def _close(loaded: Loaded, opened: ExitStack) -> None:
    """Frees a model: beside its engine's thread where Python found there that nobody holds it."""
    if loaded.scheduler.is_here:
        Thread(target=opened.close, name="luce-close").start()
    else:
        opened.close()
