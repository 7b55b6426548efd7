"""Rounds in flight: what is begun with what, whom a failure is told, and what is left when a sequence is dropped."""

import ast
from pathlib import Path

import pytest
from fake_core import FakeEngine, expected, hashed

import luce
from luce.decode.pipeline import Decision, Landed, Pipeline, Read
from luce.errors import ArgumentError, Cancelled, DeviceError, StateError
from luce.native import Drafts, Prompt, Rows
from luce.speculate.drafting import NOTHING, Draft

VERBS = {"prefill", "begin", "wait", "draft", "verified"}
PROMPTS = [(65, 66), (70, 71, 72), (80,)]


def opened(n=1, **asked):
    """Makes a pipeline over an engine whose n sequences have read a prompt each, and their anchors."""
    core = FakeEngine(n_sequences=n, **asked)
    sequences = [core.sequence() for _ in range(n)]
    anchors = [one.prefill(prompt) for one, prompt in zip(sequences, PROMPTS, strict=False)]
    return core, Pipeline(core, core.clock), sequences, anchors


def anchored(sequences, anchors):
    return [Rows(one, (anchor,)) for one, anchor in zip(sequences, anchors, strict=True)]


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_a_round_gives_each_sequence_its_own(ahead):
    core, pipeline, sequences, anchors = opened(3, ahead=ahead)
    pipeline.enqueue(anchored(sequences, anchors))
    assert pipeline.pending
    landed = pipeline.land()
    assert list(landed) == sequences and not pipeline.pending
    for one, anchor, prompt in zip(sequences, anchors, PROMPTS, strict=True):
        assert (landed[one].tokens, landed[one].choices) == ([anchor], [hashed((*prompt, anchor))])
        assert (landed[one].begun, landed[one].behind) == (None, False)
    assert pipeline.land() == {}, "nothing is in flight"


def test_two_rounds_are_in_flight_at_most():
    core, pipeline, sequences, anchors = opened(2, ahead=True)
    decided = {one: Decision() for one in sequences}
    pipeline.next(decided)
    assert not pipeline.pending, "it goes on from a round"
    pipeline.enqueue(anchored(sequences, anchors))
    for _ in range(3):
        pipeline.next(decided)
        assert core.under_way == 2
    first = pipeline.land()
    assert [each.begun for each in first.values()] == [NOTHING] * 2
    assert [each.choices for each in pipeline.land().values()] == [
        [expected(hashed, 3, prompt)[-1]] for prompt in PROMPTS[:2]
    ]
    assert not pipeline.pending


CHAIN = Draft(on_device=2)


@pytest.mark.parametrize(
    ("decisions", "begun", "behind"),
    [
        ([Decision(), Decision()], True, False),
        ([Decision(next=CHAIN), Decision()], True, False),
        ([Decision(next=None), Decision()], False, True),  # Its tokens decide it.
        ([Decision(next=None), Decision(ahead=False)], False, False),  # Plain rounds would wait too.
        ([Decision(next=CHAIN), Decision(next=Draft(on_device=2, by=2))], False, True),  # Of two sources.
        ([Decision(next=Draft(on_device=40)), Decision(next=Draft(on_device=23))], False, True),  # Of 65 rows.
        ([Decision()], False, False),  # One of the round is not to go on.
    ],
)
def test_the_next_round_is_begun_where_all_know_what_they_draft(decisions, begun, behind):
    core, pipeline, sequences, anchors = opened(2, ahead=True)
    pipeline.enqueue(anchored(sequences, anchors))
    pipeline.next(dict(zip(sequences, decisions, strict=False)))
    landed = list(pipeline.land().values())
    assert [each.begun for each in landed] == ([each.next for each in decisions] if begun else [None] * 2)
    assert [each.behind for each in landed] == [behind] * 2 and pipeline.pending is begun


def test_a_round_that_its_wait_does_not_begin_is_behind():
    core, pipeline, sequences, anchors = opened(1, ahead=True)
    core.go_on = lambda *of: None
    pipeline.enqueue(anchored(sequences, anchors))
    pipeline.next({sequences[0]: Decision(next=CHAIN)})
    (landed,) = pipeline.land().values()
    assert (landed.begun, landed.behind, pipeline.pending) == (None, True, False)


def test_who_is_dropped_is_told_nothing_and_the_round_lands_for_the_others():
    core, pipeline, sequences, anchors = opened(3, ahead=True)
    pipeline.enqueue(anchored(sequences, anchors))
    pipeline.next({one: Decision() for one in sequences})
    pipeline.drop(sequences[1])
    assert list(pipeline.land()) == [sequences[0], sequences[2]]
    pipeline.next({one: Decision() for one in (sequences[0], sequences[2])})  # It is not of all in flight.
    assert core.under_way == 1
    pipeline.drop(sequences[0])
    assert list(pipeline.land()) == [sequences[2]] and not pipeline.pending


