"""Has the core begin rounds with drafts as soon as the last ones have ended: tokens and committed bytes are
those of rounds that the caller makes call by call."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import box_model
import drive
import nan_model
import pytest
from depth import deeper, deeper_but
from nan_model import BAD, started, tokens_of
from op_run import fault, round_fault

from luce.errors import ArgumentError, Cancelled, DeviceError, NumericError, StateError
from luce.files.tokenizer import Tokenizer
from luce.native import CHOSEN, Drafts, Engine, File, Library, Model, Rows, Source, Verified
from luce.native import Sequence as Timeline
from luce.native.structs import Penalties, Sampling

ANCHOR = 65  # It follows every prompt here.

Round = tuple[
    list[int], list[int], int
]  # It has the tokens of the rows, the accepted path, and the next anchor.


@pytest.fixture(scope="module")
def box(native: Library, device: str) -> Model:
    """Opens the model in the box with both of its drafters, which are often right."""
    return drive.open_model(native, box_model.GGUF, device, head=True, drafter=box_model.DRAFTER)


def prompted(box: Model, n: int) -> list[Timeline]:
    """Opens sequences of one engine. One of them samples."""
    engine = drive.open_engine(box, n_ctx=256, n_sequences=n, n_rows=16, n_draft=4, n_part=1024, blocks=1)
    tokenizer = Tokenizer(File(box_model.GGUF, box.library).kv)
    sequences = [engine.sequence() for _ in range(n)]
    for sequence, prompt in zip(sequences, box_model.PROMPTS, strict=False):
        drive.prefill(sequence, tokenizer.encode(prompt, add_bos=True))
    sequences[-1].set_sampling(Sampling(temperature=0.4, seed=5))
    return sequences


def done(sequence: Timeline, result: Verified | NumericError) -> Round:
    assert isinstance(result, Verified)
    path, anchor = sequence.accept(result.tokens, None, result.choices)
    return result.tokens, path, anchor


def one_by_one(sequences: Items[Timeline], counts: Items[Items[int]], source: Source) -> list[list[Round]]:
    """Returns the rounds of each sequence, of which `counts` has the number of drafts."""
    engine, anchors, found = sequences[0].engine, [ANCHOR] * len(sequences), []
    for drafts in counts:
        asked = [Drafts(*each, source) for each in zip(sequences, anchors, drafts, strict=True) if each[2]]
        if asked:
            engine.draft(asked)
        triples = list(zip(sequences, anchors, drafts, strict=True))
        rows = [Rows(each, n=n + 1) if n else Rows(each, [anchor]) for each, anchor, n in triples]
        results = engine.verified(rows)
        found.append([done(*each) for each in zip(sequences, results, strict=True)])
        for sequence, (_, path, _) in zip(sequences, found[-1], strict=True):
            sequence.commit(path)
        anchors = [anchor for *_, anchor in found[-1]]
    return found


def drafting(sequences: Items[Timeline], counts: Items[Items[int]], source: Source) -> list[list[Round]]:
    """Returns the same rounds, each of which drafts and verifies in one call."""
    engine, anchors, found = sequences[0].engine, [ANCHOR] * len(sequences), []
    for drafts in counts:
        triples = list(zip(sequences, anchors, drafts, strict=True))
        engine.begin([Rows(each, n=n + 1, anchor=anchor, source=source) for each, anchor, n in triples])
        results = engine.wait()
        found.append([done(*each) for each in zip(sequences, results, strict=True)])
        for sequence, (_, path, _) in zip(sequences, found[-1], strict=True):
            sequence.commit(path)
        anchors = [anchor for *_, anchor in found[-1]]
    return found


def following(sequences: Items[Timeline], counts: Items[Items[int]], source: Source) -> list[list[Round]]:
    """Returns the same rounds. The first one has no drafts."""
    engine, found = sequences[0].engine, []
    assert not any(counts[0])
    engine.begin([Rows(sequence, [ANCHOR]) for sequence in sequences])
    for drafts in [*counts[1:], None]:
        if drafts is not None:
            drive.follow(sequences, drafts, source)
        results = engine.wait()
        assert engine.under_way == (drafts is not None)
        found.append([done(*each) for each in zip(sequences, results, strict=True)])
    for sequence, (_, path, _) in zip(sequences, found[-1], strict=True):
        sequence.commit(path)
    return found


@pytest.mark.parametrize(
    "counts",
    [*deeper([[0], *([n] for n in (1, 4, 2, 2, 2, 0, 0, 3, 1))]), [[0] * 3, *[[2, 0, 4], [3, 3, 3], [0, 0, 1]] * 4]],
    ids=["alone", "three"],
)
@pytest.mark.parametrize("source", deeper_but(Source, Source.DFLASH))
@pytest.mark.sanitize
def test_rounds_that_follow_are_those_call_by_call(
    box: Model, counts: list[list[int]], source: Source
) -> None:
    found, states = [], []
    for decode in (one_by_one, drafting, following):
        sequences = prompted(box, len(counts[0]))
        found.append(decode(sequences, counts, source))
        states.append([each.dump() for each in sequences])
    assert found[0] == found[1] == found[2] and states[0] == states[1] == states[2]
    assert sum(len(path) > 1 for rounds in found[1] for _, path, _ in rounds) > 2, "drafts were accepted"


@pytest.mark.parametrize("source", Source)
def test_drafts_that_the_caller_knows_are_followed_too(box: Model, source: Source) -> None:
    """The first round is a tree: of the two children of its anchor, the second one is right."""
    found, states = [], []
    for follows in (False, True):
        (sequence,) = prompted(box, 1)
        engine = sequence.engine
        ((_, _, right),) = one_by_one([sequence], [[0]], source)[0]
        after = drive.verify(sequence, [right])[0]
        engine.begin([Rows(sequence, [right, (after + 1) % 256, after], [-1, 0, 0])])
        if follows:
            drive.follow([sequence], [2], source)
        (first,) = engine.wait()
        assert isinstance(first, Verified) and first.tokens == [right, (after + 1) % 256, after]
        if not follows:
            sequence.commit([0, 2])
            engine.draft([Drafts(sequence, first.choices[2], 2, source)])
            engine.begin([Rows(sequence, n=3)])
        found.append([first, *map(done, [sequence], engine.wait())])
        sequence.commit(found[-1][1][1])
        states.append(sequence.dump())
    assert found[0] == found[1] and states[0] == states[1]


def test_what_cannot_be_asked_for_changes_nothing(engine: Engine) -> None:
    one, two, _ = started(engine)
    with pytest.raises(StateError, match="no round ahead"):
        drive.follow([one], [1])
    engine.begin([Rows(one, [3]), Rows(two, [4])])
    for drafts, of in (([1], "1 items"), ([1, 1, 1], "3 items"), ([5, 0], "at most 4 drafts")):
        with pytest.raises(ArgumentError, match=of):
            drive.follow([one, two, one][: len(drafts)], drafts)
    with pytest.raises(StateError, match="n_part 0"):
        drive.follow([one, two], [1, 0], Source.PART)
    with pytest.raises(ArgumentError, match="drafter 3"):
        engine.begin([Rows(each, n=2, anchor=CHOSEN, source=3) for each in (one, two)])
    with pytest.raises(ArgumentError, match="one drafter"):
        engine.begin([Rows(one, n=2, anchor=CHOSEN, source=each) for each in (0, 1)])
    with pytest.raises(ArgumentError, match="has to be known"):
        engine.verify([Rows(each, n=2, anchor=CHOSEN) for each in (one, two)])
    assert not engine.under_way
    engine.begin([Rows(one, [3]), Rows(two, [4])])
    engine.cancel()
    with pytest.raises(Cancelled):
        drive.follow([one, two], [1, 1])
    assert len(engine.wait()) == 2 and not engine.under_way
    engine.begin([Rows(one, [3]), Rows(two, [4])])
    drive.follow([one, two], [1, 0])
    for drafts in ([1, 0], [0, 0]):
        with pytest.raises(StateError, match="follows already"):
            drive.follow([one, two], drafts)
    assert len(engine.wait()) == 2 and engine.under_way == 1
    assert [len(each.tokens) for each in engine.wait() if isinstance(each, Verified)] == [2, 1]


def test_a_step_has_room_for_what_follows(model: Model) -> None:
    engine = drive.open_engine(model, n_ctx=300, n_sequences=17, n_draft=4)
    sequences = started(engine, 17)
    engine.begin([Rows(each, [3]) for each in sequences])
    with pytest.raises(ArgumentError, match="64 rows at most, got 65"):
        drive.follow(sequences, [3] * 14 + [2] * 3)
    drive.follow(sequences, [3] * 13 + [2] * 4)
    assert len(engine.wait()) == 17 and engine.under_way == 1


@pytest.mark.parametrize(
    "between",
    [
        lambda engine, one: engine.cancel(),
        lambda engine, one: one.set_penalties(Penalties(), 0),
        lambda engine, one: one.close(),
        lambda engine, one: one.reset(),
        lambda engine, one: engine.draft([Drafts(one, 3, 1)]),
        lambda engine, one: one.commit([0]),
    ],
    ids=["cancel", "penalties", "close", "reset", "draft", "commit"],
)
def test_where_a_call_stands_in_the_way_nothing_follows(
    engine: Engine, between: Callable[[Engine, Timeline], object]
) -> None:
    """The step's results stay, and so do the rows of the other sequence."""
    one, two, _ = started(engine)
    engine.begin([Rows(one, [3]), Rows(two, [4, 5])])
    drive.follow([one, two], [2, 2])
    between(engine, one)
    first, second = engine.wait()
    assert not engine.under_way
    assert isinstance(first, Verified) and isinstance(second, Verified)
    assert (two.info.n_past, two.info.n_verified) == (21, 2)
    two.commit([0])


