"""Every weight type computes what its weights say, and a row's logits do not depend on the other rows
of its step: same bits at any width, in any tree, after any accept pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path

import drive
import numpy as np
import pytest
import ref
import tiny
import tiny_gemma4
from depth import deeper, deeper_but
from gemma4_reference import Reference
from tiny import Config

from luce.convert.gemma4_layout import Config as Gemma4
from luce.convert.gemma4_layout import tensor_shapes
from luce.errors import UnsupportedError
from luce.native import Library, Model

# Rows have 256 weights, as K-quants need.
CONFIG = Config(n_layer=2, interval=2, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, head_dim=64, rope_dim=16,
                n_k_head=2, n_v_head=4, state_size=64, n_ctx=2048)  # fmt: skip
EXPERTS = tiny.with_experts(CONFIG)
# A GPU's steps fuse most where heads have 128 values (native/src/graph/lower_gpu.cpp).
FUSED = replace(CONFIG, head_dim=128, state_size=128)
# Some rows are no multiple of 256, and windows end within a step's rows.
GEMMA = {
    "gemma4": Gemma4(sliding=(True, True, False), window=20, n_embd=256, n_ff=160, v_is_k=True, n_expert=4,
                     n_expert_used=2, n_ff_expert=96),
    "gemma4-per-layer": Gemma4(sliding=(True, True, False, True, False), window=9, n_embd=256, n_head_kv_swa=1,
                               n_shared_kv=2, n_embd_per_layer=64),
}  # fmt: skip
MIXED = ("MXFP4 experts", "NVFP4 experts", "Q4_K gemma4", "F32 gemma4-per-layer")
UNEVEN = ("Q8_0", "Q5_0", "Q5_1", "IQ4_NL")  # In turn, where rows do not fit a K-quant.
SEED = 21
WIDTHS = (2, 5, 8, 16, 33, 64)
FEW = (5, 33)
# They bound the relative logit error on the CPU. CUDA multiplies F32 as TF32 (measured on an H100: 1.6e-3).
ERROR = {"F32": 1e-5, "F16": 1e-2, "BF16": 5e-2}


def check_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(found).all()
    worst = np.abs(found - expected).max()
    assert found.tobytes() == expected.tobytes(), f"differs by up to {worst:.1e}"


def gemma4_types(c: Gemma4, kind: str) -> dict[str, str]:
    """Returns each tensor's type: `kind`, but where its rows are too short for it, as published files have it."""
    types, other = {}, cycle(UNEVEN)
    for name, shape in tensor_shapes(c).items():
        fits = shape[-1] % 256 == 0 or not kind.endswith("_K")
        types[name] = (kind if fits else next(other)) if tiny_gemma4.quantizable(name) else "F32"
    return types


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("invariance")


@pytest.fixture
def path_of(native: Library, folder: Path) -> Callable[[str], Path]:
    """Makes a model of each weight type, once; "Q4_K experts" is a mixture, "Q4_K fused" has larger heads, and
    "Q4_K gemma4" is another architecture."""

    def make(kind: str) -> Path:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            of, made = kind.split()[-1], partial(drive.quantize, native)
            if gemma4 := GEMMA.get(of):
                types = gemma4_types(gemma4, kind.split()[0])
                tiny_gemma4.write(path, gemma4, tiny_gemma4.layout(gemma4, SEED), types.__getitem__, quantize=made)
                return path
            c = {"experts": EXPERTS, "fused": FUSED}.get(of, CONFIG)
            tiny.write(path, c, tiny.layout(c, SEED), drive.type_of(kind.split()[0]), quantize=made)
        return path

    return make


@pytest.fixture
def model_of(native: Library, path_of: Callable[[str], Path], device: str) -> Callable[[str], Model]:
    def opened(kind: str) -> Model:
        return drive.open_model(native, path_of(kind), device)

    return opened


def tokens_of(seed: int, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, CONFIG.n_vocab, n)]


def check_widths(
    model: Model, prompt: list[int], tried: Sequence[int] = WIDTHS, **params: int | str
) -> None:
    tokens = tokens_of(2, max(tried) + 7)
    n_ctx = len(prompt) + len(tokens)
    one, two = (drive.open_sequence(model, n_ctx=n_ctx, **params | {"n_threads": n}) for n in (1, 2))
    drive.prefill(one, prompt)
    plain = drive.chain_logits(one, tokens, 1)
    for sequence, widths in ((one, tried), (two, tried[1::4])):
        for width in widths:
            sequence.reset()
            drive.prefill(sequence, prompt)
            check_same(drive.chain_logits(sequence, tokens, width), plain)


