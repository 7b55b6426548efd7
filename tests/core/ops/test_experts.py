"""Checks mixtures of experts: the router's choice at its edges, experts that do not feel which rows chose
them, and the same tokens with drafts as without. (What transformers computes: test_goldens.py.)"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import drive
import gguf
import numpy as np
import pytest
import ref
import tiny
from depth import deeper, deeper_but
from mixture import CONFIG, FUSED
from op_run import op_run
from tiny import Config

from luce.errors import UnsupportedError
from luce.native import File, Library
from luce.native.structs import Sampling

# luce multiplies all types but the last itself.
CASES = {"F32": CONFIG, "Q4_K": CONFIG, "Q6_K": FUSED, "IQ3_S": CONFIG}


@pytest.fixture(scope="module")
def path_of(native: Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("moe")

    def make(kind: str) -> Path:
        path, c = folder / f"{kind}.gguf", CASES[kind]
        if not path.exists():
            tiny.write(path, c, tiny.layout(c, seed=5), drive.type_of(kind),
                       quantize=partial(drive.quantize, native))  # fmt: skip
        return path

    return make


def tokens_of(seed: int, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, CONFIG.n_vocab, n)]


def test_experts_compute_what_their_weights_say(
    native: Library, path_of: Callable[[str], Path], device: str
) -> None:
    """They do so by a prefill and by steps, in F32: rounded activations could choose other experts. A GPU
    rounds them to F16, and its logits were 0.012 off on an H200."""
    bound = 1e-3 if device.startswith("cpu") else 0.03
    tokens = tokens_of(1, 24)
    expected = ref.Reference(CONFIG, ref.read_gguf(str(path_of("F32")))).feed(tokens)
    sequence = drive.open_sequence(drive.open_model(native, path_of("F32"), device), n_ctx=64)
    assert np.abs(drive.chain_logits(sequence, tokens, 24) - expected).max() < bound
    sequence.reset()
    drive.prefill(sequence, tokens)
    assert np.abs(sequence.logits(0) - expected[-1]).max() < bound


def test_forms_of_a_mixtures_file_say_the_same(
    native: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Experts fused or apart, the shared one's gate as {E} or {E, 1}, with a width of dense FFNs or without,
    the head in the same file or in its own: the same bits, drafts too."""
    c = Config(**{**CONFIG.__dict__, "n_nextn": 1})
    fused = Config(**{**c.__dict__, "fused_experts": True})
    weights = tiny.layout(c, 5)
    column = {k: x[None] if "gate_inp_shexp" in k else x for k, x in weights.items()}
    paths = [
        tiny.write(tmp_path / "plain.gguf", c, weights),
        tiny.write(tmp_path / "column.gguf", c, column),
        tiny.write(tmp_path / "fused.gguf", fused, tiny.layout(fused, 5)),
        tiny.write(tmp_path / "trunk.gguf", Config(**{**c.__dict__, "n_nextn": 0}),
                   {k: x for k, x in weights.items() if not k.startswith("blk.2.")}),
    ]  # fmt: skip
    head = tiny.write(tmp_path / "head.gguf", c, tiny.head_only(c, weights))
    add_keys = tiny.add_keys

    def with_width(w: gguf.GGUFWriter, *args: object, **more: object) -> None:
        add_keys(w, *args, **more)  # type: ignore[arg-type]
        w.add_feed_forward_length(512)

    monkeypatch.setattr(tiny, "add_keys", with_width)
    paths.append(tiny.write(tmp_path / "width.gguf", c, weights))
    results = []
    for path in paths:
        with File(path, native) as file:
            named = {tensor.name: tensor.shape for tensor in file.tensors}
        wanted = (256, 1) if path.name == "column.gguf" else (256,)
        assert tuple(named["blk.0.ffn_gate_inp_shexp.weight"]) == wanted
        assert ("blk.0.ffn_gate_up_exps.weight" in named) == (path.name == "fused.gguf")
        model = drive.open_model(native, path, device, head=head if path.name == "trunk.gguf" else True)
        sequence = drive.open_sequence(model, n_ctx=64, n_rows=4, n_draft=3)
        made = drive.decode(sequence, tokens_of(1, 9), 20, 3, logits=True)
        results.append((made.tokens, made.accepted, np.stack(made.logits).tobytes()))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("kind", deeper_but(CASES, "Q6_K"))
