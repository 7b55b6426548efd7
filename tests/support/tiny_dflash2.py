"""Makes random DFlash2 and DSpark drafters for tests: those of tiny_dflash with what each generation has more, by
GGUF's names (numpy, F32), and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import tiny
import tiny_dflash
from tiny import Weights
from tiny_dflash import TARGET, WIDE, Case, drafter

from luce.convert.hf_dflash import DFlash

Keys = dict[str, gguf.GGUFValue]
U32, F32, BOOL = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.BOOL


@dataclass(frozen=True)
class Parts:
    """What a file has beside a DFlash drafter: convolutions of so many `taps` over groups of `group` values; a selector
    of this `rank` over the `top_k` best, or with `markov` a Markov head of the rank; whether it says that the anchor's
    row drafts; a scale of logits; a confidence head; attention sinks."""

    rank: int = 0
    taps: int = 0
    group: int = 0
    top_k: int = 0
    markov: bool = False
    from_anchor: bool | None = None
    logit_scale: float = 1.0
    confidence: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class More(Parts):
    """A drafter of tiny_dflash, and what its file has besides."""

    base: Case = field(kw_only=True)

    @property
    def anchor_drafts(self) -> bool:
        """Says whether the anchor's row drafts. Files with a Markov head that do not say mean that it does."""
        return self.markov if self.from_anchor is None else self.from_anchor

    @property
    def n_draft(self) -> int:
        return self.base.drafter.block_size - (not self.anchor_drafts)

    @property
    def candidates(self) -> int:
        """Returns how many candidates a depth has: of a Markov head, as many as luce keeps."""
        return 16 if self.markov else self.top_k


DEEP = replace(TARGET, n_layer=8)
CASES: dict[str, More] = {
    "dflash2": More(base=Case(TARGET, drafter(TARGET, n_layer=3, target_layer_ids=(0, 1, 3), block_size=8), 31),
                    rank=8, taps=2, group=16, top_k=5),
    "dflash2-causal": More(
        base=Case(WIDE, drafter(WIDE, n_layer=3, n_ff=160, n_head=4, n_head_kv=2, head_dim=128, rope_dim=128,
                           rope_base=1e4, eps=1e-5, block_size=6, target_layer_ids=(0, 1, 2, 3, 4),
                           causal=(True,), softcap=4.0, embedding_scale=3.0), 32),
        rank=32, taps=3, group=32, top_k=16, logit_scale=0.5),
    "dflash2-windows": More(
        base=Case(WIDE, drafter(WIDE, block_size=16, target_layer_ids=(2, 4), causal=(False,), window=16,
                           sliding=(True,)), 33), rank=16, taps=2, group=128, top_k=20),
    "dflash2-from-anchor": More(base=Case(TARGET, drafter(TARGET, n_layer=1, block_size=4), 34), rank=8, taps=4,
                                group=8, top_k=2, from_anchor=True),
    "dflash2-eight-taps": More(
        base=Case(DEEP, drafter(DEEP, target_layer_ids=tuple(range(8)), block_size=10, causal=(True, False)), 38),
        rank=8, taps=8, group=64, top_k=6),
    "dspark": More(base=Case(TARGET, drafter(TARGET, n_layer=2, target_layer_ids=(1, 3), block_size=7), 35), rank=8,
                   markov=True),
    "dspark-reduced": More(
        base=Case(WIDE, drafter(WIDE, n_head=6, n_head_kv=2, n_vocab_draft=200, target_layer_ids=(0, 1, 2, 4, 5),
                           block_size=8, causal=(True,), window=9, sliding=(True, False), softcap=4.0), 36,
             ("token_embd.weight", "output.weight", "d2t")),
        rank=32, markov=True, from_anchor=False, confidence=True),
    "dspark-sinks": More(
        base=Case(WIDE, drafter(WIDE, n_layer=3, n_head=6, n_head_kv=2, target_layer_ids=(1, 2, 4), block_size=7,
                           causal=(True, False, False), window=9, sliding=(True, True, False)), 37),
        rank=16, markov=True, sinks=True),
}  # fmt: skip


def as_llama_cpp_has_it(name: str, taps: tuple[int, ...], **changes: object) -> More:
    """Returns a case with what llama.cpp takes: it taps no last layer, all layers are causal or none, DSpark has no
    softcap, and of DFlash2 a row's scores fit into its state."""
    case = CASES[name]
    base, parts = case.base, {key: changes.pop(key) for key in ("top_k", "confidence") if key in changes}
    of = replace(base.drafter, target_layer_ids=taps, softcap=None, **changes)  # type: ignore[arg-type]
    return replace(case, base=replace(base, drafter=of), **parts)  # type: ignore[arg-type]


PEERS = {
    "dflash2": as_llama_cpp_has_it("dflash2", (0, 1, 2)),
    "dflash2-windows": as_llama_cpp_has_it("dflash2-windows", (1, 3), top_k=10),
    "dspark": as_llama_cpp_has_it("dspark", (-1, 2)),  # The first is the embeddings, as deepseek-ai's configs have it.
    "dspark-reduced": as_llama_cpp_has_it("dspark-reduced", (0, 1, 2, 3, 4), confidence=False),
}


