"""Makes a DFlash, DFlash2 or DSpark drafter for an oracle model: what it costs is real, and every draft is known.

A block's row i has to name the i-th token after the anchor, from the anchor alone. The drafter's own
embedding of a token holds, side by side, codes of the tokens that are to be drafted after it, one slice of
head_dim values for each depth. One KV head of the first layers is there for each depth: its value is that
depth's slice, its key is the same for every anchor and zero for all else, and its query, the same for every
mask, is turned so that RoPE makes the score high exactly at that distance: score(i) = sum of a_d cos(theta_d
(i - depth)), with the amplitudes a_d that tell whole numbers from 0 to 15 apart best. So row i gets the
anchor's slice i, and the drafter's own head, whose rows are the tokens' codes, names the token. Everything
else is at noise level or zero, and costs what it costs.

Where candidates beside the first are to be right too, tokens come in groups of 8 or 9. A code is that of the group,
and the head's row has a one at the token's place in it; a slice has there the scores of the group's tokens. So
the candidates of a depth are a group, in any order: the right token is the first, another one, or of another
group. Scores differ by the logarithms of the chances, so that trees weigh them as they are worth. Sampled, the
noise would draw the second too often for the first to be right as asked: lists for a temperature T are sharper,
by a factor of 5 T.

A DFlash2's convolutions let rows pass as they are, and neither its selector nor a DSpark's Markov head adds anything to
their scores: candidates are the same behind each parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import gguf
import numpy as np

from luce import native as _native
from luce.bench.acceptance import MAX_RANKS, Acceptance, acceptance
from luce.bench.oracle_blocks import QType, noise_blocks, random_words, silent
from luce.bench.oracle_model import FILE_TYPE, NOISE, Rule, add_acceptance
from luce.bench.oracle_tokenizer import add_tokenizer
from luce.convert import hf_dflash
from luce.convert.gguf_output import Planned, write
from luce.convert.hf_dflash import DFlash
from luce.convert.qwen35_layout import Config

ACCEPT = 0.9033  # With it, a round of a block of 16 gives 8.31 tokens, the new anchor among them.
FLAGS = 32  # So many values of slice 0 say that a row is an anchor, and as many after them that it is a mask.
MARGIN = 24.0  # By so much a matching depth's score is above 0, and the scores of other depths are below.
ASIDE = -2  # No query uses this frequency. The keys of masks lie there, so that they are not noise alone.
MEMBERS = MAX_RANKS + 2  # A group has one token less, or so many where tokens are left over.
LEVELS = (np.arange(16, dtype=np.float32) - 7.5) / np.float32(np.sqrt(255 / 12))  # Their standard deviation is 1.
UNASKED = 0.002  # A candidate of a rank that is not asked for has the score of this chance.
AHEAD = 10.0  # By so many nats sampled lists have their first candidate ahead, so that noise leaves it there.
LEAD = 60.0  # A group's tokens have this score above the mean of all others, whose scores deviate by LEAD / sqrt(D).
ROWS = 4096  # So many rows of a table are made at once.


def drafter_of(c: Config, kind: str = "dflash") -> DFlash:
    """Returns the drafter's shape for a target. That for the 27b has 5 layers, 32/8 heads of 128, and blocks
    of 16; as a DFlash2 blocks of 8, with windows; as a DSpark 40/8 heads and blocks of 8, of which the anchor's row
    drafts nothing. Its FFN is as wide as the target's, and three times the embedding where that has experts."""
    second, markov = kind == "dflash2", kind == "dspark"
    dim = 128 if c.n_embd >= 2048 else 64
    heads = min(40 if markov else 32, c.n_embd // dim)
    kv_heads, n_layer = min(8, heads // 2), 5
    block = min(8 if second or markov else 16, c.n_embd // dim, kv_heads * n_layer + 1)
    n_ff = 3 * c.n_embd if c.n_expert else c.n_ff
    first, last = (min(5, c.n_layer - 3), c.n_layer - 3) if second else (1, c.n_layer - 3)
    if markov:  # RadixArk's for the 27b taps 4, 16, 28, 40 and 52.
        first, last = c.n_layer // 16, c.n_layer * 13 // 16
    taps = tuple(sorted({round(first + i * (last - first) / 4) for i in range(5)}))
    found = DFlash(
        n_layer=n_layer, n_embd=c.n_embd, n_ff=n_ff, n_head=heads, n_head_kv=kv_heads, head_dim=dim,
        rope_dim=dim, n_ctx=c.n_ctx, n_vocab=c.n_vocab, n_vocab_draft=c.n_vocab, rope_base=1e7, eps=1e-6,
        block_size=block, target_layer_ids=taps, mask_token_id=c.n_vocab - 2, sliding=(second,) * n_layer,
        window=2048 if second else None, causal=(False,) * n_layer, softcap=None, embedding_scale=None, yarn=None,
    )  # fmt: skip
    if markov:
        return replace(found, kind="DSpark", markov_rank=256)
    if not second:
        return found
    return replace(found, kind="DFlash2", conv_kernel=2, conv_group=16, selector_rank=256, selector_top_k=16)


@dataclass(frozen=True)
class BlockRule:
    """Knows what the drafter drafts. At each depth the right token is the first candidate for a share of the
    anchors, which the rule's seed chooses, the second for another one, and so on. For anchors that are left
    the first candidate is the token after the right one, and the right one is no candidate."""

    rule: Rule
    block_size: int
    accept: float | Acceptance = ACCEPT

    @property
    def members(self) -> int:
        """Returns how many tokens a group has at most; 1 where lists have no ranks."""
        return MEMBERS if any(acceptance(self.accept).ranks) else 1

    @property
    def n_groups(self) -> int:
        return self.rule.n_cycle // max(1, self.members - 1)

    @cached_property
    def place(self) -> np.ndarray:
        """Returns (n_cycle,) the place of each token: its group, and n_groups for each place in it before its
        own. The last place of most groups is empty."""
        n = self.rule.n_cycle
        if self.members == 1:
            return np.arange(n)
        place = np.empty(n, np.int64)
        place[np.argsort(random_words(n, self.rule.seed, 8), kind="stable")] = np.arange(n)
        return place

    @cached_property
    def token(self) -> np.ndarray:
        """Returns (members, n_groups) the tokens of each group, -1 where a place is empty."""
        made = np.full(self.members * self.n_groups, -1, np.int64)
        made[self.place] = np.arange(self.rule.n_cycle)
        return made.reshape(self.members, self.n_groups)

    @cached_property
    def right(self) -> np.ndarray:
        """Returns the right token of each depth from 1 on after each token, as (block_size, n_vocab). Row 0 has
        the tokens."""
        made = [np.arange(self.rule.n_vocab)]
        for _ in range(1, self.block_size):
            made.append(self.rule.perm[made[-1]])
        return np.stack(made)

    @cached_property
    def rank(self) -> np.ndarray:
        """Returns the rank of the right token, 0 for the first candidate and -1 for none, by depth and anchor
        as (block_size, n_vocab). Row 0 is not used."""
        n, chances = self.rule.n_cycle, acceptance(self.accept)
        made = np.zeros((self.block_size, self.rule.n_vocab), np.int8)
        for depth in range(1, self.block_size):
            order = np.argsort(random_words(n, self.rule.seed, 5, depth), kind="stable")
            wrong = order[: round((1 - chances.at(depth)) * n)]
            made[depth, wrong] = -1
            ends = np.cumsum([0, *chances.ranks_at(depth)]) * len(wrong)
            for rank, (begin, end) in enumerate(zip(ends, ends[1:], strict=False), start=1):
                made[depth, wrong[round(begin) : round(end)]] = rank
        return made

    def group_of(self, depth: int, anchors: np.ndarray) -> np.ndarray:
        """Returns the group of a depth's candidates after each anchor."""
        right = self.right[depth, anchors]
        group = self.place[right] % self.n_groups
        other = self.place[self.rule.perm[right]] % self.n_groups
        other = np.where(other == group, (group + 1) % self.n_groups, other)
        return np.where(self.rank[depth, anchors] < 0, other, group)

    def lists(self, depth: int, anchors: np.ndarray) -> np.ndarray:
        """Returns the candidates of a depth after each anchor, best first, as (anchors, members); -1 is none."""
        right, rank = self.right[depth, anchors], self.rank[depth, anchors]
        group = self.group_of(depth, anchors)
        first = np.where(rank < 0, self.rule.perm[right], right)  # It takes its own place, the others are around it.
        begin = self.place[first] // self.n_groups
        turned = (begin[:, None] + np.arange(self.members)) % self.members
        found = self.token[turned, group[:, None]]
        found = np.take_along_axis(found, np.argsort(found < 0, 1, kind="stable"), 1)  # The empty place is last.
        mates = found[:, 1:]
        for at in range(1, self.members):  # The right token goes behind as many as are before it.
            behind = rank >= at
            found[behind, at - 1], found[behind, at] = mates[behind, at - 1], right[behind]
        return found

    @cached_property
    def drafts(self) -> np.ndarray:
        """Returns the draft of each depth from 1 on after each token, as (block_size, n_vocab). Row 0 is not
        used."""
        made = np.zeros((self.block_size, self.rule.n_vocab), np.int64)
        for depth in range(1, self.block_size):
            made[depth] = self.lists(depth, np.arange(self.rule.n_vocab))[:, 0]
        return made

    def accepted(self, anchor: int, most: int) -> int:
        """Returns how many of the first `most` drafts after an anchor are right, up to the first wrong one."""
        wrong = np.flatnonzero(self.rank[1 : most + 1, anchor] != 0)
        return int(wrong[0]) if len(wrong) else most


def amplitudes(c: DFlash) -> tuple[np.ndarray, float]:
    """Returns an amplitude a of each RoPE frequency (D/2,), such that the sum of a cos(theta m) is +1 or more
    at m = 0 and -1 or less at the other distances of a block. Returns the worst of both beside it."""
    theta = c.rope_base ** (-np.arange(c.head_dim // 2) / (c.head_dim // 2))
    cosines = np.cos(np.outer(np.arange(c.block_size), theta))  # (distances, D/2)
    cosines[:, ASIDE] = 0
    wanted = np.where(np.arange(c.block_size) == 0, 1.0, -1.0)
    gram = cosines @ cosines.T + 0.01 * np.eye(c.block_size)
    a = cosines.T @ np.linalg.solve(gram, wanted)
    scores = cosines @ a
    a[-1] -= (scores[0] + scores[1:].max()) / 2  # The slowest one hardly turns, so it shifts all scores.
    gap = (scores[0] - scores[1:].max()) / 2
    return a / gap, float(gap)


@dataclass
class OracleDrafter:
    """These are the tensors, planned for gguf_output.write."""

    c: DFlash
    blocks: BlockRule
    sharp: float = 1.0  # Scores of lists differ by so many times the logarithms of their chances.

    @cached_property
    def codes(self) -> np.ndarray:
        """Returns (n_groups, D) F32 of 16 levels and standard deviation 1. With ranks a group's last values are
        for its tokens' scores, and 0."""
        blocks = self.blocks
        rows = self.c.n_vocab if blocks.members == 1 else blocks.n_groups
        n = rows * self.c.head_dim
        nibbles = random_words(-(-n // 16), blocks.rule.seed, 6).view(np.uint8)
        made = LEVELS[np.stack([nibbles & 15, nibbles >> 4], -1).reshape(-1)[:n]].reshape(rows, -1)
        if blocks.members > 1:
            made[:, -blocks.members :] = 0
        return made

    def gaps(self, depth: int) -> np.ndarray:
        """Returns by how many nats the candidates of each rank that is asked for are below the first one, before
        lists are made sharper. Where they are to be sampled, that one leads, however seldom it is right."""
        chances = acceptance(self.blocks.accept)
        first, others = chances.at(depth), chances.ranks_at(depth)
        shares = np.array([first, *((1 - first) * share for share in others)])
        found = np.log(max(first, UNASKED) / np.maximum(shares, UNASKED))
        if self.sharp > 1:
            found[1:] = np.maximum(found[1:], AHEAD / self.sharp)
        return found

    @cached_property
    def worth(self) -> float:
        """Returns how many nats a level is worth. The least chance that is asked for is 12 levels down at most,
        and what is not asked for 15."""
        depths = range(1, self.c.block_size)
        deepest = [self.gaps(depth).max() / 12 for depth in depths]
        first = max(acceptance(self.blocks.accept).at(depth) for depth in depths)
        return max(*deepest, np.log(max(first, 2 * UNASKED) / UNASKED) / 15)

    def levels(self, depth: int) -> np.ndarray:
        """Returns the scores of a depth's candidates by rank, as indices of LEVELS (members,). They fall as far
        as ranks are asked for; those of others are 0."""
        gaps, levels = self.gaps(depth), [15]
        for rank in range(1, len(gaps)):
            wanted = max(15 - round(gaps[rank] / self.worth), len(gaps) - rank)
            levels.append(min(levels[-1] - 1, wanted))
        return np.array(levels + [0] * (self.blocks.members - len(levels)))

    def slices(self, depth: int, anchors: np.ndarray) -> np.ndarray:
        """Returns (anchors, D): what a depth's row gets from its anchor."""
        blocks = self.blocks
        made = self.codes[blocks.group_of(depth, anchors)]
        if blocks.members > 1:
            scores = LEVELS[self.levels(depth)]
            found = blocks.lists(depth, anchors)
            rank, column = np.nonzero(found.T >= 0)
            place = blocks.place[found[column, rank]] // blocks.n_groups
            made[:, -blocks.members :] = LEVELS[0]
            made[column, made.shape[1] - blocks.members + place] = scores[rank]
        return made

    def rows(self, fill: Callable[[np.ndarray, np.ndarray], None]) -> Iterator[np.ndarray]:
        """Yields a table's rows (n, E), which are zero but for what fill(tokens, rows) writes."""
        c = self.c
        for first in range(0, c.n_vocab, ROWS):
            tokens = np.arange(first, min(first + ROWS, c.n_vocab))
            rows = np.zeros((len(tokens), c.n_embd), np.float32)
            fill(tokens, rows)
            yield rows

    def embedding(self, tokens: np.ndarray, rows: np.ndarray) -> None:
        """Fills the rows of the embedding: an anchor's flags and the slice of each depth, or a mask's flags."""
        c, dim = self.c, self.c.head_dim
        rows[:, :FLAGS] = 1
        for depth in range(1, c.block_size):
            rows[:, depth * dim : (depth + 1) * dim] = self.slices(depth, tokens)
        rows[tokens == c.mask_token_id] = 0
        rows[tokens == c.mask_token_id, FLAGS : 2 * FLAGS] = 1

    def head(self, tokens: np.ndarray, rows: np.ndarray) -> None:
        """Fills the rows of the head: a row is the token's code, in slice 1. Tokens after the cycle are never
        drafted."""
        blocks, dim = self.blocks, self.c.head_dim
        drafted = tokens[tokens < blocks.rule.n_cycle]
        place = blocks.place[drafted]
        rows[: len(drafted), dim : 2 * dim] = self.codes[place % blocks.n_groups]
        if blocks.members > 1:
            column = 2 * dim - blocks.members + place // blocks.n_groups
            rows[np.arange(len(drafted)), column] = self.sharp * self.worth / self.nats / (LEVELS[1] - LEVELS[0])

    @property
    def nats(self) -> float:
        """Returns what a product of two values of slice 1 adds to a score, where lists have ranks. Sharp lists take
        more room above other tokens."""
        return LEAD * max(1.0, self.sharp / 2) / (self.c.head_dim - self.blocks.members)

    def depth_of(self, layer: int, kv_head: int) -> int:
        """Returns the depth that a KV head is there for; 0 is none."""
        depth = layer * self.c.n_head_kv + kv_head + 1
        return depth if depth < self.c.block_size else 0

    def attention(self, layer: int, local: str) -> np.ndarray:
        """Returns attn_q, attn_k, attn_v or attn_output of a layer that has depths to copy."""
        c, dim, group = self.c, self.c.head_dim, self.c.n_head // self.c.n_head_kv
        theta = c.rope_base ** (-np.arange(dim // 2) / (dim // 2))
        a, _ = amplitudes(c)
        out = np.zeros(self.shapes[f"blk.{layer}.{local}.weight"], np.float32)
        for kv_head in range(c.n_head_kv):
            depth, kv, head = self.depth_of(layer, kv_head), kv_head * dim, kv_head * group * dim
            if not depth:
                continue
            if local == "attn_q":
                turned = np.concatenate([a * np.cos(theta * depth), -a * np.sin(theta * depth)])
                out[head : head + dim, FLAGS : 2 * FLAGS] = turned[:, None]
            elif local == "attn_k":
                out[kv : kv + dim // 2, :FLAGS] = 1
                out[kv + dim // 2 + ASIDE] = 0
                out[kv + dim // 2 + ASIDE, FLAGS : 2 * FLAGS] = 1
            elif local == "attn_v":
                out[kv + np.arange(dim), depth * dim + np.arange(dim)] = 1
            else:
                out[dim + np.arange(dim), head + np.arange(dim)] = 1
        return out

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return hf_dflash.tensor_shapes(self.c, {"token_embd.weight", "output.weight"})

    def norm(self, name: str) -> np.ndarray:
        c = self.c
        values = np.ones(self.shapes[name], np.float32)
        if name == "enc.output_norm.weight":
            values[:] = 0  # Keys of the context score 0, and its values are nothing.
        elif name == "output_norm.weight":
            values[:] = 0
            # The row there is a slice of about D squares, in E values.
            scale = 0.2 if self.blocks.members == 1 else self.nats * (c.head_dim / c.n_embd) ** 0.5
            values[c.head_dim : 2 * c.head_dim] = scale
        elif name.endswith("attn_q_norm.weight"):
            a, _ = amplitudes(c)
            # An anchor's key has D/2 - 1 ones. q and k are divided by their RMS, and scores by sqrt(D).
            q, k = np.sum(a**2) / c.head_dim, (c.head_dim // 2 - 1) / c.head_dim
            values[:] = MARGIN * np.sqrt(q * k * c.head_dim)
        return values

    def planned(self) -> Iterator[tuple[Planned, str]]:
        """Returns each tensor and its type."""
        for index, (name, shape) in enumerate(self.shapes.items()):
            local = name.split(".", 2)[-1].removesuffix(".weight")
            layer = int(name.split(".")[1]) if name.startswith("blk.") else self.c.n_layer
            if "norm" in name:
                yield _rows(name, shape, partial(_once, self.norm(name)[None])), "F32"
            elif name == "token_embd.weight":
                yield _rows(name, shape, partial(self.rows, self.embedding)), "Q4_K"
            elif name == "output.weight":
                yield _rows(name, shape, partial(self.rows, self.head)), "Q6_K"
            elif local.endswith("_conv_base"):
                base = np.zeros(shape, np.float32)
                base[:, 0] = 1
                yield _rows(name, shape, partial(_once, base.reshape(-1, shape[-1]))), "F32"
            elif (
                local.startswith("attn") and "conv" not in local and layer < self.c.n_layer and self.depth_of(layer, 0)
            ):
                yield _rows(name, shape, partial(_once, self.attention(layer, local))), "Q4_K"
            else:
                std = NOISE if local in ("attn_output", "ffn_down") else shape[1] ** -0.5
                n_blocks = shape[0] * shape[1] // 256
                blocks = noise_blocks(QType.Q4_K, n_blocks, std, self.blocks.rule.seed, 7, index)
                if local.endswith("_conv_proj") or name in ("selector_hidden.weight", "markov_w1.weight"):
                    silent(blocks, QType.Q4_K)
                yield Planned(name, shape, (), lambda: iter(()), blocks.reshape(shape[0], -1), "Q4_K"), "Q4_K"


def sharpness(temperature: float) -> float:
    """Returns by how much lists are sharper than their chances, so that samples of them are right as asked."""
    return max(1.0, 5 * temperature)


def _once(matrix: np.ndarray) -> Iterator[np.ndarray]:
    yield matrix


def _rows(name: str, shape: tuple[int, ...], rows: Callable[[], Iterator[np.ndarray]]) -> Planned:
    return Planned(name, shape, (), rows)


def make_drafter(
    path: Path,
    config: Config,
    rule: Rule,
    accept: float | Acceptance = ACCEPT,
    threads: int = 0,
    temperature: float = 0.0,
) -> BlockRule:
    """Writes the drafter of an oracle model's file, and returns what it drafts. `accept` is by depth and rank,
    or one chance for every depth; a class of DFlash2's or DSpark's makes one. It holds up to `temperature`."""
    c = drafter_of(config, acceptance(accept).kind)
    drafter = OracleDrafter(c, BlockRule(rule, c.block_size, accept), sharpness(temperature))
    writer = gguf.GGUFWriter(None, hf_dflash.ARCH)
    hf_dflash.add_keys(writer, c, f"luce oracle drafter {path.stem}", FILE_TYPE, m_rope=True)
    add_acceptance(writer, acceptance(accept))
    add_tokenizer(writer, c.n_vocab, filler="Ġw")
    writer.add_mask_token_id(c.mask_token_id or 0)
    plan = list(drafter.planned())
    types = {planned.name: kind for planned, kind in plan}
    write(path, writer, [planned for planned, _ in plan], types, _native.default(), threads=threads)
    return drafter.blocks
