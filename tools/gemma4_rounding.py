"""Computes transformers' Gemma 4 as a GPU rounds it: whatever a product reads is rounded to F16, and sums are F32.

It says beforehand how far a random model's logits may be off on a GPU, and whether another expert may be chosen there:
a golden whose logits move by more than the bound of its test fails though each kernel is right. On an H200 the goldens
that it moves by 0.30 to 0.37 were off by 0.26 to 0.31, and those that it moves by 0.07 to 0.18 by 0.07 to 0.12.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import drive
import numpy as np
import torch

PRODUCTS = {"steps": False, "prompts": True}  # Whether weights, Q, K, V and attention's shares are rounded too.


def half(x: torch.Tensor) -> torch.Tensor:
    """Rounds to F16, each row by a power of two of its own, as the kernels do (matmul/quantised.h)."""
    most = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    by = torch.exp2(13 - most.log2().floor())
    return (x * by).half().float() / by


@contextmanager
def rounded(kind: str) -> Iterator[None]:
    """While it is open, transformers' products are those of a GPU's steps, or of its prompts."""
    linear, matmul = torch.nn.functional.linear, torch.matmul  # Linear and experts call the one, attention the other.
    whole = PRODUCTS[kind]

    def of_rows(x, w, bias=None):  # type: ignore[no-untyped-def]
        return linear(half(x), half(w) if whole else w, bias)

    def of_heads(a, b):  # type: ignore[no-untyped-def]
        return matmul(half(a), half(b)) if whole else matmul(a, b)

    with mock.patch("torch.nn.functional.linear", of_rows), mock.patch("torch.matmul", of_heads):
        yield


def run(model, given) -> tuple[np.ndarray, list[np.ndarray]]:  # type: ignore[no-untyped-def]
    """Returns the logits (T, V) of a whole text, which is the arguments of the model's forward, and of each layer's
    router, if it has one, its own (T, experts)."""
    routed: list[np.ndarray] = []

    def keep(module, read, logits):  # type: ignore[no-untyped-def]
        routed.append(logits.reshape(-1, logits.shape[-1]).numpy())

    layers = getattr(model.model, "language_model", model.model).layers
    routers = [layer.router.proj for layer in layers if hasattr(layer, "router")]
    hooks = [router.register_forward_hook(keep) for router in routers]
    with torch.no_grad():
        logits = model(**given).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits, routed


@dataclass(frozen=True)
class Moved:
    """What rounding does to a text: by how much it moves logits (T, V), in steps or in prompts, and of which rows (T)
    the experts may be others: the least one that is chosen and the next one are closer than `ROUTER_GAP`, or than
    rounding moves any such two of the layer."""

    logits: dict[str, np.ndarray]
    doubtful: np.ndarray


def moved(model, text: np.ndarray) -> Moved:  # type: ignore[no-untyped-def]
    given = {"input_ids": torch.from_numpy(text).long()[None], "use_cache": False}
    logits, routed = run(model, given)
    gaps = [_gaps(x, x, model.config.top_k_experts) for x in routed]
    most = [drive.ROUTER_GAP] * len(gaps)
    found = {}
    for kind in PRODUCTS:
        with rounded(kind):
            other, rerouted = run(model, given)
        found[kind] = np.abs(other - logits)
        for layer, (x, y) in enumerate(zip(routed, rerouted, strict=True)):
            most[layer] = max(most[layer], np.abs(_gaps(x, y, model.config.top_k_experts) - gaps[layer]).max())
    doubtful = np.zeros(len(text), bool)
    for gap, by in zip(gaps, most, strict=True):
        doubtful |= gap < by
    return Moved(found, doubtful)


def margins(model, given) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    """Returns of each layer with experts by how much the logit of the last expert that is chosen is above that of the
    first one left out, in the row where they are closest, and by how much rounding moves any such pair at most. Of what
    run() takes; the model's config is that of a text model with others."""
    n_used = model.config.text_config.top_k_experts
    routed = run(model, given)[1]
    gaps, most = [_gaps(x, x, n_used) for x in routed], [0.0] * len(routed)
    for kind in PRODUCTS:
        with rounded(kind):
            rerouted = run(model, given)[1]
        for layer, (x, y) in enumerate(zip(routed, rerouted, strict=True)):
            most[layer] = max(most[layer], float(np.abs(_gaps(x, y, n_used) - gaps[layer]).max()))
    return np.array([gap.min() for gap in gaps]), np.array(most)


def _gaps(x: np.ndarray, y: np.ndarray, n_used: int) -> np.ndarray:
    """Returns by how much y's logit of the last expert that x chooses is above that of the first one it leaves out."""
    order, row = np.argsort(-x, -1), np.arange(len(x))
    return y[row, order[:, n_used - 1]] - y[row, order[:, n_used]]
