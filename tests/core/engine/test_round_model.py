"""Drives the rounds of one engine in any order, with failures, against a model of it.

The model knows what luce.h promises and no more: what a call refuses, whose rows are committed, dropped or
failed by it, and how many rounds can be waited for. The choice after a row is that of decoding its history one
token at a time in another engine, and so are the bytes of what is committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TypeVar

import drive
import nan_model
import numpy as np
import pytest
from depth import examples
from hypothesis import given
from hypothesis import strategies as st
from nan_model import BAD, tokens_of
from op_run import Fault, fault, round_fault

from luce.errors import ArgumentError, Cancelled, ContextFull, DeviceError, Error, NumericError, StateError
from luce.native import Drafts, Engine, Library, Model, Rows, Source, Verified
from luce.native import Sequence as Timeline
from luce.native.structs import Penalties, Sampling

N_CTX, N_SEQUENCES, N_DRAFT = 290, 3, 4
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=5)]
T = TypeVar("T")
KEPT = tuple(tokens_of(256, seed=9))  # A checkpoint is kept after these.
Key = tuple[int, int, tuple[int, ...]]  # It has a place in SAMPLINGS, the tokens of the prompt, and all of them.


class Reference:
    """Decodes histories one token at a time, and remembers what it has chosen."""

    def __init__(self, engine: Engine):
        self.sequence = engine.sequence()
        self.at: Key = (0, 0, ())
        self.choices: dict[Key, int | None] = {}

    def go_to(self, key: Key) -> None:
        sampling, n_prompt, history = key
        if self.at[:2] != key[:2] or self.at[2] != history[: len(self.at[2])]:
            self.sequence.reset()
            self.sequence.set_sampling(SAMPLINGS[sampling])
            drive.prefill(self.sequence, history[:n_prompt], last=False)
            self.at = (sampling, n_prompt, history[:n_prompt])
        for token in history[len(self.at[2]) :]:
            drive.verify(self.sequence, [token])
            self.sequence.commit([0])
            self.at = (sampling, n_prompt, (*self.at[2], token))

    def choice(self, key: Key) -> int | None:
        """Returns what is chosen after a decoded history, or None where its logits are not finite."""
        if key not in self.choices:
            sampling, n_prompt, history = key
            if BAD in history:
                self.choices[key] = None
            else:
                self.go_to((sampling, n_prompt, history[:-1]))
                (self.choices[key],) = drive.verify(self.sequence, history[-1:])
        return self.choices[key]

    def dump(self, key: Key) -> bytes:
        self.go_to(key)
        return self.sequence.dump()


@dataclass(eq=False)
class Line:
    """Models a sequence: its history, the rows that were verified and not committed, and the drafts that it has."""

    sequence: Timeline
    sampling: int
    n_prompt: int
    history: tuple[int, ...]
    rows: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    choices: list[int | None] = field(default_factory=list)
    anchor: int = 0
    n_drafted: int = 0
    failed: bool = False
    closed: bool = False
    penalised: bool = False

    def key(self, *more: int) -> Key:
        return self.sampling, self.n_prompt, (*self.history, *more)


@dataclass
class Item:
    """Models the rows of one sequence in a round. Those that the device drafted are -1 until they are told."""

    line: Line
    tokens: list[int]
    parents: list[int]
    base: Key  # It is what was committed before them.
    drafts: bool = False  # The round has the device draft them.
    failed: bool = False

    def path(self, row: int) -> list[int]:
        rows = drive.root_path(self.parents, row)
        return [self.tokens[each] for each in rows]


@dataclass
class Round:
    items: list[Item]
    landed: bool = False
    booked: bool = False  # The round behind it has committed its rows.
    lost: bool = False  # All of it failed.


class Rounds:
    """Makes calls on an engine and on the model of it. `rng` draws what a call is made with."""

    def __init__(self, native: Library, device: str, engine: Engine, reference: Reference):
        self.native, self.device, self.engine, self.reference = native, device, engine, reference
        self.rng = np.random.default_rng(0)
        self.lines: list[Line] = []
        self.rounds: list[Round] = []
        self.asked: list[int] | None = None  # The wait for the one round begins another with so many drafts.
        self.source = Source.NEXTN
        self.cancelled = False
        first = self.engine.sequence()
        first.prefill(KEPT, last=False)
        self.kept = first.checkpoint()
        first.close()

    def run(self, calls: Items[tuple[int, int]]) -> None:
        kinds = [
            *[self.begun] * 5, *[self.waited] * 6, *[self.follows] * 6, *[self.committed] * 3,
            self.drafted, self.drafted, self.opened, self.dumped, self.close, self.restart, self.penalties, self.cancel,
        ]  # fmt: skip
        try:
            for call in (self.opened, self.opened):
                call()
            for kind, seed in calls:
                self.rng = np.random.default_rng(seed)
                kinds[kind % len(kinds)]()
                self.as_modelled()
        finally:
            self.teardown()

    def int(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def any(self, of: Items[T]) -> T:
        return of[self.int(0, len(of) - 1)]

    def seldom(self) -> bool:
        return self.int(0, 9) == 0

    # ---- the model

    @property
    def open(self) -> list[Line]:
        return [each for each in self.lines if not each.closed]

    def expected(self, item: Item) -> list[int | None]:
        *key, history = item.base
        rows = range(len(item.tokens))
        return [self.reference.choice((key[0], key[1], (*history, *item.path(row)))) for row in rows]

    def land(self, only: Round | None = None) -> None:
        """Books what has ended: of one round, or of all."""
        for at, each in enumerate(self.rounds if only is None else [only]):
            if each.landed or each.lost:
                continue
            each.landed = True
            for item in each.items:
                unknown = -1 in item.tokens
                choices = [0] * len(item.tokens) if unknown else self.expected(item)
                if not each.booked:
                    item.line.rows, item.line.parents, item.line.choices = item.tokens, item.parents, choices
                if item.failed or None in choices:
                    item.failed = item.line.failed = True
                    behind = self.rounds[at + 1 :] if only is None else [r for r in self.rounds if r is not only]
                    for other in behind:
                        for their in other.items:
                            their.failed = their.failed or their.line is item.line

    def dropped(self) -> None:
        """Forgets the results of all rounds."""
        self.land()
        self.rounds, self.asked = [], None

    def is_cancelled(self) -> bool:
        due, self.cancelled = self.cancelled, False
        return due

    def commit(self, line: Line, path: list[int]) -> None:
        line.history = (*line.history, *(line.rows[row] for row in path))
        line.rows, line.parents, line.choices, line.n_drafted = [], [], [], 0

    def reset_of(self, line: Line, history: tuple[int, ...]) -> None:
        line.history, line.n_prompt, line.failed = history, len(history), False
        line.rows, line.parents, line.choices, line.n_drafted = [], [], [], 0

    def lost(self, lines: list[Line]) -> None:
        for each in lines:
            each.failed = True

    # ---- sequences

    def opened(self) -> None:
        if len(self.open) == N_SEQUENCES:
            return
        sampling, n = self.any([0, 0, 1]), self.int(1, 30)
        if any(item.line.closed for each in self.rounds for item in each.items):
            self.land()  # A step that is under way holds a sequence that was closed, whose slot is wanted.
        sequence = self.engine.sequence()
        sequence.set_sampling(SAMPLINGS[sampling])
        self.land()
        history = tuple(tokens_of(n, seed=n))
        self.lines.append(Line(sequence, sampling, 0, ()))
        if self.is_cancelled():
            with pytest.raises(Cancelled):
                sequence.prefill(history)
        else:
            drive.prefill(sequence, history)
            self.reset_of(self.lines[-1], history)

    def close(self) -> None:
        if len(self.open) < 2 or self.int(0, 2):
            return
        line = self.any(self.open)
        line.sequence.close()
        line.closed = True

    def restart(self) -> None:
        """Goes to the checkpoint, or empties the timeline and reads another prompt. Both heal."""
        line = self.any(self.open)
        if self.int(0, 1):
            line.sequence.resume(self.kept)
            self.land()
            self.reset_of(line, KEPT)
            return
        line.sequence.reset()
        self.land()
        self.reset_of(line, ())
        if self.is_cancelled():
            with pytest.raises(Cancelled):
                line.sequence.prefill([1])
        else:
            drive.prefill(line.sequence, tokens_of(9, seed=4))
            self.reset_of(line, tuple(tokens_of(9, seed=4)))

    def penalties(self) -> None:
        """They change none of the steps' own choices."""
        line = self.any(self.open)
        on = self.int(0, 3) == 0
        if on or line.penalised:
            self.engine.library.check(
                self.engine.library.lib.luce_sequence_set_penalties(
                    line.sequence.handle,
                    self.engine.library.penalties(Penalties(), 0) if on else self.engine.library.ffi.NULL,
                )
            )
            line.penalised = on
            self.land()

    def committed(self) -> None:
        line = self.any(self.open)
        self.land()
        if line.failed or not line.rows:
            with pytest.raises(StateError):
                line.sequence.commit([0])
            return
        if -1 in line.rows:
            path = [0]  # The model does not know the others' tokens.
        elif self.int(0, 1):
            path, _ = line.sequence.accept(line.rows, line.parents, line.choices)
        else:
            path = drive.root_path(line.parents, self.int(0, len(line.rows) - 1))
        line.sequence.commit(path)
        self.commit(line, path)

    def dumped(self) -> None:
        """The bytes of what is committed are those of plain decoding. Rows that were verified are rejected."""
        line = self.any(self.open)
        self.land()
        if line.failed:
            with pytest.raises(StateError):
                line.sequence.dump()
        else:
            found = line.sequence.dump()
            assert not line.history or found == self.reference.dump(line.key())
            line.rows, line.parents, line.choices = [], [], []

    def cancel(self) -> None:
        self.engine.cancel()
        self.cancelled = True

    # ---- rounds

    def drawn(self) -> list[Line]:
        ready = [each for each in self.open if not each.failed and each.history]
        return [each for each in ready if self.int(0, 2)] or ready[:1]

    def drafted(self) -> None:
        lines, n, source = self.drawn(), self.int(1, N_DRAFT), self.any([Source.NEXTN, Source.PART])
        if not lines:
            return
        self.land()
        anchors = [self.next_of(each) for each in lines]
        call = lambda: self.engine.draft([Drafts(each.sequence, a, n, source) for each, a in zip(lines, anchors)])  # noqa: B905, E731, E501
        if self.is_cancelled():
            with pytest.raises(Cancelled):
                call()
        elif any(each.failed for each in lines):
            with pytest.raises(StateError):
                call()
        elif any(len(each.history) + n >= N_CTX for each in lines):
            with pytest.raises(ContextFull):
                call()
        else:
            call()
            for each, anchor in zip(lines, anchors, strict=True):
                each.rows, each.parents, each.choices = [], [], []
                each.anchor, each.n_drafted = anchor, n

    def next_of(self, line: Line) -> int:
        return (sum(line.history) * 7 + len(line.history)) % BAD

    def begun(self) -> None:
        """Begins rows that the host knows, those of the last draft, or drafts after an anchor, in place of all
        rounds before."""
        lines, fails, source = self.drawn(), self.seldom(), self.any([Source.NEXTN, Source.PART])
        if not lines:
            return
        rows, items = [], []
        self.dropped()
        for line in lines:
            if line.n_drafted and self.int(0, 1):
                n = self.int(1, line.n_drafted + 1)
                rows.append(Rows(line.sequence, n=n))
                items.append(Item(line, [line.anchor] + [-1] * (n - 1), list(range(-1, n - 1)), line.key()))
                continue
            if self.int(0, 3) == 0:
                n, anchor = self.int(1, N_DRAFT + 1), self.int(0, BAD - 1)
                rows.append(Rows(line.sequence, n=n, anchor=anchor, source=source))
                items.append(Item(line, [anchor] + [-1] * (n - 1), list(range(-1, n - 1)), line.key(), n > 1))
                continue
            n = self.any([1, 1, 1, 1, 2, 5])
            parents = drive.random_tree(self.rng, n)
            item = Item(line, [0] * n, parents, line.key())
            bad = self.seldom()
            for row in range(n):
                right = self.int(0, 1) and row > 0
                above = [item.tokens[each] for each in drive.root_path(parents, row)[:-1]]
                found = self.reference.choice(line.key(*above)) if right and above else None
                item.tokens[row] = (row * 11 + len(line.history)) % BAD if found is None else found
            if bad:
                item.tokens[-1] = BAD
            rows.append(Rows(line.sequence, item.tokens, parents))
            items.append(item)
        deepest = [
            len(i.base[2]) + max(len(drive.root_path(i.parents, r)) for r in range(len(i.tokens))) for i in items
        ]
        if self.is_cancelled():
            with pytest.raises(Cancelled):
                self.engine.begin(rows)
        elif any(line.failed for line in lines):
            with pytest.raises(StateError):
                self.engine.begin(rows)
        elif max(deepest) > N_CTX:
            with pytest.raises(ContextFull):
                self.engine.begin(rows)
        elif fails:
            with fault(self.native, round_fault(self.device)), pytest.raises(DeviceError):
                self.engine.begin(rows)
            self.lost(lines)
        else:
            self.engine.begin(rows)
            self.rounds = [Round(items)]
            for item in items:
                if item.drafts:
                    item.line.rows, item.line.parents, item.line.choices = [], [], []
                    item.line.anchor, item.line.n_drafted = item.tokens[0], len(item.tokens) - 1

    def chosen(self, drafts: Items[int], source: Source = Source.NEXTN) -> None:
        """Begins a round after what the round ahead chooses. The core knows whose it is."""
        drive.follow([self.lines[0].sequence] * len(drafts), drafts, source)

    def follows(self) -> None:
        """Begins a round after what the last one chooses. It is on the device at once where both have a row of
        each sequence; else the wait for the last one begins it."""
        if not self.rounds and self.int(0, 3):
            self.begun()
        n = len(self.rounds[0].items) if self.rounds else 1
        drafts = [0] * n if self.int(0, 1) else [self.int(0, N_DRAFT) for _ in range(n)]
        source = self.any([Source.NEXTN, Source.PART])
        if self.is_cancelled():
            with pytest.raises(Cancelled):
                self.chosen(drafts, source)
        elif len(self.rounds) != 1 or self.asked is not None or self.rounds[0].lost:
            with pytest.raises(StateError):
                self.chosen(drafts, source)
        elif any(drafts) or any(len(item.tokens) > 1 for item in self.rounds[0].items):
            with pytest.raises(ArgumentError):
                self.chosen([*drafts, 1], source)
            with pytest.raises(ArgumentError):
                self.chosen([N_DRAFT + 1] * n, source)
            self.chosen(drafts, source)
            self.asked, self.source = drafts, source
        else:
            self.follows_at_once(self.rounds[0])

    def follows_at_once(self, before: Round) -> None:
        lines, drafts = [item.line for item in before.items], [0] * len(before.items)
        for line in lines:
            if line.closed or (before.landed and len(line.rows) != 1) or line.failed:
                with pytest.raises(StateError):
                    self.chosen(drafts)
                return
            if len(line.history) + 1 >= N_CTX:
                with pytest.raises(ContextFull):
                    self.chosen(drafts)
                return
        fails = self.seldom()
        if fails:
            with fault(self.native, round_fault(self.device)), pytest.raises(DeviceError):
                self.chosen(drafts)
        else:
            self.chosen(drafts)
        before.booked, items = True, []
        for item in before.items:
            found = item.line.choices[0] if before.landed else self.expected(item)[0]
            item.line.rows, item.line.parents = item.tokens, item.parents
            self.commit(item.line, [0])
            items.append(Item(item.line, [BAD if found is None else found], [-1], item.line.key()))
        if fails:
            self.lost(lines)
        else:
            self.rounds.append(Round(items))

    def waited(self) -> None:
        fails = self.any([Fault.WAIT, Fault.OP]) if self.seldom() else None
        if not self.rounds:
            with pytest.raises(StateError):
                self.engine.wait()
            return
        ahead, asked = self.rounds[0], self.asked
        if fails is Fault.WAIT and (ahead.landed or ahead.lost):
            fails = None
        if ahead.lost or fails is Fault.WAIT:
            with fault(self.native, Fault.WAIT) if fails else contextlib.nullcontext(), pytest.raises(DeviceError):
                self.engine.wait()
            self.asked = None
            for each in self.rounds if not ahead.lost else []:
                each.lost = True
                self.lost([item.line for item in each.items])
            self.rounds.pop(0)
            return
        kind = round_fault(self.device)
        with fault(self.native, kind) if fails is Fault.OP and asked is not None else contextlib.nullcontext():
            results = self.engine.wait()
        for item, result in zip(ahead.items, results, strict=True):
            if isinstance(result, Verified):
                assert [a for a, b in zip(item.tokens, result.tokens, strict=True) if a not in (b, -1)] == []
                if -1 not in result.tokens:
                    item.tokens[:] = result.tokens
        known = ahead.landed
        self.land(ahead)
        self.rounds.pop(0)
        for item, result in zip(ahead.items, results, strict=True):
            expected = self.expected(item)
            if known and item.line.rows is item.tokens:
                item.line.choices = expected
            if item.failed or None in expected:
                assert isinstance(result, NumericError)
            else:
                assert isinstance(result, Verified) and result.choices == expected
        self.asked = None
        if asked is not None and self.goes_on(ahead, asked):
            self.go_on(ahead, asked, fails is Fault.OP)

    def goes_on(self, ahead: Round, asked: list[int]) -> bool:
        for item, n in zip(ahead.items, asked, strict=True):
            line = item.line
            if item.failed or line.closed or line.penalised or len(line.rows) != len(item.tokens):
                return False
            path, _ = line.sequence.accept(item.tokens, item.parents, self.expected(item))
            if len(line.history) + len(path) + n >= N_CTX:
                return False
        return not self.cancelled

    def go_on(self, ahead: Round, asked: list[int], fails: bool) -> None:
        items = []
        for item, n in zip(ahead.items, asked, strict=True):
            path, anchor = item.line.sequence.accept(item.tokens, item.parents, self.expected(item))
            self.commit(item.line, path)
            items.append(Item(item.line, [anchor] + [-1] * n, list(range(-1, n)), item.line.key()))
            item.line.anchor, item.line.n_drafted = anchor, n
        self.rounds = [Round(items, lost=fails)]
        if fails:
            self.lost([item.line for item in items])

    def as_modelled(self) -> None:
        assert self.engine.under_way == len(self.rounds) + (self.asked is not None)
        for each in self.open:
            info = each.sequence.info
            assert (info.n_past, bool(info.failed)) == (len(each.history), each.failed)
            if not each.failed:
                assert info.n_verified == len(each.rows)

    def teardown(self) -> None:
        while self.engine.under_way:
            with contextlib.suppress(Error):
                self.engine.wait()
        for each in self.open:
            each.sequence.close()
        last = self.engine.sequence()
        with contextlib.suppress(Cancelled):
            last.prefill([1])
        last.close()
        self.kept.close()


@pytest.fixture(scope="module")
def model(native: Library, tmp_path_factory: pytest.TempPathFactory, device: str) -> Model:
    path = nan_model.write(tmp_path_factory.mktemp("rounds") / "small.gguf", seed=84)
    return drive.open_model(native, path, device, head=True)


@pytest.fixture(scope="module")
def engines(model: Model) -> tuple[Engine, Reference]:
    sizes = {"n_ctx": N_CTX, "n_draft": N_DRAFT, "n_part": 128}
    engine = nan_model.open_engine(model, n_sequences=N_SEQUENCES + 1, **sizes)
    return engine, Reference(nan_model.open_engine(model, **sizes))


# A checked build of ggml ends where a norm meets what is not finite.
@examples(40)
@given(calls=st.lists(st.tuples(st.integers(0, 27), st.integers(0, 2**32 - 1)), min_size=40, max_size=80))
def test_rounds_in_any_order_are_those_of_the_reference(
    native: Library, device: str, engines: tuple[Engine, Reference], calls: list[tuple[int, int]]
) -> None:
    Rounds(native, device, *engines).run(calls)
