"""Pages and slots of an engine: running out of them changes nothing, and every one is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import drive
import nan_model
import numpy as np
import pytest
from depth import deeper, deeper_but
from nan_model import state_of, tokens_of

from luce.errors import OutOfMemory, StateError
from luce.native import Checkpoint, Engine, Model
from luce.native import Sequence as Timeline

pytestmark = pytest.mark.sanitize


def open_engine(model: Model, **params: int | str) -> Engine:
    filled: dict[str, int | str] = {
        "n_ctx": 1100,
        "n_sequences": 2,
        "n_checkpoints": 4,
        "n_rows": 9,
        "n_draft": 8,
    }
    return nan_model.open_engine(model, **filled | params)


def test_slots_that_are_out_are_an_error_that_changes_nothing(model: Model) -> None:
    for n_checkpoints in (0, 2):
        engine = open_engine(model, n_sequences=1, n_checkpoints=n_checkpoints)
        sequence = engine.sequence()
        sequence.prefill(tokens_of(256), last=False)
        kept = [sequence.checkpoint() for _ in range(n_checkpoints)]
        before = state_of(engine, sequence)
        with pytest.raises(OutOfMemory, match=str(n_checkpoints)):
            sequence.checkpoint()
        assert state_of(engine, sequence) == before
        if kept:
            data = kept[0].save()
            loaded = engine.load_checkpoint(data)  # It is in host memory, so no slot is needed.
            with pytest.raises(OutOfMemory, match="2"):
                loaded.to_device()
            assert not loaded.info.on_device and loaded.save() == data
            assert state_of(engine, sequence) == before
            kept[1].to_host()
            loaded.to_device()
            sequence.resume(loaded)


def test_an_engine_without_slots_resumes_from_host_memory(model: Model) -> None:
    source = open_engine(model).sequence()
    source.prefill(tokens_of(256), last=False)
    data = source.checkpoint().save()
    expected = drive.decode(source, tokens_of(300), 8, 2)
    engine = open_engine(model, n_sequences=1, n_checkpoints=0)
    sequence, loaded = engine.sequence(), engine.load_checkpoint(data)
    for _ in range(2):
        sequence.resume(loaded)
        rest = drive.Decoded([drive.start(sequence, tokens_of(300)[256:])])
        assert drive.go_on(sequence, rest, 8, 2) == expected
        with pytest.raises(OutOfMemory, match="0"):
            loaded.to_device()
    loaded.close()
    assert sequence.info.n_pages == 2 == engine.info.n_pages - engine.info.pages_free


CUTS = [(256,), (256, 512, 768), (512, 768), (256, 1024)]


@pytest.mark.parametrize("cuts", deeper_but(CUTS, CUTS[1]), ids=str)
def test_a_prompt_is_resumed_at_any_page_that_it_is_cut_at(cuts: tuple[int, ...], model: Model) -> None:
    """Chunks have two pages here, and a prompt is cut at ends of chunks and at some pages between them. From
    each of these it goes on with the tokens, logits and state of a cold prompt that is cut at the same ones,
    after every round trip."""
    prompt, ends = tokens_of(1030), sorted({*cuts, 512, 1024})
    engine, other = (open_engine(model, n_sequences=n, n_chunk=512) for n in (2, 3))
    source, sequence, elsewhere = engine.sequence(), engine.sequence(), other.sequence()

    def read(into: Timeline, to: int) -> None:
        done = into.info.n_past
        for begin, end in pairwise([done, *(end for end in ends if done < end <= to)]):
            into.prefill(prompt[begin:end], last=False)

    def finished(into: Timeline) -> tuple[list[int], list[bytes], bytes]:
        read(into, 1024)
        text = drive.Decoded([drive.start(into, prompt[1024:])], [], [into.logits(0)])
        drive.go_on(into, text, 10, (2, 0), logits=True)
        return text.tokens, [row.tobytes() for row in text.logits], into.dump()

    cold = finished(source)
    for end in ends:
        source.reset()
        read(source, end)
        checkpoint = source.checkpoint()
        data = checkpoint.save()
        for into in (sequence, elsewhere):
            loaded = into.engine.load_checkpoint(data)
            for move in (loaded.to_host, loaded.to_device):
                move()
                into.resume(loaded)
                assert finished(into) == cold
            loaded.close()
        sequence.resume(checkpoint)
        assert finished(sequence) == cold
        checkpoint.close()


def test_a_checkpoint_that_comes_and_goes_is_counted_once(model: Model) -> None:
    """Pages and slots of copies that are on their way to the host count as free."""
    engine = open_engine(model, n_ctx=1024, n_checkpoints=2)
    sequence = engine.sequence()
    drive.prefill(sequence, tokens_of(512), last=False)
    free = engine.info
    with sequence.checkpoint() as checkpoint:
        sequence.reset()
        for _ in range(5):
            checkpoint.to_device()
            checkpoint.to_host()
            assert engine.info.checkpoints_free == 2
            assert engine.info.pages_free == free.pages_free + 2


def test_pages_that_are_out_are_an_error_that_changes_nothing(model: Model) -> None:
    """That holds of every call that takes some; the message says how many are needed and free."""
    engine = open_engine(model, n_ctx=1024, n_pages=5)
    first, second = engine.sequence(), engine.sequence()
    drive.prefill(first, tokens_of(512), last=False)
    checkpoint = first.checkpoint()
    data = checkpoint.save()
    checkpoint.to_host()
    checkpoint.save()  # It has left the device.
    drive.prefill(second, tokens_of(256), last=False)
    drive.prefill(first, tokens_of(256, seed=2))
    # All five are taken, and 6 positions of the last one are free.
    drive.prefill(second, tokens_of(250, seed=3))
    assert engine.info.pages_free == 0
    before = state_of(engine, first, second)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("1 KV", lambda: first.prefill(tokens_of(100))),
        ("1 KV", lambda: drive.verify(first, [1])),
        ("1 KV", lambda: drive.verify(second, [1] * 7)),
        ("1 KV", lambda: drive.draft(second, 1, 7)),
        ("2 KV", lambda: checkpoint.to_device()),
        ("2 KV", lambda: second.resume(checkpoint)),
        ("2 KV", lambda: first.resume(engine.load_checkpoint(data))),
    ]
    for needed, call in calls:
        with pytest.raises(OutOfMemory, match=f"{needed}.*0 of 5 are free"):
            call()
        assert state_of(engine, first, second) == before
        assert not first.info.failed and not second.info.failed
    assert len(drive.verify(second, [1] * 6)) == 6
    first.reset()
    assert engine.info.pages_free == 3
    for _, call in calls[2:]:
        call()


class Accounts:
    """Says what pages an engine's sequences and checkpoints must hold, and what their states must be."""

    def __init__(self, engine: Engine, alone: Timeline) -> None:
        self.engine, self.alone = engine, alone
        # Each has its pages and its history.
        self.sequences: list[tuple[Timeline, list[object], list[tuple[str, int]]]] = []
        self.checkpoints: list[tuple[Checkpoint, list[object] | None, list[tuple[str, int]]]] = []
        self.states: dict[tuple[tuple[str, int], ...], bytes] = {}

    def check(self) -> None:
        """Checks counts, and of one sequence the state."""
        info = self.engine.info
        held = {id(page) for _, pages, _ in [*self.sequences, *self.checkpoints] for page in pages or ()}
        on_device = sum(pages is not None for _, pages, _ in self.checkpoints)
        assert info.pages_free == info.n_pages - len(held)
        assert info.sequences_free == info.n_sequences - len(self.sequences)
        assert info.checkpoints_free == info.n_checkpoints - on_device
        for sequence, pages, _ in self.sequences:
            assert sequence.info.n_pages == len(pages)

    def check_state(self, at: int) -> None:
        sequence, _, history = self.sequences[at]
        key = tuple(history)
        if key not in self.states:
            self.alone.reset()
            for kind, value in history:
                if kind == "chunk":
                    self.alone.prefill(tokens_of(256, seed=value), last=False)
                else:
                    drive.step(self.alone, value)
            self.states[key] = self.alone.dump()
        assert sequence.dump() == self.states[key]

    def free(self) -> int:
        return self.engine.info.pages_free


