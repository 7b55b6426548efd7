"""What a block drafter drafts over a text longer than its window depends on the tokens alone: after checkpoints,
cancels and cuts it has the bits of an engine that has read all in one go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import drive
import numpy as np
import pytest
import tiny_dflash
import tiny_dflash2
from depth import deeper_but, examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tiny_dflash import GEMMA4, Case
from tiny_dflash2 import More

from luce.errors import Cancelled
from luce.native import Engine, Form, Library, Source
from luce.native import Sequence as Timeline
from luce.native.structs import PAGE

N_CTX = 1024


def with_window(case: Case, window: int) -> Case:
    return replace(case, drafter=replace(case.drafter, window=window))


# Windows are of a few rows, or end within a page; of Gemma 4 the trunk has windows too, of 12.
CASES: dict[str, Case | More] = {
    "DFlash": with_window(tiny_dflash.CASES["causal-windows"], 200),
    "DFlash of a short window": tiny_dflash.CASES["causal-windows"],
    "DFlash2": tiny_dflash2.CASES["dflash2-windows"],
    "DSpark": tiny_dflash2.CASES["dspark-reduced"],
    "Gemma 4": with_window(GEMMA4["dense"], 70),
}


@dataclass
class Opened:
    """Engines of one model: `whole` reads any prompt here in one call, and `small` a page at most."""

    case: Case | More
    whole: Engine
    small: Engine
    where: str = "cpu"

    @property
    def base(self) -> Case:
        return self.case.base if isinstance(self.case, More) else self.case

    @property
    def n(self) -> int:
        return self.case.n_draft if isinstance(self.case, More) else self.case.drafter.block_size - 1

    def block(self, sequence: Timeline, anchor: int) -> tuple[list[int], bytes, list[int], bytes]:
        """Returns the drafts behind an anchor, the bits of their logits, and the lists."""
        drive.draft(sequence, anchor, self.n, Source.DFLASH)
        form, k = (Form.CONDITIONAL, self.case.candidates) if isinstance(self.case, More) else (Form.INDEPENDENT, 4)
        lists = sequence.lists(self.n, k, form)
        logits = b"".join(sequence.logits(row).tobytes() for row in range(self.base.drafter.block_size))
        return sequence.drafted(self.n), logits, list(lists.ids), np.array(list(lists.scores), np.float32).tobytes()

    def end(self, sequence: Timeline, first: int) -> tuple[object, ...]:
        """Returns what comes after a prompt: a block, tokens of some rounds, the block then, and the state."""
        before, out = self.block(sequence, first), drive.Decoded([first])
        drive.go_on(sequence, out, 12, (self.n, 0, 2), source=Source.DFLASH)
        return before, out.tokens, self.block(sequence, out.tokens[-1]), sequence.dump()


@pytest.fixture(scope="module", params=deeper_but(CASES, "DFlash", "DSpark", "Gemma 4"))
def opened(
    request: pytest.FixtureRequest, native: Library, device: str, tmp_path_factory: pytest.TempPathFactory
) -> Opened:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("windows")
    files: Callable[[Path], tuple[Path, Path]] = lambda folder: (  # noqa: E731
        tiny_dflash2.files(folder, case) if isinstance(case, More) else tiny_dflash.files(folder, case)
    )
    target, drafter = files(folder)
    model = drive.open_model(native, target, device, drafter=drafter)
    sizes = {"n_ctx": N_CTX, "n_sequences": 2, "n_checkpoints": 3, "blocks": 1, "n_top": 4, "kv_type": "f16"}
    engines = [drive.open_engine(model, n_chunk=n_chunk, **sizes) for n_chunk in (N_CTX, PAGE)]
    return Opened(case, *engines, device)


def edges(window: int) -> list[int]:
    """Returns lengths of texts beside the edges of windows and pages."""
    at = (window, PAGE, PAGE + window, 2 * PAGE, 2 * PAGE + window, 3 * PAGE)
    return [n + more for n in at for more in (-1, 0, 1)]


def cancelled(engine: Engine, call: Callable[[], object]) -> None:
    """Cancels a call, which leaves everything as it was."""
    engine.cancel()
    with pytest.raises(Cancelled):
        call()


@pytest.mark.long
@examples(16, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_drafts_are_those_of_an_engine_that_read_all_in_one_go(opened: Opened, data: st.DataObject) -> None:
    """A prompt is read in parts that end where it may be cut. Between them calls are cancelled, and the text goes on
    from a checkpoint, which lies on the device, in host memory or in bytes, in a sequence that has read other texts."""
    c, small = opened.base.drafter, opened.small
    n = data.draw(st.sampled_from([n for n in edges(c.window or 0) if 0 < n < N_CTX - 40]), "tokens")
    prompt = [int(t) for t in np.random.default_rng(n).integers(0, 256, n)]
    whole = opened.whole.sequence()
    first = whole.prefill(prompt)
    assert first is not None
    expected = opened.end(whole, first)
    whole.close()

    sequence, cut, at = small.sequence(), small.info.n_cut, 0
    found = None
    while at < n:
        event = data.draw(st.sampled_from(["read", "cancel", "draft", "move"]), "event")
        if event == "cancel":
            cancelled(small, partial(sequence.prefill, prompt[at : at + 1], last=False))
        elif event == "draft" and at:  # A block in the midst of a prompt leaves nothing.
            cancelled(small, partial(opened.block, sequence, 9))
            opened.block(sequence, 9)
        elif event == "move" and at:
            kept = sequence.checkpoint()
            sequence.close()
            where, sequence = data.draw(st.sampled_from(["device", "host", "bytes"]), "from"), small.sequence()
            drive.prefill(sequence, [int(t) for t in np.random.default_rng(at).integers(0, 256, 300)])
            opened.block(sequence, 7)
            if where == "host":
                kept.to_host()
            sequence.reset()
            sequence.resume(small.load_checkpoint(kept.save()) if where == "bytes" else kept)
            kept.close()
        end = min(n, at + cut * data.draw(st.integers(1, PAGE // cut), "cuts"))
        found, at = sequence.prefill(prompt[at:end], last=end == n), end
    assert found == first
    assert opened.end(sequence, first) == expected
    sequence.close()


def test_a_window_ends_where_it_should(opened: Opened, native: Library, tmp_path: Path) -> None:
    """Blocks have the bits of a drafter that sees all as long as the last row sees the first position, and no longer.
    So the edges above are edges."""
    c, rows = opened.base.drafter, opened.base.drafter.block_size
    assert c.window is not None and any(c.sliding)
    far = replace(opened.base, drafter=replace(c, window=N_CTX))
    path = tmp_path / "far.gguf"
    if isinstance(opened.case, More):
        tiny_dflash2.write(path, replace(opened.case, base=far), tiny_dflash2.weights(opened.case))
    else:
        tiny_dflash.write(path, far, tiny_dflash.weights(opened.case))
    target = tiny_dflash.write_target(tmp_path / "target.gguf", opened.base)
    model = drive.open_model(native, target, opened.where, drafter=path)
    sees_all = Opened(opened.case, *[drive.open_engine(model, n_ctx=N_CTX, blocks=1, n_top=4, kv_type="f16")] * 2)
    for n in (c.window - rows, c.window - rows + 1):
        blocks = []
        for of in (opened, sees_all):
            sequence = of.whole.sequence()
            drive.prefill(sequence, [int(t) for t in np.random.default_rng(2).integers(0, 256, max(n, 1))])
            blocks.append(of.block(sequence, 5)[1])
            sequence.close()
        assert (blocks[0] == blocks[1]) == (max(n, 1) <= c.window - rows), n
