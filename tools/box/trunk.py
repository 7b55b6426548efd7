"""Runs the stage trunk: next-token training on the corpus, bounded by wall-clock time.

The rate is constant in every call but the final one, where it falls linearly to zero over the whole call. So
any number of calls can be lost or added and the last still ends decayed. Momenta are not saved; after a
resume the rate warms up again.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from box import generate, tokens
from box.fit import loop
from box.model import Config, Trunk, count_parameters, token_loss
from box.optim import Optimizer, decayed
from box.store import Deadline, Store, prepare_torch, say

DOCUMENT_SHARE = 8  # One window in so many begins where a document does, as prompts do.
CHECK_STEPS, SAVE_SECONDS = 10, 75.0
PROMPTS = ("def fibonacci(n):\n", "class Stack:\n", "import os\n\n\ndef read_lines(path):\n")


@dataclass(frozen=True)
class Settings:
    batch: int = 32
    length: int = 2048
    held_out_windows: int = 64
    max_steps: int = 0  # With 0 it ends when the time is up.
    reserve: float = 14.0  # The last evaluation and save have so many seconds.
    compile: bool = True


class Windows:
    """Gives endless batches of token windows (B, length + 1). Each epoch goes through the stream once in
    random order, from a random offset; `drawn` is all that a resume needs."""

    def __init__(self, ids: np.ndarray, starts: np.ndarray, length: int, batch: int, seed: int, device: Any):
        self.ids = torch.from_numpy(ids).to(device)
        usable = starts[starts < len(ids) - length - 1]
        self.starts = torch.from_numpy(usable).to(device)
        self.length, self.batch, self.seed = length, batch, seed
        self.per_epoch = (len(ids) - 1) // length - 1
        if self.per_epoch < batch:
            raise ValueError(f"{len(ids)} tokens are too few for batches of {batch} x {length}")
        self.drawn, self.epoch = 0, -1
        self.order = torch.zeros(0, dtype=torch.int64)
        self.rows = torch.arange(length + 1, device=device)

    def _open(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
        offset = int(torch.randint(self.length, (1,), generator=generator))
        order = torch.randperm(self.per_epoch, generator=generator) * self.length + offset
        aligned = torch.rand(self.per_epoch, generator=generator) < 1 / DOCUMENT_SHARE
        picks = torch.randint(max(len(self.starts), 1), (self.per_epoch,), generator=generator)
        self.order = order.to(self.ids.device)
        if len(self.starts):
            at = self.starts[picks.to(self.ids.device)]
            self.order = torch.where(aligned.to(self.ids.device), at, self.order)
        self.epoch = epoch

    def next(self) -> Tensor:
        whole = self.per_epoch // self.batch  # An epoch has so many batches.
        epoch, index = divmod(self.drawn // self.batch, whole)
        if epoch != self.epoch:
            self._open(epoch)
        at = self.order[index * self.batch : (index + 1) * self.batch]
        self.drawn += self.batch
        return self.ids[at[:, None] + self.rows].long()


def held_out_windows(ids: np.ndarray, length: int, count: int, device: Any) -> Tensor:
    """Returns up to `count` windows (n, length + 1), evenly spread."""
    starts = np.linspace(0, len(ids) - length - 1, count).astype(np.int64)
    rows = np.unique(starts)[:, None] + np.arange(length + 1)
    return torch.from_numpy(ids[rows].astype(np.int64)).to(device)


@torch.no_grad()
def held_out_loss(trunk: Trunk, windows: Tensor, batch: int) -> float:
    losses = []
    for part in windows.split(batch):
        hidden, _ = trunk(part[:, :-1], eager=True)
        losses.append((token_loss(hidden, trunk.embedding, part[:, 1:]), len(part)))
    return float(sum(float(loss) * n for loss, n in losses) / sum(n for _, n in losses))


def load_trunk(store: Store, config: Config, device: Any, compile_blocks: bool) -> Trunk:
    """Returns the trunk in its checkpoint, or a fresh one; its activations are BF16 on a GPU."""
    trunk = Trunk(config, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    saved = store.weights("trunk")
    if saved is not None:
        trunk.load_state_dict(saved)
    if compile_blocks:
        trunk.compile_blocks()
    return trunk


class Snapshot:
    """These are the last weights known good, for a loss that stops being finite."""

    def __init__(self, trunk: Trunk):
        self.parameters: list[Tensor] = list(trunk.parameters())
        self.copies = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def take(self) -> None:
        torch._foreach_copy_(self.copies, self.parameters)

    @torch.no_grad()
    def restore(self) -> None:
        torch._foreach_copy_(self.parameters, self.copies)


def take_step(
    trunk: Trunk, loss_of: Any, optimizer: Optimizer, windows: Windows, rate: float
) -> Tensor | None:
    """Returns the loss of one step, or None where the batch did not fit: it is halved then."""
    try:
        batch = windows.next()
        hidden, _ = trunk(batch[:, :-1])
        loss = loss_of(hidden, trunk.embedding, batch[:, 1:])
        loss.backward()
        optimizer.step(rate)
        return loss.detach()
    except torch.OutOfMemoryError:
        if windows.batch == 1:
            raise
    trunk.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    windows.batch //= 2
    say(f"out of memory: batches of {windows.batch} from here")
    return None


class Run:
    """This is one call's worth of training: its steps, its checks and what it reports."""

    def __init__(self, store: Store, config: Config, s: Settings, until: float, final: bool, seed: int):
        device = prepare_torch(seed)
        self.store, self.s, self.final = store, s, final
        self.deadline = Deadline(until, s.reserve)
        ids, starts = tokens.load_tokens(store.work / "corpus", "train")
        self.windows = Windows(ids, starts, s.length, s.batch, seed, device)
        held_ids, _ = tokens.load_tokens(store.work / "corpus", "held-out")
        self.held_out = held_out_windows(held_ids, s.length, s.held_out_windows, device)
        self.trunk = load_trunk(store, config, device, s.compile)
        self.loss_of = torch.compile(token_loss, dynamic=False) if s.compile else token_loss
        self.optimizer = Optimizer(self.trunk)
        self.report = store.report("trunk") or {
            "curve": [], "held_out": [], "calls": [], "tokens": 0, "drawn": 0, "seconds": 0.0,
        }  # fmt: skip
        self.report["parameters"] = count_parameters(self.trunk)
        self.report["settings"] = {"batch": s.batch, "length": s.length, "seed": seed, **config.__dict__}
        self.windows.drawn = self.report["drawn"]
        self.snapshot, self.scale = Snapshot(self.trunk), 1.0
        self.steps, self.tokens, self.began = 0, 0, time.monotonic()
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        self.call = {"device": name, "final": final}
        parameters = self.report["parameters"] / 1e6
        say(f"{parameters:.2f}M parameters, {len(ids) / 1e6:.1f}M tokens, {name}, step {self.windows.drawn}")

    def train(self) -> None:
        self.said = self.saved = time.monotonic()
        loop(
            "trunk", self.take_step, self.look, CHECK_STEPS, self.deadline, self.s.max_steps, self.start_clock
        )

    def take_step(self, progress: float) -> Tensor | None:
        self.rate = self.scale * (decayed(progress) if self.final else 1.0)
        loss = take_step(self.trunk, self.loss_of, self.optimizer, self.windows, self.rate)
        if loss is not None:
            self.steps += 1
            self.tokens += self.windows.batch * self.s.length
        return loss

    def start_clock(self) -> None:
        self.began, self.tokens = time.monotonic(), 0

    def look(self, steps: int, mean: float) -> None:
        """Checks the loss, tells how far it is, and saves from time to time."""
        if not self.check(mean):
            return
        now = time.monotonic()
        if now - self.said > 4 or steps == CHECK_STEPS:
            self.said = now
            speed = self.tokens / max(now - self.began, 1e-3)
            say(f"step {steps} epoch {self.windows.epoch} loss {mean:.4f} rate {self.rate:.2f} "
                f"{speed / 1e3:.0f}k tok/s {self.deadline.left():.0f}s left")  # fmt: skip
        if now - self.saved > SAVE_SECONDS:
            self.saved = now
            self.save()

    def check(self, mean: float) -> bool:
        """Says whether the mean loss is finite; if it is not, the last good weights are back."""
        if not math.isfinite(mean):
            self.snapshot.restore()
            self.optimizer.reset()
            self.scale *= 0.7
            say(f"step {self.steps}: loss not finite; back to the last good weights, rate x {self.scale:.2f}")
            return False
        self.report["curve"].append([self.report["tokens"] + self.tokens, round(mean, 4)])
        if self.steps % (CHECK_STEPS * 5) == 0:
            self.snapshot.take()
        return True

    def save(self) -> None:
        """Saves weights and report, unless something in them is not finite."""
        loss = held_out_loss(self.trunk, self.held_out, min(self.s.batch, 16))
        if not math.isfinite(loss):
            say("held-out loss is not finite: not saved")
            return
        seconds = time.monotonic() - self.began
        call = self.call | {"steps": self.steps, "seconds": round(seconds, 1), "tokens": self.tokens}
        report = self.report | {
            "held_out": [*self.report["held_out"], [self.report["tokens"] + self.tokens, round(loss, 4)]],
            "calls": [*self.report["calls"], call],
            "tokens": self.report["tokens"] + self.tokens,
            "seconds": round(self.report["seconds"] + seconds, 1),
            "drawn": self.windows.drawn,
        }
        self.report["held_out"] = report["held_out"]
        self.store.write_weights("trunk", self.trunk.state_dict())
        self.store.write_report("trunk", report)
        self.store.publish()
        say(f"held-out loss {loss:.4f}, saved")


def train(store: Store, config: Config, s: Settings, until: float, final: bool, seed: int) -> None:
    run = Run(store, config, s, until, final, seed)
    run.train()
    run.report["samples"] = sample(store, run.trunk)
    run.save()


def sample(store: Store, trunk: Trunk) -> list[str]:
    """Prints greedy continuations of PROMPTS for whoever watches."""
    tokenizer = tokens.load_tokenizer(store.state / "tokenizer.json")
    texts = []
    for prompt in PROMPTS:
        ids = generate.continue_text(trunk, tokenizer.encode(prompt).ids, 96)
        texts.append(prompt + tokenizer.decode(ids))
        say(f"sample:\n{texts[-1]}")
    return texts