def grown(pages: list[object], n_past: int, n: int) -> list[object]:
    """Returns the pages of a sequence that is to hold n positions more."""
    return pages + [object() for _ in range(-(-(n_past + n) // 256) - len(pages))]


OPERATIONS = ["open", "close", "chunk", "chunk", "chunk", "decode", "draft", "reset", "make", "make", "drop"]
OPERATIONS += ["host", "device", "resume", "resume", "resume", "load"]


@pytest.mark.parametrize("seed", [0, 1, 2, *deeper(3, 4, 5, 6, 7)])
def test_every_page_is_accounted_for(seed: int, model: Model, device: str) -> None:
    """Random operations run on sequences and checkpoints, with pages and slots running out. After each one
    the engine's figures are those of the books, and states are those of sequences alone. A fork takes no page
    beyond what it then writes."""
    rng = np.random.default_rng(seed)
    engine = open_engine(model, n_ctx=768, n_sequences=4, n_checkpoints=3, n_pages=7)
    alone = open_engine(model, n_ctx=768, n_sequences=1, n_checkpoints=0).sequence()
    books = Accounts(engine, alone)
    for _ in range(70):
        operation(str(rng.choice(OPERATIONS)), books, rng, device)
        books.check()
        if books.sequences and rng.random() < 0.3:
            books.check_state(int(rng.integers(len(books.sequences))))
    for at in range(len(books.sequences)):
        books.check_state(at)
    for handle, _, _ in [*books.sequences, *books.checkpoints]:
        handle.close()
    info = engine.info
    assert (info.pages_free, info.sequences_free, info.checkpoints_free) == (7, 4, 3)


def operation(name: str, books: Accounts, rng: np.random.Generator, device: str) -> None:
    """Does one operation, on the engine and in the books; none where there is nothing to do it to."""
    engine, sequences, checkpoints = books.engine, books.sequences, books.checkpoints
    if name == "open":
        if len(sequences) < 4:
            sequences.append((engine.sequence(), [], []))
        else:
            with pytest.raises(OutOfMemory, match="4"):
                engine.sequence()
    elif name in ("close", "chunk", "decode", "draft", "reset", "make") and sequences:
        of_sequence(name, books, int(rng.integers(len(sequences))), rng)
    elif name in ("drop", "host", "device", "load", "resume") and checkpoints:
        at = int(rng.integers(len(checkpoints)))
        checkpoint, pages, history = checkpoints[at]
        n = checkpoint.info.n_past // 256
        if name == "drop":
            checkpoint.close()
            del checkpoints[at]
        elif name == "host":
            checkpoint.to_host()
            if not device.startswith("cpu"):
                checkpoint.save()  # This waits until it has left.
            checkpoints[at] = checkpoint, None, history
        elif name == "device":
            if pages is not None or (books.free() >= n and engine.info.checkpoints_free):
                checkpoint.to_device()
                checkpoints[at] = checkpoint, pages or [object() for _ in range(n)], history
            else:
                with pytest.raises(OutOfMemory):
                    checkpoint.to_device()
        elif name == "load":
            checkpoints.append((engine.load_checkpoint(checkpoint.save()), None, history))
        elif sequences:
            which = int(rng.integers(len(sequences)))
            sequence = sequences[which][0]
            if pages is not None or books.free() >= n:
                sequence.resume(checkpoint)
                taken = list(pages) if pages is not None else [object() for _ in range(n)]
                sequences[which] = sequence, taken, list(history)
            else:
                with pytest.raises(OutOfMemory, match=f"{n} KV pages.*{books.free()} of 7"):
                    sequence.resume(checkpoint)


def of_sequence(name: str, books: Accounts, at: int, rng: np.random.Generator) -> None:
    sequence, pages, history = books.sequences[at]
    n_past = sequence.info.n_past
    if name == "close":
        sequence.close()
        del books.sequences[at]
    elif name == "reset":
        sequence.reset()
        books.sequences[at] = sequence, [], []
    elif name == "make":
        whole = n_past > 0 and all(kind == "chunk" for kind, _ in history)
        if whole and books.engine.info.checkpoints_free:
            books.checkpoints.append((sequence.checkpoint(), pages[: n_past // 256], list(history)))
        else:
            with pytest.raises(OutOfMemory if whole else StateError):
                sequence.checkpoint()
    elif name in ("chunk", "decode", "draft"):
        n = 256 if name == "chunk" else int(rng.integers(1, 9))
        if name == "chunk" and n_past % 256 or n_past + n >= 768 or name == "draft" and n_past == 0:
            return
        after = grown(pages, n_past, n)
        token, tokens = int(rng.integers(8, 300)), tokens_of(n, seed=int(rng.integers(99)))
        run: dict[str, Callable[[], object]] = {
            "chunk": lambda: sequence.prefill(tokens_of(256, seed=token), last=False),
            "decode": lambda: drive.verify(sequence, tokens),
            "draft": lambda: drive.draft(sequence, token, n),
        }
        if len(after) - len(pages) > books.free():
            with pytest.raises(OutOfMemory):
                run[name]()
            return
        run[name]()
        if name == "chunk":
            history.append(("chunk", token))
        elif name == "decode" and rng.random() < 0.7:
            sequence.commit(range(n))
            history += [("token", one) for one in tokens]
        books.sequences[at] = sequence, after, history
