"""Stages dflash2 and dspark train block drafters whose drafts depend on the draft before.

Both are the DFlash drafter with a low-rank term more: behind token a, token b of a row with state h has the logit
head[b] . h + code(a, h) . successor[b]. In DSpark the code is a's row of a table (the Markov head), in DFlash2 that
times a projection of h (the selector, which chooses among a row's best by head alone). So both logits are trained:
head's, since lists are made of its best, and the sum. Text before a draft is the true one, as it is in a round up to
the first rejected draft.

DFlash2 has convolutions around attention and MLP too, which begin as identities. DSpark drafts with the anchor's row,
and its confidence head learns where the draft is the trunk's own choice. Layouts are z-lab's and RadixArk's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from box import tokens
from box.dflash import BLOCK, Blocks, Drafter, Sizes, round_length
from box.model import Config, Weights, linear, matrix

HEAD_SHARE = 0.3  # This share of the loss is on the logits of head alone.


@dataclass(frozen=True)
class Terms:
    """These are sizes of what a drafter has beside DFlash's tensors."""

    rank: int = 64
    top_k: int = 16  # The selector chooses among so many.
    taps: int = 2
    group: int = 16  # So many values share what a row adds to a kernel.


class Conv(nn.Module):
    def __init__(self, n_embd: int, t: Terms):
        super().__init__()
        kernel = torch.zeros(2, t.taps, n_embd)
        kernel[:, 0] = 1
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = matrix(2 * t.taps * n_embd // t.group, n_embd, 0.0)


class Selector(nn.Module):
    def __init__(self, c: Config, t: Terms):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(c.n_vocab, t.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(c.n_vocab, t.rank))
        self.hidden_projection = matrix(t.rank, c.n_embd)


class MarkovHead(nn.Module):
    def __init__(self, c: Config, t: Terms):
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(c.n_vocab, t.rank), nn.Linear(t.rank, c.n_vocab, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    def __init__(self, c: Config, t: Terms):
        super().__init__()
        self.proj = nn.Linear(c.n_embd + t.rank, 1)


def code(prior: Tensor, mine: Tensor, w: Weights) -> Tensor:
    """Returns (..., R) of the tokens `prior` (...) before rows with states (..., E)."""
    if "markov_head.markov_w1.weight" in w:
        return F.embedding(prior, w["markov_head.markov_w1.weight"]).to(mine.dtype)
    gates = linear(mine, w["candidate_selector.hidden_projection.weight"])
    return F.embedding(prior, w["candidate_selector.predecessor_codebook"]).to(mine.dtype) * gates


def successors(w: Weights) -> Tensor:
    """Returns (V, R)."""
    markov = w.get("markov_head.markov_w2.weight")
    return w["candidate_selector.successor_codebook"] if markov is None else markov


def confidence(mine: Tensor, codes: Tensor, w: Weights) -> Tensor:
    """Returns the logits (...) of a draft's chance, from its row's state (..., E) and the Markov head's code."""
    x = torch.cat([mine, codes], -1).float()
    return F.linear(x, w["confidence_head.proj.weight"], w["confidence_head.proj.bias"]).squeeze(-1)


def block_loss(blocks: Blocks, w: Weights, n_layer: int) -> tuple[Tensor, Tensor]:
    """Returns the loss, and the tokens of a greedy round where the text is the trunk's own choice."""
    mine, teacher = blocks.states(w, n_layer)
    codes = code(blocks.at(blocks.batch), mine, w)
    alone = F.linear(mine, blocks.embedding.to(mine.dtype))
    both = alone + linear(codes, successors(w))
    loss = HEAD_SHARE * blocks.loss(alone, teacher) + (1 - HEAD_SHARE) * blocks.loss(both, teacher)
    right = both.argmax(-1) == teacher.argmax(-1)  # (B, A, n)
    if "confidence_head.proj.weight" in w:  # It changes nothing but itself.
        chance = confidence(mine.detach(), codes.detach(), w)
        loss = loss + F.binary_cross_entropy_with_logits(chance, right.float())
    return loss, round_length(right)


class Conditional(Drafter):
    """A drafter with the terms of its kind: DFlash2 or DSpark."""

    decay = 7.0

    def __init__(self, c: Config, sizes: Sizes, terms: Terms):
        super().__init__(c, sizes)
        self.terms = terms

    def scores(self, logits: Tensor, codes: Tensor) -> Tensor:
        """Returns (..., V): the sum by which a row chooses, from its own logits and the code before it."""
        return logits + linear(codes, successors(self.weights()))

    def drafts(self, logits: Tensor, mine: Tensor, anchors: Tensor) -> Tensor:
        prior, path, w = anchors, [], self.weights()
        for i in range(mine.shape[-2]):
            prior = self.scores(logits[..., i, :], code(prior, mine[..., i, :], w)).argmax(-1)
            path.append(prior)
        return torch.stack(path, -1)


class DFlash2(Conditional):
    kind = "dflash2"

    def __init__(self, c: Config, sizes: Sizes, terms: Terms):
        super().__init__(c, sizes, terms)
        for layer in self.layers:
            layer.attention_conv, layer.mlp_conv = Conv(c.n_embd, terms), Conv(c.n_embd, terms)
        self.candidate_selector = Selector(c, terms)

    def scores(self, logits: Tensor, codes: Tensor) -> Tensor:
        floor = logits.topk(self.terms.top_k, -1).values[..., -1:]
        return super().scores(logits, codes).masked_fill(logits < floor, -torch.inf)

    def hf(self) -> dict[str, object]:
        t = self.terms
        own = {
            "mask_token_id": tokens.special_id(tokens.MASK), "target_layer_ids": self.taps,
            "conv_kernel_size": t.taps, "conv_group_size": t.group, "selector_rank": t.rank,
            "selector_top_k": t.top_k,
        }  # fmt: skip
        return super().hf() | {"architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": own}


class DSpark(Conditional):
    kind = "dspark"
    first = 0

    def __init__(self, c: Config, sizes: Sizes, terms: Terms):
        super().__init__(c, sizes, terms)
        self.markov_head, self.confidence_head = MarkovHead(c, terms), ConfidenceHead(c, terms)

    def hf(self) -> dict[str, object]:
        own = {
            "projector_type": "dspark", "mask_token_id": tokens.special_id(tokens.MASK),
            "target_layer_ids": self.taps, "markov_rank": self.terms.rank, "markov_head_type": "vanilla",
            "enable_confidence_head": True, "confidence_head_with_markov": True,
        }  # fmt: skip
        kind = {"architectures": ["DSparkDraftModel"], "is_causal": False, "sample_from_anchor": True}
        return super().hf() | kind | {"block_size": BLOCK, "dflash_config": own}