def test_nothing_is_in_flight_once_all_are_dropped():
    core, pipeline, sequences, anchors = opened(2, ahead=True)
    pipeline.enqueue(anchored(sequences, anchors))
    pipeline.next({one: Decision() for one in sequences})
    for one in sequences:
        assert pipeline.pending
        pipeline.drop(one)
    assert not pipeline.pending and pipeline.land() == {}


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_who_is_to_blame_fails_alone(ahead):
    core, pipeline, sequences, anchors = opened(3, ahead=ahead)
    rows = anchored(sequences, anchors)
    rows[1] = rows[1]._replace(tokens=(-1,))
    pipeline.enqueue(rows)
    landed = list(pipeline.land().values())
    assert isinstance(landed[1], ArgumentError)
    assert [each.choices for each in (landed[0], landed[2])] == [
        [hashed((*PROMPTS[at], anchors[at]))] for at in (0, 2)
    ]


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_a_device_that_fails_is_told_to_all(ahead):
    error = DeviceError("gone")
    core, pipeline, sequences, anchors = opened(2, ahead=ahead, fail={"verify": (0, error)})
    pipeline.enqueue(anchored(sequences, anchors))
    assert pipeline.land() == dict.fromkeys(sequences, error) and not pipeline.pending


def test_a_next_round_that_fails_lands_after_the_one_ahead_of_it():
    error = DeviceError("gone")
    core, pipeline, sequences, anchors = opened(2, ahead=True, fail={"verify": (1, error)})
    pipeline.enqueue(anchored(sequences, anchors))
    pipeline.next({one: Decision() for one in sequences})
    first = pipeline.land()
    assert [each.begun for each in first.values()] == [NOTHING] * 2, "what it committed is booked"
    assert pipeline.land() == dict.fromkeys(sequences, error) and not pipeline.pending


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_a_cancel_leaves_nothing_in_flight(ahead):
    core, pipeline, sequences, anchors = opened(1, ahead=ahead)
    core.cancel()
    with pytest.raises(Cancelled):
        pipeline.enqueue(anchored(sequences, anchors))
        pipeline.land()
    assert not pipeline.pending
    pipeline.enqueue(anchored(sequences, anchors))
    assert pipeline.land()[sequences[0]].choices == [hashed((*PROMPTS[0], anchors[0]))]


def test_drafts_of_several_are_one_step_and_who_cannot_draft_fails_alone():
    core, pipeline, sequences, anchors = opened(2, seconds={"draft": 0.5})
    items = [Drafts(one, anchor, 2) for one, anchor in zip(sequences, anchors, strict=True)]
    assert pipeline.draft(items) == dict.fromkeys(sequences, Landed(seconds=0.5))
    assert core.count("draft") == 1
    outcomes = pipeline.draft([items[0], items[1]._replace(n=99)])
    assert isinstance(outcomes[sequences[0]], Landed) and isinstance(outcomes[sequences[1]], ArgumentError)


def test_a_round_counts_from_the_one_before_it_unless_something_came_between():
    core, pipeline, sequences, anchors = opened(2, ahead=False, seconds={"verify": 0.5})

    def period(of):
        pipeline.enqueue(anchored(sequences[:of], anchors[:of]))
        return pipeline.land()[sequences[0]].period

    assert [period(2), period(2), period(1), period(1)] == [None, 0.5, None, 0.5]
    pipeline.read([Prompt(sequences[1], (1,), last=False)])
    assert [period(1), period(1)] == [None, 0.5]


def test_chunks_that_were_read_are_told_where_a_cancel_keeps_others_from_it():
    """One of them is to blame for an error, so that they are read one after the other."""
    for cancelled in (0, 1, 2):
        core, pipeline, sequences, _ = opened(3)
        chunks = [Prompt(each, (9,) if at != 2 else (-1,), last=False) for at, each in enumerate(sequences)]
        before = [list(each.committed) for each in sequences]
        at = 3 + 2 + cancelled  # Three prompts were read, and then all chunks are asked for at once.
        core.on_call = lambda verb, core=core, at=at: core.cancel() if core.count("prefill") == at else None
        if cancelled == 0:
            with pytest.raises(Cancelled):
                pipeline.read(chunks)
        else:
            found = pipeline.read(chunks)
            assert list(found) == sequences[:cancelled] and set(found.values()) == {Read(None)}
        read = [each.committed == [*ahead, 9] for each, ahead in zip(sequences, before, strict=True)]
        assert read == [at < cancelled for at in range(3)]


def test_a_wait_that_fails_is_told_to_all():
    core, pipeline, sequences, anchors = opened(2, ahead=True, fail={"wait": (0, StateError("lost"))})
    pipeline.enqueue(anchored(sequences, anchors))
    assert [type(each) for each in pipeline.land().values()] == [StateError] * 2


def test_the_pipeline_alone_calls_the_cores_rounds():
    """In all that generates. `luce bench` times single steps of the core, `luce doctor` compares them, and a scorer of
    prompts commits nothing of what it verifies."""
    package, calls = Path(luce.__file__).parent, set()
    for path in package.rglob("*.py"):
        chapter = path.relative_to(package).parts[0]
        for node in ast.walk(ast.parse(path.read_text())) if chapter not in ("native", "bench", "doctor") else ():
            if isinstance(node, ast.Attribute) and node.attr in VERBS | {"verify"}:
                if ast.unparse(node.value).rpartition(".")[2] in ("engine", "_engine", "native"):
                    calls.add((path.name, node.attr))
    assert calls == {("pipeline.py", verb) for verb in VERBS} | {("scorer.py", "verify")}
