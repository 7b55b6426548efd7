"""Pages of sliding layers go back when no row sees them any more: an engine has as many as windows and a step take,
whatever the context is, and no bit changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import drive
import numpy as np
import pytest
import tiny_gemma4
from depth import deeper, deeper_but
from op_run import poison

from luce.convert.gemma4_layout import Config
from luce.native import File, Library, Model
from luce.native import Sequence as Timeline
from luce.native.structs import PAGE, EngineParams

CONFIG = Config(sliding=(True, False, True, False), window=7, v_is_k=True)
WINDOWS = (1, 7, 256, 300)
F32 = 4  # bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


def file_of(folder: Path, window: int) -> Path:
    path = folder / f"{window}.gguf"
    if not path.exists():
        config = replace(CONFIG, window=window)
        tiny_gemma4.write(path, config, tiny_gemma4.layout(config, 3))
    return path


@pytest.fixture(params=deeper_but(WINDOWS, 300))
def model(request: pytest.FixtureRequest, native: Library, device: str, folder: Path) -> Model:
    path = file_of(folder, request.param)
    return drive.open_model(native, path, device)


def tokens_of(n: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, CONFIG.n_vocab, n)]


def bytes_of_a_position(sliding: bool) -> int:
    return sum(
        2 * CONFIG.head(i) * CONFIG.head_kv(i) * F32 for i in range(CONFIG.n_layer) if CONFIG.sliding[i] == sliding
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_a_longer_context_takes_pages_of_global_layers_alone(window: int, native: Library, folder: Path) -> None:
    file = File(file_of(folder, window), native)
    params = EngineParams(n_chunk=PAGE, n_rows=1, kv_type="f32")
    taken = [file.plan_memory("cpu", replace(params, n_ctx=n * PAGE)).kv for n in (5, 6, 8)]
    assert taken[1] - taken[0] == PAGE * bytes_of_a_position(sliding=False)
    assert taken[2] - taken[0] == 3 * PAGE * bytes_of_a_position(sliding=False)
    of_windows = taken[0] - 6 * PAGE * bytes_of_a_position(sliding=False)  # A step's rows may begin a sixth page.
    # A window, a chunk and rows that are moved touch so many pages, and a window of a prompt that resumes.
    touched = (window + PAGE + 64 - 2) // PAGE + 2 + (window - 2) // PAGE + 2
    assert 0 < of_windows <= touched * PAGE * bytes_of_a_position(sliding=True)


def test_a_text_is_longer_than_all_window_pages(model: Model) -> None:
    """Read in one call it takes as many window pages as others, in chunks as many as there are for a chunk."""
    whole, parts = (drive.open_sequence(model, n_ctx=8 * PAGE, n_chunk=n * PAGE, n_rows=1) for n in (8, 1))
    prompt = tokens_of(7 * PAGE + 9, 4)
    texts = []
    for sequence in (whole, parts):
        texts.append(drive.decode(sequence, prompt, 20, logits=True))
    assert texts[0].tokens == texts[1].tokens
    assert all((a == b).all() for a, b in zip(texts[0].logits, texts[1].logits, strict=True))


def test_pages_that_went_back_are_read_by_nobody(model: Model) -> None:
    """All that is free is NaN before each step. Sequences beside each other take what others give back."""
    sizes = {"n_ctx": 4 * PAGE, "n_chunk": PAGE}
    engine = drive.open_engine(model, n_sequences=3, n_rows=20, **sizes)
    lone = drive.open_sequence(model, n_rows=1, **sizes)
    prompts = [tokens_of(n, n) for n in (3 * PAGE - 20, PAGE + 7, 2 * PAGE - 1)]
    texts = []
    for prompt in prompts:
        lone.reset()
        texts.append(drive.decode(lone, prompt, 40, logits=True))
    for _ in range(2):
        sequences = [engine.sequence() for _ in prompts]
        made: list[drive.Decoded] = []
        for sequence, prompt in zip(sequences, prompts, strict=True):
            for at in range(0, len(prompt), PAGE):
                poison(engine)
                choice = sequence.prefill(prompt[at : at + PAGE], last=at + PAGE >= len(prompt))
            made.append(drive.Decoded([choice or 0], [], [sequence.logits(0)]))
        for n in range(2, 41):
            for sequence, out in zip(sequences, made, strict=True):
                poison(engine)
                drive.go_on(sequence, out, n, logits=True)
        for out, text in zip(made, texts, strict=True):
            assert out.tokens == text.tokens
            assert all((a == b).all() for a, b in zip(out.logits, text.logits, strict=True))
        for sequence in sequences:
            sequence.close()


@pytest.mark.parametrize("n_prompt", [PAGE - 3, *deeper(PAGE - 16, 2 * PAGE - 3)])
def test_rows_that_a_tree_left_elsewhere_are_moved_across_pages(model: Model, n_prompt: int) -> None:
    """A long path of a tree ends where its window begins behind the page that its first rows are moved to."""
    tree, plain = (drive.open_sequence(model, n_ctx=1024, n_chunk=PAGE) for _ in range(2))
    prompt, rng = tokens_of(n_prompt, 1), np.random.default_rng(n_prompt)
    for sequence in (tree, plain):
        drive.prefill(sequence, prompt)
    # Every other row is off the path, so that all of it but its first row is moved.
    for _ in range(4):
        parents = [-1, *[row - 1 if row % 2 else row - 2 for row in range(1, 61)]]
        tokens = [int(token) for token in rng.integers(0, CONFIG.n_vocab, len(parents))]
        poison(tree.engine)
        path = drive.root_path(parents, 60)
        drive.verify(tree, tokens, parents)
        found = np.stack([tree.logits(row) for row in path])
        tree.commit(path)
        assert (found == np.stack([drive.step(plain, tokens[row]) for row in path])).all()
    assert logits_after(tree) == logits_after(plain)


def logits_after(sequence: Timeline) -> bytes:
    return drive.step(sequence, 5).tobytes()
