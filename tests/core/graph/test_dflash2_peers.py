"""Compares the goldens of DFlash2 with z-lab's own code, where it is there (pip install --no-deps dflash==0.1.0)."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
zlab = pytest.importorskip("dflash.model")
pytestmark = pytest.mark.references

import make_dflash2_goldens as equations  # noqa: E402
from checkout import GOLDENS  # noqa: E402
from tiny_dflash2 import CASES, More  # noqa: E402

from luce.convert import hf_dflash  # noqa: E402

# It has one key of causality for all layers, and drafts with the masks' rows alone.
ALIKE = [
    name for name, case in CASES.items()
    if case.taps and not case.anchor_drafts and len(set(case.base.drafter.causal)) == 1
]  # fmt: skip


def drafter_of(case: More) -> torch.nn.Module:
    c = case.base.drafter
    config = transformers.Qwen3Config(
        hidden_size=c.n_embd, intermediate_size=c.n_ff, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
        num_key_value_heads=c.n_head_kv, head_dim=c.head_dim, rms_norm_eps=c.eps, vocab_size=c.n_vocab,
        attention_bias=False, rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
        layer_types=["sliding_attention" if sliding else "full_attention" for sliding in c.sliding],
        sliding_window=c.window, use_sliding_window=c.window is not None,
    )  # fmt: skip
    config.is_causal, config.num_target_layers = c.causal[0], case.base.target.n_layer
    config.dflash_config = {
        "block_size": c.block_size, "mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids),
        "conv_kernel_size": case.taps, "conv_group_size": case.group, "selector_rank": case.rank,
        "selector_top_k": case.top_k, "output_multiplier": case.logit_scale, "final_logit_softcapping": c.softcap,
    }  # fmt: skip
    drafter = zlab.DFlash2DraftModel(config).float().eval()
    made = {
        hf_dflash.source_name(name): x
        for name, x in equations.Block(case).w.items()
        if name not in ("token_embd.weight", "output.weight")
    }
    named = {f"{name}.weight" if name.endswith("_codebook") else name: x for name, x in made.items()}
    drafter.load_state_dict(named, strict=True)
    return drafter


@pytest.mark.parametrize("name", ALIKE)
def test_goldens_are_what_z_lab_computes(name: str) -> None:
    case, golden = CASES[name], dict(np.load(GOLDENS / f"{name}.npz"))
    c, drafter = case.base.drafter, drafter_of(case)
    tokens, streams, embedding, head = equations.seen(case, equations.Block(case))
    n, anchor = len(tokens) - 1, int(tokens[-1])
    rows = torch.tensor([anchor] + [c.mask_token_id] * (c.block_size - 1))
    with torch.no_grad():
        hidden = drafter(
            position_ids=torch.arange(n + c.block_size)[None],
            noise_embedding=(embedding[rows] * (c.embedding_scale or 1.0))[None],
            target_hidden=torch.cat([streams[i] for i in c.target_layer_ids], -1)[None],
        )
        of_head = lambda x: x @ head.T  # noqa: E731
        logits = drafter.compute_logits(hidden, of_head)[0]
        path, _, _ = drafter.propose(hidden[:, 1:], torch.tensor([anchor]), of_head, 0.0)
    assert np.abs(logits.numpy() - golden["logits"]).max() < 1e-4
    assert path[0].tolist() == golden["path"].tolist()


def test_most_cases_are_compared() -> None:
    assert {"dflash2", "dflash2-causal", "dflash2-windows"} <= set(ALIKE)