@pytest.mark.parametrize("full", ["context", "pages"])
def test_what_has_no_room_does_not_follow(model: Model, full: str) -> None:
    engine = nan_model.open_engine(model, n_pages=4 if full == "context" else 3)
    one, two, three = started(engine)
    drive.prefill(two, tokens_of((297 if full == "context" else 253) - two.info.n_past))
    before = two.info.n_past
    for drafts, fits in ((3, False), (1, True)):
        engine.begin([Rows(one, [3]), Rows(two, [4])])
        drive.follow([one, two], [0, drafts])
        assert len(engine.wait()) == 2 and engine.under_way == fits
        assert two.info.n_past == before + fits
    three.close()


# A checked build of ggml ends where a norm meets such values.
@pytest.mark.parametrize("bad", ["choices", "drafts"])
def test_logits_that_are_not_finite_are_not_followed(model: Model, engine: Engine, bad: str) -> None:
    one, two, _ = started(engine)
    if bad == "choices":
        engine.begin([Rows(one, [3]), Rows(two, [BAD])])
    else:
        engine.draft([Drafts(two, BAD, 2)])
        engine.begin([Rows(one, [3]), Rows(two, n=1)])
    drive.follow([one, two], [1, 1])
    results = engine.wait()
    assert not engine.under_way and one.info.n_past == 20
    assert isinstance(results[0], Verified) and isinstance(results[1], NumericError)


