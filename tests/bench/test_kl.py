"""Runs bench/kl.py: its arithmetic, its reference against transformers, all of it beside a small
llama-server."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import kl
import llamacpp
import numpy as np
import peer_programs
import pytest
import ref
import tiny

from luce.native import Library

CONFIG = tiny.Config(n_embd=256, n_ff=256)
TOKENS, PROMPT = 24, 10

# It answers with what logits.npy says of a prompt's last position, in an order of its own.
LLAMA_SERVER = """
import numpy as np

logits = np.load(here / "logits.npy")
fault = (here / "fault").read_text()

def answer(asked):
    n, row = len(asked["prompt"]), logits[len(asked["prompt"]) - 1]
    order = np.random.default_rng(n).permutation(len(row))[: asked["n_probs"]]
    order = order[1:] if fault == "lacks one" else order
    listed = [{"id": int(i), "logprob": float(row[i])} for i in order]
    assert dict(asked["logit_bias"])[97] == 1e6  # so that no choice is kept back
    read = 1 if asked["cache_prompt"] and fault != "reads all" else n
    return {"timings": {"prompt_n": read}, "completion_probabilities": [{"top_logprobs": listed}]}

serve()
"""


def test_divergence_is_that_of_the_definition() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    expected = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    rows = np.log([p, p, q])
    # The rows' logits have other levels.
    found = kl.divergence(rows + [[3], [0], [-700]], np.log([q, p, p]) - 40)
    # F64 has such an error at a level of 700.
    assert found == pytest.approx([expected, 0, expected], abs=1e-12)
    assert kl.divergence(np.array([[0.0, -1e4]]), np.array([[0.0, -1e5]])) == 0  # Its probability is 0.


def test_a_smaller_divergence_is_no_worse() -> None:
    theirs = np.array([0.1, 0.2, 0.3, 0.2])
    better, worse = kl.compared(theirs / 2, theirs), kl.compared(theirs * 2, theirs)
    assert (better["mean_no_worse"], better["largest_no_worse"]) == (True, True)
    assert (worse["mean_no_worse"], worse["largest_no_worse"]) == (False, False)
    gap = np.array([0.05, 0.1, 0.15, 0.1])
    assert better["mean_difference_in_standard_errors"] == pytest.approx(
        -gap.mean() / (gap.std(ddof=1) / 2), rel=1e-4
    )


def test_the_reference_is_transformers(tmp_path: Path) -> None:
    found = kl.reference_error(tmp_path, threads=1)
    assert found["positions"] == 25
    assert found["max_abs_logit_error"] < 1e-4  # The logits have a standard deviation of 4.
    assert found["largest_kl"] < 1e-9


@pytest.fixture
def server(tmp_path: Path) -> Callable[[np.ndarray, str], Path]:
    """Returns what makes a folder with a llama-server that answers with these logits, or does it wrong."""

    def make(logits: np.ndarray, fault: str = "") -> Path:
        np.save(tmp_path / "logits.npy", logits)
        (tmp_path / "fault").write_text(fault)
        program = tmp_path / "llama-server"
        program.write_text(peer_programs.SERVER.replace("{python}", sys.executable) + LLAMA_SERVER)
        program.chmod(0o755)
        return tmp_path

    return make


@pytest.mark.long
def test_a_peer_in_f32_is_as_good_as_the_reference(
    native: Library, tmp_path: Path, server, device: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    path = tiny.write(tmp_path / "x.gguf", CONFIG, tiny.layout(CONFIG, 3), "Q4_0", quantize=native.quantize)
    (tmp_path / "text").write_text("the text of a test: " * 20)
    args = [path, "--text", tmp_path / "text", "--device", device, "--threads", 1, "--windows", 1, "--tokens",
            TOKENS, "--prompt", PROMPT, "--bin", tmp_path, "--commit", "x", "--save", tmp_path]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["kl.py", *map(str, args)])
    f32 = tmp_path / "f32.gguf"
    kl.write_f32(path, f32, 1)
    (tokens,) = kl.windows_of(path, (tmp_path / "text").read_text(), kl.arguments())
    server(kl.reference_logits(f32, tokens, 1))
    kl.main()
    found = json.loads(capsys.readouterr().out)
    assert [json.loads(p.read_text()) for p in tmp_path.glob("*-kl-*.json")] == [found]
    (row,) = found["files"]
    assert row["positions"] == TOKENS - PROMPT + 1
    assert row["llama.cpp"]["largest_kl"] < 1e-12 and row["llama.cpp"]["top_1_agreement"] == 1
    assert 1e-6 < row["luce"]["mean_kl"] <= row["luce"]["largest_kl"] < 0.1  # Activations are rounded too.
    assert not row["mean_no_worse"] and not row["largest_no_worse"]
    assert row["mean_difference_in_standard_errors"] > 2


@pytest.mark.parametrize(
    ("fault", "message"), [("lacks one", "15 probabilities of 16"), ("reads all", "read 3 tokens, not 1")]
)
def test_a_peer_that_does_something_else_is_an_error(
    tmp_path: Path, server, fault: str, message: str
) -> None:
    folder = server(np.log(np.full((4, 16), 1 / 16)), fault)
    path = tiny.write(tmp_path / "x.gguf", CONFIG, {})  # Only its tokenizer is needed.
    with pytest.raises(llamacpp.PeerError, match=message):
        kl.llamacpp_logprobs(path, [[1, 2, 3, 4]], 2, "cpu", 1, folder, 16)


@pytest.mark.long
def test_the_f32_copy_has_the_weights_of_the_file(tmp_path: Path) -> None:
    for path in kl.write_random(tmp_path, "tiny", ["Q4_K_M"], threads=1):
        copy = tmp_path / "copy.gguf"
        kl.write_f32(path, copy, 1)
        stored, copied = ref.read_gguf(str(path)), ref.read_gguf(str(copy))
        assert stored.keys() == copied.keys()
        assert all(np.array_equal(stored[name], copied[name]) for name in stored)
