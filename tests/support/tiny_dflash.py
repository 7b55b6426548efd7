"""Makes random DFlash drafters for tests: hyperparameters, weights (numpy, F32, by GGUF's names) and files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import box_model
import gguf
import numpy as np
import tiny
import tiny_gemma4
import tiny_vision
from tiny import Config, Weights

from luce.bench.oracle_tokenizer import add_gemma4_tokenizer, add_tokenizer
from luce.convert import hf_dflash
from luce.convert.gemma4_layout import Config as Gemma4
from luce.convert.hf_dflash import DFlash, Yarn

MASK = 300  # No text has this token.


@dataclass(frozen=True)
class Case:
    """A case is a target and a drafter of it. `own` says which of token_embd.weight, output.weight and d2t it
    has."""

    target: Config | Gemma4
    drafter: DFlash
    seed: int
    own: tuple[str, ...] = ()


def drafter(target: Config | Gemma4, **changes: object) -> DFlash:
    """Returns a drafter of two layers over the second and the last but one block, with blocks of 16 that are
    not causal."""
    made = DFlash(
        n_layer=2, n_embd=target.n_embd, n_ff=96, n_head=2, n_head_kv=1, head_dim=64, rope_dim=64,
        n_ctx=target.n_ctx, n_vocab=target.n_vocab, n_vocab_draft=target.n_vocab, rope_base=1e6, eps=1e-6,
        block_size=16, target_layer_ids=(1, target.n_layer - 2), mask_token_id=MASK, sliding=(False, False),
        window=None, causal=(False, False), softcap=None, embedding_scale=None, yarn=None,
    )  # fmt: skip
    made = replace(made, **changes)  # type: ignore[arg-type]
    per_layer = {name: getattr(made, name) for name in ("sliding", "causal")}
    fixed = {name: (x * made.n_layer)[: made.n_layer] for name, x in per_layer.items()}
    return replace(made, **fixed)


TARGET = Config()
WIDE = Config(n_layer=6, n_embd=128, n_ff=192, n_head=4, n_head_kv=2, n_k_head=2, n_v_head=4, n_vocab=512)
CASES: dict[str, Case] = {
    "plain": Case(TARGET, drafter(TARGET, n_layer=3, target_layer_ids=(0, 1, 3)), 21),
    "causal-windows": Case(
        WIDE, drafter(WIDE, n_layer=3, n_ff=160, n_head=4, n_head_kv=2, head_dim=128, rope_dim=128,
                      rope_base=1e4, eps=1e-5, block_size=8, target_layer_ids=(2, 4),
                      causal=(True, False, True), sliding=(True, True, False), window=12), 22),
    "yarn-own-vocabulary": Case(
        WIDE, drafter(WIDE, n_head=6, n_head_kv=2, n_vocab_draft=200, target_layer_ids=(1, 2, 4, 5),
                      block_size=5, softcap=4.0, embedding_scale=3.0, causal=(True,),
                      yarn=Yarn(4.0, 32, None, None, None)), 23,
        ("token_embd.weight", "output.weight", "d2t")),
    "yarn-said": Case(
        TARGET, drafter(TARGET, n_layer=1, head_dim=256, rope_dim=256, n_head_kv=2, target_layer_ids=(2,),
                        yarn=Yarn(2.5, 64, 1.7, 16.0, 2.0)), 24),
}  # fmt: skip

# As z-lab's for Gemma 4: windows in all layers but the last, which are causal, and neither scale nor cap in the file.
_SLIDING = {"sliding": (True, True, False), "causal": (True, True, False), "window": 9, "n_layer": 3, "block_size": 8}
_DENSE, _PER_LAYER, _UNTIED = (tiny_gemma4.CASES[name] for name in ("dense", "per-layer", "untied"))
GEMMA4: dict[str, Case] = {
    "dense": Case(_DENSE[0], drafter(_DENSE[0], target_layer_ids=(1, 3, 5), **_SLIDING), _DENSE[1]),
    "per-layer": Case(_PER_LAYER[0], drafter(_PER_LAYER[0], target_layer_ids=(0, 2, 5, 8), n_head=4, n_head_kv=2,
                                             head_dim=128, rope_dim=128, n_layer=2, causal=(False,)), _PER_LAYER[1]),
    "untied": Case(_UNTIED[0], drafter(_UNTIED[0], target_layer_ids=(0, 1, 3), **_SLIDING), _UNTIED[1],
                   ("token_embd.weight",)),
}  # fmt: skip

# A drafter of the model that takes images. One layer sees all before a block, and the other the last of it.
VISION = Case(
    tiny_vision.TEXT, drafter(tiny_vision.TEXT, rope_base=1e4, block_size=6, target_layer_ids=(0, 1, 3), window=20,
                              sliding=(True, False), causal=(True, False)), tiny_vision.TEXT_SEED)  # fmt: skip

# This is the drafter in the box, as its file says (test_dflash_goldens).
BOX = drafter(
    box_model.CONFIG, n_layer=4, n_ff=768, n_head=4, n_head_kv=2, target_layer_ids=(1, 4, 6, 9),
    mask_token_id=4095,
)  # fmt: skip


def weights(case: Case) -> Weights:
    c, rng = case.drafter, tiny._Random(case.seed)
    made: Weights = {}
    for name, shape in hf_dflash.tensor_shapes(c, set(case.own)).items():
        if name == "d2t":
            order = np.argsort(rng.uniform(0, 1, c.n_vocab), kind="stable")
            made[name] = np.sort(order[: c.n_vocab_draft]).astype(np.int64)
        elif "norm" in name:
            made[name] = rng.uniform(0.5, 1.5, *shape)
        elif name == "token_embd.weight":
            made[name] = rng.uniform(-0.5, 0.5, *shape)
        else:
            made[name] = rng.matrix(*shape, gain=2.0 if name.startswith("output") else 1.0)
    if isinstance(case.target, Gemma4):
        _suit(made, case.target)
    return made


def sharp(tensors: Weights) -> Weights:
    """Returns a drafter's weights with a sharp attention."""
    return {name: x * tiny_vision.SHARP if "attn_q_norm" in name else x for name, x in tensors.items()}