def test_a_row_does_not_feel_who_shares_its_experts(
    kind: str, native: Library, path_of: Callable[[str], Path], device: str
) -> None:
    if kind == "IQ3_S" and not device.startswith("cpu"):
        with pytest.raises(UnsupportedError, match="IQ3_S"):
            drive.open_model(native, path_of(kind), device)
        return
    model, prompt, tokens = drive.open_model(native, path_of(kind), device), tokens_of(1, 9), tokens_of(2, 64)
    found = []
    for n_threads, width in ((1, 1), (2, 1), (2, 5), (1, 16), (2, 64)):
        sequence = drive.open_sequence(model, n_ctx=128, n_threads=n_threads)
        drive.prefill(sequence, prompt)
        found.append(drive.chain_logits(sequence, tokens, width).tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=3)])
@pytest.mark.parametrize("kind", [*deeper("F32"), "Q6_K"])
def test_drafts_change_no_token(
    kind: str, sampling: Sampling, native: Library, path_of: Callable[[str], Path], device: str
) -> None:
    model = drive.open_model(native, path_of(kind), device, head=True)
    sequence = drive.open_sequence(model, n_ctx=128, n_rows=9, n_draft=8)
    sequence.set_sampling(sampling)
    plain = drive.decode(sequence, tokens_of(4, 30), 40, logits=True)
    for gamma in (1, 3, 8):
        run = drive.decode(sequence, tokens_of(4, 30), 40, gamma, logits=True)
        assert run.tokens == plain.tokens
        assert np.stack(run.logits).tobytes() == np.stack(plain.logits).tobytes()


# ---- the ops alone


def routed(native: Library, logits: np.ndarray, n_used: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights (rows, n_used) of logits (rows, experts)."""
    shape = (len(logits), 2 * n_used)
    out = op_run(native, "cpu", "route", [logits.astype(np.float32)], [n_used], shape=shape, dtype=np.int32)
    return out[:, :n_used], out[:, n_used:].view(np.float32)


def test_router_at_its_edges(native: Library) -> None:
    """Of equal logits it takes the lowest expert, weights fall and sum to 1, and what is not finite poisons
    its row."""
    logits = np.array([[1, 1, 1, 1], [0, 3, 3, 2], [-1e30, -1e30, 5, -1e30], [1, np.nan, 0, 2],
                       [np.inf, 0, 0, 0], [1e30, 0, 1e30, 0]])  # fmt: skip
    ids, weights = routed(native, logits, 2)
    assert ids[[0, 1, 2, 5]].tolist() == [[0, 1], [1, 2], [2, 0], [0, 2]]
    assert np.allclose(weights[[0, 1, 2, 5]], [[0.5, 0.5], [0.5, 0.5], [1, 0], [0.5, 0.5]])
    assert np.isnan(weights[[3, 4]]).all()
    assert ((ids >= 0) & (ids < 4)).all()


def test_all_rows_choose_one_expert_and_nobody_another(native: Library) -> None:
    rng = np.random.default_rng(1)
    shapes = ((5, 40), (4, 24, 40), (4, 24, 40))
    x, w, up = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    logits = np.zeros((5, 4))
    logits[:, 2], logits[:3, 0], logits[3:, 3] = 9, 5, 5
    ids, _ = routed(native, logits, 2)
    route = np.zeros((5, 4), np.int32)
    route[:, :2] = ids
    out = op_run(native, "cpu", "experts", [route, x, w, up], [0, 2, 0], shape=(10, 24))
    for pair, expert in enumerate(ids.ravel()):
        expected = ref.silu(w[expert] @ x[pair // 2]) * (up[expert] @ x[pair // 2])
        assert np.abs(out[pair] - expected).max() < 1e-4
    assert 1 not in ids
