"""What a round costs in steps and in waits for the device, as the engine itself counts them: nothing between
rounds costs either. The counts are the same on every device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import box_model
import drive
import nan_model
import numpy as np
import pytest
from depth import examples
from hypothesis import example, given
from hypothesis import strategies as st
from nan_model import SMALL, tokens_of
from op_run import counts

from luce.errors import StateError
from luce.native import Checkpoint, Drafts, Engine, Form, Library, Model, Rows, Source
from luce.native import Sequence as Timeline
from luce.native.structs import Penalties, Sampling

NOTHING, STEP = (0, 0), (1, 1)
LONG = tokens_of(256, seed=5)


@pytest.fixture(scope="module")
def model(native: Library, tmp_path_factory: pytest.TempPathFactory, device: str) -> Model:
    path = nan_model.write(tmp_path_factory.mktemp("counts") / "small.gguf", seed=84)
    return drive.open_model(native, path, device, head=True)


@pytest.fixture
def engine(model: Model) -> Engine:
    return open_engine(model)


@pytest.fixture(scope="module")
def large(model: Model) -> Engine:
    """Opens an engine with pages and slots for all that a test keeps."""
    return open_engine(model, n_top=0, n_part=0, n_checkpoints=8, n_pages=40)


def open_engine(model: Model, **params: int | str) -> Engine:
    return nan_model.open_engine(
        model, **{"n_ctx": 1100, "n_checkpoints": 3, "n_top": 4, "n_part": 128} | params
    )


class Meter:
    """Says what calls on an engine cost."""

    def __init__(self, engine: Engine):
        self.engine, self.before = engine, counts(engine)

    def __call__(self, *results: Any) -> tuple[int, int]:
        """Returns (steps, waits) since the last time; what is given are the calls that were made since."""
        before, self.before = self.before, counts(self.engine)
        return self.before[0] - before[0], self.before[1] - before[1]


def test_rounds_cost_a_step_for_each_draft_and_one_for_the_rows(engine: Engine) -> None:
    """All sequences of a round share them. The host waits once a round, and once more where it builds a tree
    from lists."""
    sequences = nan_model.started(engine)
    cost = Meter(engine)
    plain = engine.verify([Rows(each, [3]) for each in sequences])
    assert cost(plain) == STEP
    assert cost([each.commit([0]) for each in sequences]) == NOTHING
    for source in (Source.NEXTN, Source.PART):
        engine.draft([Drafts(each, 3, 4, source) for each in sequences])
        assert cost() == (4, 0)
        engine.verify([Rows(each, n=5) for each in sequences])
        assert cost() == STEP
        assert cost([each.drafted(4) for each in sequences]) == NOTHING
        assert cost([each.commit([0, 1]) for each in sequences]) == NOTHING
    engine.draft([Drafts(each, 3, 3) for each in sequences])
    assert cost() == (3, 0)
    assert cost([each.lists(3, 4) for each in sequences]) == (0, 1)
    assert cost([each.drafted(3) for each in sequences]) == NOTHING
    engine.verify([Rows(each, [3, 1, 2, 4], [-1, 0, 0, 2]) for each in sequences])
    assert cost() == STEP
    for each in sequences:  # Rows 2 and 3 lie where the verify wrote them, and the next step moves them.
        each.commit([0, 2, 3])
    assert cost() == NOTHING
    engine.verify([Rows(each, [5]) for each in sequences])
    assert cost() == STEP


def test_plain_rounds_of_one_sequence_leave_the_head_to_one_step_before_its_next_drafts(
    engine: Engine,
) -> None:
    one, other, _ = nan_model.started(engine)
    cost, most = Meter(engine), engine.info.n_rows
    for at in range(most + 2):
        engine.verify([Rows(one, [3])])
        one.commit([0])
        assert cost() == (STEP if at != most else (2, 1)), at
    engine.verify([Rows(other, [3])])
    other.commit([0])
    assert cost() == STEP
    engine.draft([Drafts(one, 3, 2)])
    assert cost() == (3, 0)
    engine.verify([Rows(one, n=3), Rows(other, [4])])
    assert cost() == (2, 1), "the other one is fed before a step of several rows"
    for each in (one, other):
        each.commit([0])
    engine.draft([Drafts(each, 3, 2) for each in (one, other)])
    assert cost() == (2, 0)


def test_a_draft_waits_for_one_that_nobody_waited_for(engine: Engine) -> None:
    """The host writes a draft's inputs where the device may still read those of the one before, whatever has
    become of that one's sequence."""
    one, other, last = nan_model.started(engine)
    cost = Meter(engine)
    engine.draft([Drafts(one, 3, 2)])
    assert cost() == (2, 0)
    assert cost(one.reset()) == NOTHING
    for each in (other, last):
        engine.draft([Drafts(each, 3, 2)])
        assert cost() == (2, 1)
    engine.verify([Rows(last, n=3)])
    assert cost() == STEP
    engine.draft([Drafts(other, 3, 2)])
    assert cost() == (2, 0), "the verify has waited for the draft, too"