def tensor_shapes(parts: Parts, c: DFlash) -> dict[str, tuple[int, ...]]:
    """Returns the tensors besides those of a DFlash drafter, with numpy's shapes."""
    e, rank, shapes = c.n_embd, parts.rank, dict[str, tuple[int, ...]]()
    for i in range(c.n_layer if parts.taps else 0):
        for part in ("attn", "ffn"):
            shapes[f"blk.{i}.{part}_conv_base"] = (2, parts.taps, e)
            shapes[f"blk.{i}.{part}_conv_proj.weight"] = (2 * parts.taps * e // parts.group, e)
    if parts.sinks:
        shapes |= {f"blk.{i}.attn_sinks.weight": (c.n_head,) for i in range(c.n_layer)}
    if parts.markov:
        shapes |= {"markov_w1.weight": (c.n_vocab, rank), "markov_w2.weight": (c.n_vocab_draft, rank)}
    elif rank:
        shapes |= {f"selector_{name}.weight": (c.n_vocab, rank) for name in ("predecessor", "successor")}
        shapes["selector_hidden.weight"] = (rank, e)
    return shapes | ({"conf_proj.weight": (1, e + rank), "conf_proj.bias": (1,)} if parts.confidence else {})


def weights(case: More) -> Weights:
    rng, made = tiny._Random(1000 + case.base.seed), tiny_dflash.weights(case.base)
    size = 1.5 * (8 / case.rank) ** 0.25  # The products of both tables then have the size of logits.
    for name, shape in tensor_shapes(case, case.base.drafter).items():
        if name.endswith("_conv_base"):
            made[name] = rng.uniform(-0.4, 0.4, *shape)
            made[name][:, 0] += 0.8
        elif name.endswith("_conv_proj.weight"):
            made[name] = rng.matrix(*shape, gain=0.4)
        elif name.endswith("attn_sinks.weight"):  # Scores are of about this size.
            made[name] = rng.uniform(-1, 4, *shape)
        elif name.startswith("conf_proj"):
            made[name] = rng.uniform(-0.3, 0.3, *shape)
        elif name == "selector_hidden.weight":
            made[name] = rng.matrix(*shape)
        else:
            made[name] = rng.uniform(-size, size, *shape)
    return made


def remembering(case: More, text: Sequence[int]) -> tuple[More, Weights]:
    """Returns a drafter that knows by heart which token followed which in a text, the last time. Its layers add
    nothing, so that all rows have the same state; the text's tokens have the largest logits; and what a token adds to
    those of the next is large for the one that followed it."""
    made, base = weights(case), case.base
    c, rng, rank = base.drafter, np.random.default_rng(base.seed), case.rank
    for i in range(c.n_layer):
        for name in ("attn_output", "ffn_down"):
            made[f"blk.{i}.{name}.weight"] *= 0
    state = np.ones(c.n_embd, np.float32)
    made["token_embd.weight"] = np.ones((c.n_vocab, c.n_embd), np.float32)
    made["output_norm.weight"] = state
    codes = rng.choice([-1.0, 1.0], (c.n_vocab, rank)).astype(np.float32) * (60 / rank) ** 0.5
    before = np.zeros_like(codes)
    for token, following in pairwise(text):
        before[token] = codes[following]
    seen = np.zeros(c.n_vocab, np.float32)
    seen[list(text)] = 1
    own = made.pop("d2t", np.arange(c.n_vocab))
    made["output.weight"] = np.outer(seen, state / c.n_embd).astype(np.float32)
    if len(own) < c.n_vocab:
        unseen = [token for token in range(c.n_vocab) if not seen[token]]
        own = np.sort([*np.flatnonzero(seen), *unseen[: len(own) - int(seen.sum())]]).astype(np.int64)
        made["d2t"], made["output.weight"] = own, made["output.weight"][own]
    names = [f"markov_w{i}" for i in (1, 2)] if case.markov else [f"selector_{n}" for n in ("predecessor", "successor")]
    made[f"{names[0]}.weight"], made[f"{names[1]}.weight"] = before, codes[own]
    if not case.markov:
        made["selector_hidden.weight"] = np.outer(np.ones(rank), state / c.n_embd).astype(np.float32)
    extra = tuple(dict.fromkeys((*base.own, "token_embd.weight", "output.weight")))
    return replace(case, base=replace(base, own=extra)), made


def add_keys(case: Parts) -> Callable[[Keys], None]:
    def change(keys: Keys) -> None:
        sizes = {"conv_kernel_size": case.taps, "conv_group_size": case.group}
        if not case.markov:
            sizes |= {"selector_rank": case.rank, "selector_top_k": case.top_k}
        keys |= {f"dflash.{name}": gguf.GGUFValue(size, U32) for name, size in sizes.items() if size}
        if case.logit_scale != 1:
            keys["dflash.logit_scale"] = gguf.GGUFValue(case.logit_scale, F32)
        said = {"sample_from_anchor": case.from_anchor, "has_confidence_head": case.confidence or None}
        keys |= {f"dflash.{name}": gguf.GGUFValue(value, BOOL) for name, value in said.items() if value is not None}

    return change


def write(
    path: Path, case: More, tensors: Weights, keys: Callable[[Keys], None] = lambda keys: None, kind: str = "F32"
) -> Path:
    """Writes a drafter's GGUF, whose matrices have a type. `keys` changes what is written."""

    def change(written: Keys) -> None:
        add_keys(case)(written)
        keys(written)

    return tiny_dflash.write(path, case.base, tensors, keys=change, kind=kind)


def files(folder: Path, case: More) -> tuple[Path, Path]:
    """Returns the target's file and the drafter's."""
    target = tiny.write(folder / "target.gguf", case.base.target, tiny.layout(case.base.target, case.base.seed))
    return target, write(folder / "drafter.gguf", case, weights(case))


def candidates_of(logits: np.ndarray, k: int) -> np.ndarray:
    """Returns the indexes of the k largest of each row, in the order (logit descending, index ascending)."""
    return np.argsort(-logits, axis=-1, kind="stable")[..., :k]
