"""Has the trunk's own continuations: batched generation, and stage pool, which the draft heads learn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from box import tokens
from box.model import Cache, Trunk
from box.store import Deadline, Store, say

PREFILL_ROWS = 128  # So many sequences are prefilled at once.


def choose(logits: Tensor, temperature: Tensor) -> Tensor:
    """Chooses from logits (N, V) at temperature (N,), where 0 is greedy, by Gumbel-max: argmax(logits + t *
    noise)."""
    logits = logits.float()
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-20, 1 - 1e-7)))
    return (logits + temperature[:, None] * noise).argmax(-1)


@torch.no_grad()
def continue_batch(
    trunk: Trunk, prompts: Tensor, count: int, temperature: Tensor, eager: bool = False
) -> Tensor:
    """Returns the next `count` tokens (N, count) of prompts (N, P), with P a multiple of 64."""
    capacity = prompts.shape[1] + count
    parts, hidden = [], []
    for rows in prompts.split(PREFILL_ROWS):
        part = Cache(capacity)
        h, _ = trunk(rows, cache=part)
        hidden.append(h[:, -1].clone())
        parts.append(part.layers)
        del h, part
    cache = Cache(capacity)
    cache.length = prompts.shape[1]
    for i in range(len(parts[0])):
        pairs = [layers[i] for layers in parts]
        cache.layers.append((torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])))
        for layers in parts:
            layers[i] = (torch.empty(0), torch.empty(0))  # This gives the memory back.
    out = [choose(trunk.logits(torch.cat(hidden)), temperature)]
    for _ in range(count - 1):
        out.append(choose(trunk.logits(trunk.step(out[-1], cache, eager)), temperature))
    return torch.stack(out, 1)


@torch.no_grad()
def continue_text(trunk: Trunk, prompt: list[int], count: int) -> list[int]:
    """Continues a text greedily, up to a control token. It runs whole forwards, for a few short samples."""
    ids = list(prompt)
    for _ in range(count):
        hidden, _ = trunk(torch.tensor([ids], device=trunk.embedding.device), eager=True)
        token = int(trunk.logits(hidden[0, -1]).argmax())
        if token >= tokens.special_id(tokens.END):
            break
        ids.append(token)
    return ids[len(prompt) :]


@dataclass(frozen=True)
class Pool:
    """Has sequences of `length`, for each prompt length a share of them."""

    length: int = 768
    prompts: tuple[int, ...] = (64, 256, 512)
    batch: int = 4096
    batches: int = 9  # They are taken in turn from `prompts`.
    held_out: int = 256  # So many greedy sequences are held out, for each prompt length but the longest.
    held_out_count: int = 256  # Those go on for so many tokens.
    reserve: float = 2.0
    compile: bool = True


def prompts_from(
    ids: np.ndarray, starts: np.ndarray, n: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns n prompts (n, length), every other one from a document's beginning."""
    at = rng.integers(0, len(ids) - length, n)
    usable = starts[starts < len(ids) - length]
    if len(usable):
        at[::2] = rng.choice(usable, len(at[::2]))
    return ids[at[:, None] + np.arange(length)].astype(np.int64)


def temperatures(n: int, rng: np.random.Generator) -> np.ndarray:
    """Returns temperatures: half are greedy, half 0.5 to 1."""
    t = rng.uniform(0.5, 1.0, n).astype(np.float32)
    t[rng.random(n) < 0.5] = 0
    return t


def build_pool(store: Store, trunk: Trunk, p: Pool, until: float, seed: int, device: Any) -> None:
    """Writes work/pool/train-P.npy (n, length) int16 and held-out-P.npy (n, P + held_out_count)."""
    deadline = Deadline(until, p.reserve)
    folder = store.work / "pool"
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    corpus = store.work / "corpus"
    ids, starts = tokens.load_tokens(corpus, "held-out")
    for length in p.prompts[:-1]:
        prompts = torch.from_numpy(prompts_from(ids, starts, p.held_out, length, rng)).to(device)
        greedy = torch.zeros(p.held_out, device=device)
        tail = continue_batch(trunk, prompts, p.held_out_count, greedy, eager=True)
        whole = torch.cat([prompts, tail], 1).to(torch.int16).cpu().numpy()
        np.save(folder / f"held-out-{length}.npy", whole)
    say("held-out continuations done")
    ids, starts = tokens.load_tokens(corpus, "train")
    made: dict[int, list[np.ndarray]] = {length: [] for length in p.prompts}
    for i in range(p.batches):
        if i >= len(p.prompts) and deadline.left() < 0:
            break
        length = p.prompts[i % len(p.prompts)]
        prompts = torch.from_numpy(prompts_from(ids, starts, p.batch, length, rng)).to(device)
        heat = torch.from_numpy(temperatures(p.batch, rng)).to(device)
        tail = continue_batch(trunk, prompts, p.length - length, heat)
        made[length].append(torch.cat([prompts, tail], 1).to(torch.int16).cpu().numpy())
        say(f"pool batch {i + 1}/{p.batches}: {p.batch} x {p.length - length} tokens after {length}")
    for length, arrays in made.items():
        np.save(folder / f"train-{length}.npy", np.concatenate(arrays))
    store.write_report("pool", {"sequences": sum(len(a) for v in made.values() for a in v),
                                "length": p.length, "prompts": list(p.prompts)})  # fmt: skip


class PoolBatches:
    """Gives endless batches (tokens (B, length), prompt length) from work/pool."""

    def __init__(self, store: Store, batch: int, seed: int, device: Any):
        self.groups = []
        for path in sorted((store.work / "pool").glob("train-*.npy")):
            data = torch.from_numpy(np.load(path)).to(device)
            self.groups.append((data, int(path.stem.partition("-")[2])))
        if not self.groups:
            raise FileNotFoundError(f"{store.work}/pool holds no sequences: run stage pool")
        self.batch = batch
        self.generator = torch.Generator().manual_seed(seed)
        self.turn = 0

    def next(self) -> tuple[Tensor, int]:
        data, prompt = self.groups[self.turn % len(self.groups)]
        self.turn += 1
        rows = torch.randint(len(data), (self.batch,), generator=self.generator)
        return data[rows.to(data.device)].long(), prompt


def held_out(store: Store, device: Any) -> list[tuple[Tensor, int]]:
    """Returns held-out prompts with the trunk's greedy continuation: (tokens (n, T), prompt length) each."""
    found = []
    for path in sorted((store.work / "pool").glob("held-out-*.npy")):
        whole = torch.from_numpy(np.load(path).astype(np.int64))
        found.append((whole.to(device), int(path.stem.split("-")[2])))
    return found