def test_steps_that_follow_each_other_cost_a_step_and_a_wait_each(engine: Engine) -> None:
    """To begin one waits for nothing, also where it commits rows that the host has not seen."""
    sequences = nan_model.started(engine)
    for some in (sequences[:1], sequences[1:]):
        cost = Meter(engine)
        assert cost(engine.begin([Rows(each, [3]) for each in some])) == (1, 0)
        for _ in range(5):
            assert cost(drive.follow(some)) == (1, 0)
            assert cost(engine.wait()) == (0, 1)
        assert cost(engine.wait()) == (0, 1)


def test_to_close_a_checkpoint_in_host_memory_waits_for_no_step(engine: Engine) -> None:
    """One that was on the device lets the step end first."""
    with engine.sequence() as sequence:
        drive.prefill(sequence, LONG)
        on_device = sequence.checkpoint()
        in_host = engine.load_checkpoint(on_device.save())
        cost = Meter(engine)
        assert cost(engine.begin([Rows(sequence, [3])])) == (1, 0)
        assert cost(in_host.close()) == NOTHING
        assert cost(on_device.close()) == (0, 1)
        assert cost(engine.wait()) == NOTHING


def test_dflash_blocks_cost_a_step_for_each_full_one(native: Library, device: str) -> None:
    model = drive.open_model(native, box_model.GGUF, device, drafter=box_model.DRAFTER)
    engine = drive.open_engine(model, n_ctx=300, n_sequences=3, blocks=1, n_top=4)
    sequences = [engine.sequence() for _ in range(3)]
    for each in sequences:
        drive.prefill(each, tokens_of(20))
    cost = Meter(engine)
    size = engine.info.n_block - 1
    engine.draft([Drafts(each, 3, size, Source.DFLASH) for each in sequences])
    assert cost() == (1, 0)
    engine.draft([Drafts(each, 3, size, Source.DFLASH) for each in sequences])
    assert cost() == (1, 1), "the host writes where the device may still read"
    assert cost([each.lists(size, 4, Form.INDEPENDENT) for each in sequences]) == (0, 1)
    engine.verify([Rows(each, n=size + 1) for each in sequences])
    assert cost() == STEP
    assert cost([each.commit([0]) for each in sequences]) == NOTHING


