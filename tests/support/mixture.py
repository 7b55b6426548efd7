"""A small mixture of experts, whose matrices any weight type can have."""

from __future__ import annotations

from tiny import Config

CONFIG = Config(n_layer=2, interval=2, n_embd=256, n_head=4, n_head_kv=2, n_k_head=2, n_v_head=4,
                state_size=64, n_expert=8, n_expert_used=3, n_ff_expert=256, n_ff_shared=256,
                n_nextn=1)  # fmt: skip
FUSED = Config(**{**CONFIG.__dict__, "fused_experts": True, "n_ff_shared": 0})