@pytest.mark.parametrize("kind", deeper_but(drive.WEIGHT_TYPES, *drive.WEIGHT_TYPES[::3]))
def test_weight_type_computes_what_its_weights_say(
    kind: str,
    native: Library,
    path_of: Callable[[str], Path],
    device: str,
    record_property: Callable[[str, object], None],
) -> None:
    """No comparison is exact: activations are rounded to 8 bits beside quantised weights."""
    path, tokens = path_of(kind), tokens_of(1, 24)
    expected = ref.Reference(CONFIG, ref.read_gguf(str(path))).feed(tokens)
    sequence = drive.open_sequence(drive.open_model(native, path, device), n_ctx=64)
    verified = drive.chain_logits(sequence, tokens, 24)
    sequence.reset()
    drive.prefill(sequence, tokens)
    size = np.linalg.norm(expected) / np.sqrt(len(tokens))
    error = np.linalg.norm(verified - expected) / np.sqrt(len(tokens)) / size
    record_property("relative_logit_error", float(error))
    print(f"{kind}: relative logit error {error:.1e}")
    allowed = 3e-3 if kind == "F32" and not device.startswith("cpu") else ERROR.get(kind, 0.1)
    assert error < allowed
    assert np.linalg.norm(sequence.logits(0) - expected[-1]) < 2 * allowed * size


@pytest.mark.parametrize(
    ("kind", "widths"),
    [*product((*drive.WEIGHT_TYPES[::2], *MIXED), (FEW,)), *deeper(*product((*drive.WEIGHT_TYPES, *MIXED), (WIDTHS,)))],
    ids=lambda value: {FEW: "few", WIDTHS: "all"}.get(value))  # fmt: skip
def test_width_changes_no_bit(
    kind: str, widths: Sequence[int], model_of: Callable[[str], Model], device: str
) -> None:
    if kind == "NVFP4 experts" and not device.startswith("cpu"):
        with pytest.raises(UnsupportedError, match="no experts on a GPU"):
            model_of(kind)
        return
    check_widths(model_of(kind), tokens_of(1, 9), widths)


@pytest.mark.parametrize("kind", ["Q4_K gemma4", "Q5_K gemma4-per-layer", "Q8_0 gemma4"])
def test_gemma4_computes_what_its_weights_say(kind: str, native: Library, path_of: Callable[[str], Path]) -> None:
    """No comparison is exact: activations are rounded to 8 bits beside quantised weights."""
    path, tokens = path_of(kind), tokens_of(1, 60)
    config = GEMMA[kind.split()[-1]]
    expected = Reference(config, ref.read_gguf(str(path))).logits(np.array(tokens))
    sequence = drive.open_sequence(drive.open_model(native, path), n_ctx=64)
    found = drive.chain_logits(sequence, tokens, 20)
    assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Q4_K fused", "Q8_0 fused", "Q6_K experts", "Q4_K gemma4", "Q4_K gemma4-per-layer"])
def test_no_width_at_all_changes_a_bit(kind: str, model_of: Callable[[str], Model]) -> None:
    check_widths(model_of(kind), tokens_of(1, 9), range(1, 65))


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0"])
def test_width_changes_no_bit_with_kv(kv_type: str, model_of: Callable[[str], Model]) -> None:
    check_widths(model_of("Q4_K"), tokens_of(1, 9), kv_type=kv_type)


@pytest.mark.parametrize("kv_type", deeper_but(["f32", "f16", "q8_0", "q4_0"], "f16", "q8_0"))
def test_width_changes_no_bit_behind_windows_that_cross_pages(
    kv_type: str, model_of: Callable[[str], Model]
) -> None:
    check_widths(model_of("Q8_0 gemma4-per-layer"), tokens_of(1, 240), (5, 33), kv_type=kv_type)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("n_prompt", [240, *deeper(500, 1000)])
def test_width_changes_no_bit_far_into_the_context(
    kv_type: str, n_prompt: int, model_of: Callable[[str], Model]
) -> None:
    """Steps that cross the sizes at which attention kernels change: 256, 512 and 1024 cells."""
    check_widths(model_of("Q8_0"), tokens_of(1, n_prompt), kv_type=kv_type)