def test_choices_of_the_caller_cost_nothing_beside_the_step(engine: Engine) -> None:
    """With penalties set, the rows' logits come with the step, after a prompt and after each verify, and
    they are those that are read without; a row of another sequence is waited for."""
    one, other = engine.sequence(), engine.sequence()
    cost = Meter(engine)
    one.set_penalties(Penalties(presence=0.5), 20)
    assert cost() == NOTHING
    for each in (one, other):
        drive.prefill(each, tokens_of(20), last=each is one)
        assert cost() == STEP
        if each is one:
            assert cost(one.choose(0), one.logits(0)) == NOTHING
    engine.verify([Rows(other, [3, 4]), Rows(one, [5, 6, 8], [-1, 0, 0])])
    assert cost() == STEP
    found = [one.logits(row) for row in range(3)]
    assert cost([one.choose(row, b"\xff" * (SMALL.n_vocab // 8)) for row in range(3)]) == NOTHING
    assert cost(other.logits(1)) == (0, 1)
    one.set_penalties(Penalties(), 0)
    engine.verify([Rows(one, [5, 6, 8], [-1, 0, 0]), Rows(other, [3, 4])])
    assert np.stack(found).tobytes() == np.stack([one.logits(row) for row in range(3)]).tobytes()
    assert cost() == STEP
    engine.verify([Rows(other, [3, 4])])
    other.logits(0)
    assert cost() == (1, 2), "nobody chooses: logits do not travel"


class Random:
    """Makes random calls on an engine, and says what each may cost."""

    def __init__(self, engine: Engine):
        self.engine, self.cost = engine, Meter(engine)
        self.sequences: list[Timeline] = []
        self.checkpoints: list[Checkpoint] = []
        self.owed: Counter[int] = Counter()  # These are rows that heads of sequences are not fed yet.

    def feeds(self, *sequences: Timeline) -> int:
        """Returns how many steps feed what sequences owe."""
        return sum(self.owed.pop(each.handle, 0) > 0 for each in sequences)

    def run(self, calls: list[tuple[int, int]]) -> None:
        kinds: list[Callable[[np.random.Generator], tuple[int, int]]] = [
            self.open, self.read, self.keep, self.fork, self.step, self.commit, self.commit, self.roll_back,
            self.settings, self.close, self.drop, self.plain, self.plain,
        ]  # fmt: skip
        try:
            for kind, seed in calls:
                call = kinds[kind % len(kinds)]
                expected = call(np.random.default_rng(seed))
                assert self.cost() == expected, call.__name__
        finally:
            for each in [*self.sequences, *self.checkpoints]:
                each.close()
        assert self.cost() == NOTHING

    def any(self, rng: np.random.Generator) -> Timeline | None:
        return self.sequences[int(rng.integers(len(self.sequences)))] if self.sequences else None

    def open(self, rng: np.random.Generator) -> tuple[int, int]:
        if self.engine.info.sequences_free:
            self.sequences.append(self.engine.sequence())
        return NOTHING

    def read(self, rng: np.random.Generator) -> tuple[int, int]:
        one = self.any(rng)
        if one is None or one.info.n_past not in (0, 256):
            return NOTHING
        one.prefill(LONG, last=bool(rng.integers(2)))
        return 1 + self.feeds(one), 1

    def keep(self, rng: np.random.Generator) -> tuple[int, int]:
        one = self.any(rng)
        if one is not None and one.info.n_past in (256, 512) and len(self.checkpoints) < 8:
            try:
                self.checkpoints.append(one.checkpoint())
            except StateError:
                return NOTHING  # Rounds brought it there.
            if rng.random() < 0.5:
                self.checkpoints[-1].to_host()
        return NOTHING

    def fork(self, rng: np.random.Generator) -> tuple[int, int]:
        one = self.any(rng)
        if one is not None and self.checkpoints:
            checkpoint = self.checkpoints[int(rng.integers(len(self.checkpoints)))]
            self.reset(one)
            free = self.engine.info.pages_free
            one.resume(checkpoint)
            shared = checkpoint.info.on_device
            assert not shared or self.engine.info.pages_free == free, "KV was copied within the device"
        return NOTHING

    def step(self, rng: np.random.Generator) -> tuple[int, int]:
        ready = [each for each in self.sequences if 0 < each.info.n_past < 900]
        if not ready:
            return NOTHING
        if rng.random() < 0.5:
            self.engine.draft([Drafts(each, 1, 2) for each in ready])
            self.engine.verify([Rows(each, n=3) for each in ready])
            return 3 + self.feeds(*ready), 1
        trees = [drive.random_tree(rng, 8) for _ in ready]
        self.engine.verify([Rows(each, tokens_of(8), tree) for each, tree in zip(ready, trees, strict=True)])
        self.trees = {each.handle: tree for each, tree in zip(ready, trees, strict=True)}
        return 1 + self.feeds(*ready), 1

    def plain(self, rng: np.random.Generator) -> tuple[int, int]:
        """Runs and commits up to 30 rows of one sequence, each in a step of its own."""
        one, steps = self.any(rng), 0
        if one is None or not 0 < one.info.n_past < 900:
            return NOTHING
        rounds = int(rng.integers(1, 31))
        for _ in range(rounds):
            if self.owed[one.handle] == self.engine.info.n_rows:
                steps += self.feeds(one)
            self.engine.verify([Rows(one, [3])])
            one.commit([0])
            self.owed[one.handle] += 1
        return rounds + steps, rounds

    def reset(self, one: Timeline) -> None:
        one.reset()
        self.owed.pop(one.handle, None)

    def commit(self, rng: np.random.Generator) -> tuple[int, int]:
        for one in self.sequences:
            n = one.info.n_verified
            if n == 8:
                one.commit(drive.root_path(self.trees[one.handle], int(rng.integers(n))))
            elif n > 0:
                one.commit(range(int(rng.integers(1, n + 1))))
        return NOTHING

    def roll_back(self, rng: np.random.Generator) -> tuple[int, int]:
        if (one := self.any(rng)) is not None:
            self.reset(one)
        return NOTHING

    def settings(self, rng: np.random.Generator) -> tuple[int, int]:
        if (one := self.any(rng)) is not None:
            one.set_sampling(Sampling(temperature=float(rng.random()), seed=1))
            one.lookup(1, 4)
        return NOTHING

    def close(self, rng: np.random.Generator) -> tuple[int, int]:
        if (one := self.any(rng)) is not None and rng.random() < 0.3:
            self.sequences.remove(one)
            self.reset(one)
            one.close()
        return NOTHING

    def drop(self, rng: np.random.Generator) -> tuple[int, int]:
        if self.checkpoints and rng.random() < 0.5:
            self.checkpoints.pop(0).close()
        return NOTHING


# A path that has to move, and as many plain rounds behind it as leave a feed.
MOVED = [(1, 0), (1, 0), (1, 0), (4, 0), (5, 0), (9, 0), (11, 262145)]


@examples(12)
@given(calls=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2**32 - 1)), min_size=30, max_size=60))
@example(calls=[(0, 0), *MOVED])
def test_nothing_between_rounds_costs_anything(large: Engine, calls: list[tuple[int, int]]) -> None:
    """Committing (paths of trees too), dropping rows, resets, checkpoints on the device and on their way to
    the host, forks of both, and what else is no step. What plain rounds leave to the head, the first step of
    another kind adds as one."""
    Random(large).run([(0, 0), (1, 1), (2, 1), (3, 1), *calls])


@pytest.mark.parametrize("alone", [True, False])
def test_rounds_that_follow_with_drafts_cost_their_steps_and_one_wait(engine: Engine, alone: bool) -> None:
    """To ask for one costs nothing: the wait for the step before it begins it. After a step of one row the
    head is fed."""
    sequences = nan_model.started(engine)[: 1 if alone else 3]
    cost = Meter(engine)
    assert cost(engine.begin([Rows(each, [3]) for each in sequences])) == (1, 0)
    for at, drafts in enumerate((2, 2, 3)):
        assert cost(drive.follow(sequences, [drafts] * len(sequences))) == NOTHING
        assert cost(engine.wait()) == (drafts + 1 + (alone and not at), 1)
    assert cost(engine.wait()) == (0, 1)