def _suit(made: Weights, target: Gemma4) -> None:
    """Makes the largest logits be about the target's cap, which has small embeddings, and what layers add large beside
    the mask's embedding."""
    for name in made:
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            made[name] *= 3
    made["output_norm.weight"] *= np.float32(0.25 * (target.softcap or 12.0) / (0.8 * 3**-0.5))
    if "token_embd.weight" in made:  # It is used as the output matrix too.
        made["token_embd.weight"] *= np.float32(1.6 * target.n_embd**-0.5)


def write(
    path: Path,
    case: Case,
    tensors: Mapping[str, np.ndarray],
    *,
    arch: str = hf_dflash.ARCH,
    rename: Callable[[str], str] = lambda name: name,
    keys: Callable[[dict[str, gguf.GGUFValue]], None] = lambda keys: None,
    kind: str = "F32",
) -> Path:
    """Writes a drafter's GGUF, whose matrices have the type `kind`. `arch` and `rename` give another layout, and `keys`
    changes what is written."""
    w = gguf.GGUFWriter(path, arch)
    c = case.drafter
    gemma4 = isinstance(case.target, Gemma4)
    hf_dflash.add_keys(w, c, f"tiny-{path.stem}", file_type=0, m_rope=not gemma4)
    if gemma4:
        add_gemma4_tokenizer(w, c.n_vocab)
    else:
        add_tokenizer(w, c.n_vocab)
    w.kv_data[0].pop(gguf.Keys.Tokenizer.MASK_ID, None)  # Gemma 4's tokenizer has one.
    w.add_mask_token_id(c.mask_token_id or 0)
    keys(w.kv_data[0])
    for name, x in tensors.items():
        if kind != "F32" and name.endswith(".weight") and x.ndim == 2:
            typed = gguf.GGMLQuantizationType[kind]
            w.add_tensor(rename(name), gguf.quants.quantize(x, typed), raw_dtype=typed)
        else:
            w.add_tensor(rename(name), x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_target(path: Path, case: Case) -> Path:
    if isinstance(case.target, Gemma4):
        return tiny_gemma4.write(path, case.target, tiny_gemma4.layout(case.target, case.seed))
    return tiny.write(path, case.target, tiny.layout(case.target, case.seed))


def files(folder: Path, case: Case) -> tuple[Path, Path]:
    """Returns the target's file and the drafter's."""
    return write_target(folder / "target.gguf", case), write(folder / "drafter.gguf", case, weights(case))