def test_a_drafter_s_logits_that_are_not_finite_are_told(engine: Engine) -> None:
    """The head has read what the trunk fails of, so both have."""
    one, _, _ = started(engine)
    engine.draft([Drafts(one, BAD, 2)])
    with pytest.raises(NumericError, match="draft 0"):
        one.drafted(2)
    (result,) = engine.verified([Rows(one, n=3)])
    assert isinstance(result, NumericError)


@pytest.mark.parametrize("after", range(5))
@pytest.mark.sanitize
def test_a_device_that_fails_in_what_follows_fails_its_sequences(
    native: Library, engine: Engine, device: str, after: int
) -> None:
    """The step before it was done, and its results are told."""
    sequences = started(engine)
    engine.begin([Rows(each, [3]) for each in sequences])
    drive.follow(sequences, [1, 2, 0])
    with fault(native, round_fault(device), after if device.startswith("cpu") else after // 2):
        assert all(isinstance(each, Verified) for each in engine.wait())
    assert engine.under_way == 1 and all(each.info.failed for each in sequences)
    with pytest.raises(DeviceError, match="asked for it"):
        engine.wait()
    for each in sequences:
        each.reset()
        drive.prefill(each, tokens_of(20))
    engine.begin([Rows(each, [3]) for each in sequences])
    drive.follow(sequences, [1, 2, 0])
    assert len(engine.wait()) == len(engine.wait()) == 3
