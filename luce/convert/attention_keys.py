"""Writes the keys of attention layers, which a model and a drafter have alike."""

from __future__ import annotations

from typing import Protocol

import gguf


class AttentionSizes(Protocol):
    """Has the hyperparameters of these keys, by GGUF's names."""

    @property
    def n_head(self) -> int: ...
    @property
    def n_head_kv(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def rope_base(self) -> float: ...
    @property
    def rope_dim(self) -> int: ...


def add_attention_keys(w: gguf.GGUFWriter, c: AttentionSizes) -> None:
    """Adds the keys of heads, norms and rotary positions."""
    w.add_head_count(c.n_head)
    w.add_head_count_kv(c.n_head_kv)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.eps)
    w.add_rope_freq_base(c.rope_base)
    w.add_rope_dimension_count(c.rope_dim)