@pytest.mark.parametrize(
    ("kind", "n_rows"),
    [*product(("F32", "Q4_K", "Q4_K experts", "Q4_K gemma4", "F32 gemma4-per-layer"), (3, 23)),
     *deeper(("Q6_K", 16), ("Q6_K", 64), ("F32 experts", 16), ("F32 experts", 64), ("Q4_K", 64), ("Q4_K experts", 64),
             ("Q4_K gemma4", 64), ("F32 gemma4-per-layer", 64))])  # fmt: skip
def test_tree_rows_equal_plain_decoding_of_their_path(
    kind: str, n_rows: int, model_of: Callable[[str], Model]
) -> None:
    rng = np.random.default_rng(n_rows)
    model, prompt, tokens = model_of(kind), tokens_of(3, 21), tokens_of(4, n_rows)
    tree, plain = (drive.open_sequence(model, n_ctx=128) for _ in range(2))
    drive.prefill(tree, prompt)
    parents = drive.random_tree(rng, n_rows)
    drive.verify(tree, tokens, parents)
    leaves = sorted(set(range(n_rows)) - set(parents))
    for leaf in leaves[:10]:
        path = drive.root_path(parents, leaf)
        plain.reset()
        drive.prefill(plain, prompt)
        expected = drive.chain_logits(plain, [tokens[r] for r in path], 1)
        check_same(np.stack([tree.logits(r) for r in path]), expected)


@pytest.mark.parametrize(
    ("kind", "kv_type"), [*(("Q4_K", kv) for kv in ("f32", "f16", "q8_0", "q4_0")), ("Q4_K experts", "f16"),
     ("Q4_K gemma4", "f16"), ("F32 gemma4-per-layer", "f32")],
)
def test_any_accept_pattern_leaves_what_plain_decoding_leaves(
    kind: str, kv_type: str, model_of: Callable[[str], Model]
) -> None:
    rng = np.random.default_rng(7)
    model, prompt = model_of(kind), tokens_of(5, 17)
    tree, plain = (drive.open_sequence(model, n_ctx=512, kv_type=kv_type) for _ in range(2))
    drive.prefill(tree, prompt)
    drive.prefill(plain, prompt)
    for _ in range(16):
        n = int(rng.integers(1, 33))
        tokens = [int(t) for t in rng.integers(0, CONFIG.n_vocab, n)]
        parents = drive.random_tree(rng, n)
        if rng.random() < 0.3:
            drive.verify(tree, tokens_of(8, 11))  # The next one replaces it, so it leaves no trace.
        drive.verify(tree, tokens, parents)
        path = drive.root_path(parents, int(rng.integers(n)))
        path = path[: int(rng.integers(1, len(path) + 1))]
        found = np.stack([tree.logits(r) for r in path])
        tree.commit(path)
        check_same(found, np.stack([drive.step(plain, tokens[r]) for r in path]))
        assert tree.info.n_past == plain.info.n_past


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_K experts"])
def test_accepting_all_rows_of_full_steps(kind: str, model_of: Callable[[str], Model]) -> None:
    model, prompt = model_of(kind), tokens_of(9, 5)
    wide, plain = (drive.open_sequence(model, n_ctx=512) for _ in range(2))
    drive.prefill(wide, prompt)
    drive.prefill(plain, prompt)
    for i in range(4):
        tokens = tokens_of(30 + i, 64)
        check_same(drive.chain_logits(wide, tokens, 64), drive.chain_logits(plain, tokens, 1))


@pytest.mark.parametrize("kv_type", deeper_but(("f32", "f16", "q8_0", "q4_0"), "f16"))
@pytest.mark.parametrize("kind", ["F32", "Q4_K", "Q4_K experts"])
def test_two_runs_give_the_same_bits(kind: str, kv_type: str, model_of: Callable[[str], Model]) -> None:
    """On every device there are no floating-point atomics and no races. Steps are plain and wide."""
    model, prompt, tokens = model_of(kind), tokens_of(1, 70), tokens_of(2, 40)
    runs = []
    for _ in range(3):
        sequence = drive.open_sequence(model, n_ctx=256, kv_type=kv_type)
        drive.prefill(sequence, prompt)
        wide, plain = (drive.chain_logits(sequence, tokens, width) for width in (8, 1))
        runs.append(wide.tobytes() + plain.tobytes())
    assert runs[0] == runs[1] == runs[2]
