"""Failures that cannot be had on demand, which the core's test ABI makes: a graph that is not built, a device
that fails in the middle of a step, a caller that leaves another device current. What fails is said, no one
else is touched, and all of it works again afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import box_model
import drive
import nan_model
import numpy as np
import pytest
import tiny_gemma4
from checkout import TESTS
from depth import deeper
from nan_model import tokens_of
from op_run import Fault, fault, leave_device, op_run, pretended_devices, round_fault
from split import stages

import luce
from luce.errors import DeviceError, Error, InternalError, OutOfMemory, StateError
from luce.native import Drafts, Engine, Form, Library, Model, Rows, Source
from luce.native import Sequence as Timeline

PROMPT = tokens_of(30, seed=2)


@pytest.fixture(params=["qwen35", *deeper("gemma4")])
def model(request: pytest.FixtureRequest, native: Library, small_gguf: Path, device: str, tmp_path: Path) -> Model:
    """A model with its head, and one with windows, layers that share cells, and its assistant."""
    if request.param == "qwen35":
        return drive.open_model(native, small_gguf, device, head=True)
    (config, seed), own = tiny_gemma4.CASES["per-layer"], tiny_gemma4.ORDERED
    target = tiny_gemma4.write(tmp_path / "target.gguf", config, tiny_gemma4.layout(config, seed))
    assistant = tiny_gemma4.write(tmp_path / "assistant.gguf", own, tiny_gemma4.layout(own, tiny_gemma4.ORDERED_SEED))
    return drive.open_model(native, target, device, head=assistant)


def open_engine(model: Model) -> Engine:
    return nan_model.open_engine(model, n_rows=3, n_draft=2)


def decoded(sequence: Timeline) -> tuple[list[int], bytes]:
    """Returns tokens after a prompt, with drafts, and the bits of the logits that chose them."""
    found = drive.decode(sequence, PROMPT, 8, (2, 0), logits=True)
    return found.tokens, np.stack(found.logits).tobytes()


@pytest.fixture
def expected(model: Model) -> tuple[list[int], bytes]:
    with open_engine(model) as engine:
        return decoded(engine.sequence())


# ---- opening


def failures(make: Callable[[int], None], spread: int) -> Iterator[tuple[int, Error]]:
    """Yields (n, what it raised) of make(n) for n = 0, 1, 2, 4 .. until it raises nothing, and for `spread`
    more between the last two."""
    n, last = 0, 0
    while (error := raised(make, n)) is not None:
        yield n, error
        n, last = max(2 * n, 1), n
    for more in np.linspace(last, n, spread, endpoint=False, dtype=int)[1:]:
        if (error := raised(make, int(more))) is not None:
            yield int(more), error


def raised(make: Callable[[int], None], n: int) -> Error | None:
    try:
        make(n)
    except Error as error:
        return error
    return None


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Fault.GRAPH, OutOfMemory), (Fault.SIZE, InternalError), (Fault.OP, DeviceError),
        (Fault.LAUNCH, DeviceError),
    ],
)  # fmt: skip
def test_an_opening_that_fails_leaves_nothing_behind(
    kind: Fault, error: type[Error], native: Library, model: Model, device: str, expected: object
) -> None:
    """An opening is failed at any graph that it builds and at many of the ops that it runs. On a GPU the ops
    fail first as they run, then as they are captured: the stream is not left capturing. What was captured
    fails as it is launched."""

    def make(after: int) -> None:
        with fault(native, kind, after):
            open_engine(model).close()

    seen = list(failures(make, 6))
    if kind is Fault.LAUNCH and device.startswith("cpu"):
        assert not seen, "nothing is captured there"
    else:
        assert len(seen) > 4 and {type(each) for _, each in seen} == {error}
    with open_engine(model) as engine, engine.sequence() as sequence:
        assert decoded(sequence) == expected


# ---- prompts


@pytest.mark.parametrize(
    ("kind", "error"), [(Fault.GRAPH, DeviceError), (Fault.SIZE, InternalError), (Fault.OP, DeviceError)]
)
def test_a_prompt_that_fails_fails_alone(
    kind: Fault, error: type[Error], native: Library, model: Model, expected: tuple[list[int], bytes]
) -> None:
    """Its graph is built for the occasion, in the memory of all others: these have what they had."""
    engine = open_engine(model)
    one, other = engine.sequence(), engine.sequence()
    drive.prefill(other, PROMPT)
    before, first = other.dump(), drive.verify(other, [5, 6])
    for after in {Fault.OP: (0, 1, 7, 20)}.get(kind, (0,)):
        with fault(native, kind, after), pytest.raises(error):
            one.prefill(tokens_of(40 + after))
        assert one.info.failed and not other.info.failed
        assert drive.verify(other, [5, 6]) == first
        one.reset()
        assert decoded(one) == expected
    assert other.dump() == before
    other.reset()
    assert decoded(other) == expected


# ---- rounds


def test_a_round_that_fails_takes_its_own_sequences_along(
    native: Library, model: Model, device: str, expected: tuple[list[int], bytes]
) -> None:
    engine = open_engine(model)
    one, two, other = (engine.sequence() for _ in range(3))
    for each in (one, two, other):
        drive.prefill(each, PROMPT)
    state = other.dump()
    steps: list[Callable[[], object]] = [
        lambda: engine.verify([Rows(one, [1, 2]), Rows(two, [3])]),
        lambda: engine.draft([Drafts(one, 1, 1), Drafts(two, 2, 2)]),
    ]
    for step in steps:
        for after in (0, 3, 9) if device.startswith("cpu") else (0,):
            with fault(native, round_fault(device), after), pytest.raises(DeviceError, match="asked for it"):
                step()
            assert [each.info.failed for each in (one, two, other)] == [1, 1, 0]
            assert other.dump() == state
            for each in (one, two):
                each.reset()
                drive.prefill(each, PROMPT)
    for each in (one, two, other):
        each.reset()
        assert decoded(each) == expected


def test_a_round_takes_along_sequences_that_it_had_not_come_to(
    native: Library, model: Model, device: str, expected: tuple[list[int], bytes]
) -> None:
    """The rows that the first sequence owes the head are fed ahead of the round, and that fails."""
    engine = open_engine(model)
    one, two, other = (engine.sequence() for _ in range(3))
    steps: list[Callable[[], object]] = [
        lambda: engine.verify([Rows(one, [1, 2]), Rows(two, [3])]),
        lambda: engine.draft([Drafts(one, 1, 1), Drafts(two, 2, 2)]),
    ]
    for step in steps:
        restarted([one, two, other])
        for each in (one, two):
            drive.step(each, 3)
        state = other.dump()
        with fault(native, round_fault(device)), pytest.raises(DeviceError, match="asked for it"):
            step()
        assert [each.info.failed for each in (one, two, other)] == [1, 1, 0]
        assert other.dump() == state
    for each in (one, two, other):
        each.reset()
        assert decoded(each) == expected


def test_a_wait_that_fails_fails_the_steps_that_it_was_for(
    native: Library, model: Model, expected: tuple[list[int], bytes]
) -> None:
    """What the device failed with shows where the host waits for it: the step's sequences and those of the
    step that follows it are failed, and no other. Later waits are for what was begun later."""
    engine = open_engine(model)
    one, two, other = (engine.sequence() for _ in range(3))
    restarted([one, two, other])
    state = other.dump()
    engine.begin([Rows(one, [1]), Rows(two, [3])])
    drive.follow([one, two])
    with fault(native, Fault.WAIT), pytest.raises(DeviceError, match="asked for it"):
        engine.wait()
    with pytest.raises(DeviceError, match="asked for it"):
        engine.wait()
    assert [each.info.failed for each in (one, two, other)] == [1, 1, 0]
    assert other.dump() == state
    one.reset()
    with fault(native, Fault.WAIT), pytest.raises(DeviceError):
        one.prefill(PROMPT)
    two.reset()
    drive.prefill(two, PROMPT)
    drive.draft(two, 1, 2)
    with fault(native, Fault.WAIT), pytest.raises(DeviceError):
        two.drafted(2)
    assert len(two.drafted(2)) == 2, "no step of its failed"
    assert [each.info.failed for each in (one, two, other)] == [1, 0, 0]
    for each in (one, two, other):
        each.reset()
        assert decoded(each) == expected


def test_a_chain_that_fails_fails_its_sequence_alone(
    native: Library, model: Model, device: str, expected: tuple[list[int], bytes]
) -> None:
    """A GPU launches all links of one sequence's chain at once."""
    engine = open_engine(model)
    both = [engine.sequence() for _ in range(2)]
    restarted(both)
    state = both[1].dump()
    with fault(native, round_fault(device)), pytest.raises(DeviceError, match="asked for it"):
        engine.draft([Drafts(both[0], 1, 2)])
    assert [each.info.failed for each in both] == [1, 0]
    assert both[1].dump() == state
    for each in both:
        each.reset()
        assert decoded(each) == expected


def test_no_round_of_any_width_waits_for_a_graph(native: Library, device: str) -> None:
    """Graphs of all row counts and drafts are there when an engine is open, and on a GPU they are captured:
    none is built for a round, and no op runs or is captured for one. A prompt, whose graph is built for the
    occasion and runs as it is, shows that this would fail."""
    model = drive.open_model(native, box_model.GGUF, device, head=True, drafter=box_model.DRAFTER)
    engine = drive.open_engine(
        model, n_ctx=300, n_sequences=2, n_rows=32, n_draft=8, blocks=1, n_top=4, n_part=128
    )
    both = [engine.sequence() for _ in range(2)]
    for kind in (Fault.GRAPH,) if device.startswith("cpu") else (Fault.GRAPH, Fault.OP):
        restarted(both)
        with fault(native, kind, 0):
            rounds_of_all_widths(engine, both)
            with pytest.raises(DeviceError):
                both[0].prefill(PROMPT[:7])


def rounds_of_all_widths(engine: Engine, both: list[Timeline]) -> None:
    for rows in range(1, 65):
        parts = zip(both, (min(rows, 32), rows - 32), strict=True)
        engine.verify([Rows(each, [3] * n) for each, n in parts if n > 0])
    for source, most in ((Source.NEXTN, 8), (Source.PART, 8), (Source.DFLASH, engine.info.n_block - 1)):
        for n in range(1, most + 1):
            for some in (both[:1], both):
                engine.draft([Drafts(each, 3, n, source) for each in some])
                form = Form.INDEPENDENT if source is Source.DFLASH else Form.CHAIN
                assert some[-1].lists(n, 4, form).at(n - 1)
                engine.verify([Rows(each, n=n + 1) for each in some])
    for each in both:
        each.commit([0, 1])
    engine.verify([Rows(each, [3, 4, 5], [-1, 0, 0]) for each in both])
    for _ in range(2):  # What a row that is decoded plainly leaves to the head is fed before its next drafts.
        engine.verify([Rows(both[0], [3])])
        both[0].commit([0])
    engine.draft([Drafts(both[0], 3, 2)])
    engine.verify([Rows(both[0], n=3)])


def whose_steps_fail(
    native: Library,
    sequences: list[Timeline],
    draft: Callable[[], object],
    begin: Callable[[], object],
    kind: Fault,
    stride: int,
) -> set[tuple[int, ...]]:
    """Returns which sequences failed, of a draft that fails ever later until it does not."""
    seen = set()
    for after in range(0, 1000, stride if kind is Fault.OP else 1):
        begin()
        with fault(native, kind, after):
            error = raised(lambda _: draft(), 0)
        failed = tuple(each.info.failed for each in sequences)
        assert (error is None) == (sum(failed) == 0)
        seen.add(failed)
        for each in sequences:
            if each.info.failed:
                each.reset()
        if error is None:
            break
    return seen


def restarted(sequences: list[Timeline]) -> None:
    for each in sequences:
        each.reset()
        drive.prefill(each, PROMPT)


def test_a_draft_that_fails_takes_along_those_of_its_step(native: Library, model: Model, device: str) -> None:
    """A chain has a step for each of its links, and one that had ended before is there to be verified; blocks
    have a step for as many as find room."""
    engine = open_engine(model)
    sequences = [engine.sequence() for _ in range(2)]
    seen = whose_steps_fail(
        native,
        sequences,
        lambda: engine.draft([Drafts(each, 1, n) for each, n in zip(sequences, (1, 2), strict=True)]),
        lambda: restarted(sequences),
        round_fault(device),
        3,
    )
    assert seen == {(1, 1), (0, 1), (0, 0)}
    drive.verify_draft(sequences[0], 1)

    model = drive.open_model(native, box_model.GGUF, device, drafter=box_model.DRAFTER)
    engine = drive.open_engine(model, n_ctx=100, n_sequences=5, n_rows=16, blocks=1)
    sequences = [engine.sequence() for _ in range(5)]
    size = engine.info.n_block - 1
    seen = whose_steps_fail(
        native,
        sequences,
        lambda: engine.draft([Drafts(each, 1, size, Source.DFLASH) for each in sequences]),
        lambda: restarted(sequences),
        round_fault(device),
        25,
    )
    assert len(seen) == 3
    assert all(list(failed) == sorted(failed, reverse=failed[0] == 1) for failed in seen)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_checkpoint_whose_copy_to_the_host_fails_is_lost_alone(native: Library, model: Model, after: int) -> None:
    """It fails at the state or at one of two pages. All that it held on the device is free again."""
    engine = nan_model.open_engine(model, n_ctx=600, n_checkpoints=2)
    sequence = engine.sequence()
    drive.prefill(sequence, tokens_of(384))
    state, other = sequence.dump(), sequence.checkpoint()
    before = engine.info.checkpoints_free, engine.info.pages_free
    lost = sequence.checkpoint()
    with fault(native, Fault.LEAVE, after):
        lost.to_host()
        for call in (lost.to_device, lost.save, lambda: sequence.resume(lost)):
            with pytest.raises(StateError, match="the checkpoint is lost: its copy to the host failed, since a test"):
                call()
    assert (engine.info.checkpoints_free, engine.info.pages_free) == before
    assert sequence.dump() == state
    other.to_host()
    sequence.resume(other)
    assert sequence.info.n_past == 384


# ---- memory


def test_calls_that_lack_memory_do_nothing_or_say_what_failed(small_gguf: Path, tmp_path: Path) -> None:
    """Each of the core's own allocations fails in turn. A commit has none: what the caller was told is
    accepted is booked. What follows a step books its rows once, and the step's end clears no failure."""
    preloaded = tmp_path / "failing_new.so"
    source = Path(__file__).parent / "failing_new.cpp"
    subprocess.run(["c++", "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", preloaded], check=True)
    paths = os.pathsep.join([str(Path(luce.__file__).parent.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, TESTS / "support" / "lacking_memory.py", small_gguf],
        env=os.environ | {"LD_PRELOAD": str(preloaded), "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(n) for name, n in (line.split() for line in done.stdout.splitlines())}
    assert counts["commit"] == counts["reset"] == counts["leaving"] == 0
    assert counts["leaving_fails"] > 0, "an error has its text"
    assert min(counts[name] for name in ("open", "prefill", "draft", "verify", "follow", "make", "load")) > 0


# ---- several devices


@pytest.fixture
def three(native: Library, device: str) -> Iterator[list[str]]:
    """Gives the names of three devices: of a CPU pretended ones, so that each has its own."""
    if not device.startswith("cpu"):
        if (found := stages(device, 3) or stages(device, 2)) is None:
            pytest.skip("a stage needs a GPU of its own")
        yield found.split(",")
        return
    names = [f"fake:{i}" for i in range(3)]
    with pretended_devices(native, dict.fromkeys(names, 1 << 34)):
        yield names


@pytest.mark.parametrize("apart", [False, True])
def test_the_device_that_fails_is_named_alone(
    native: Library, small_gguf: Path, device: str, three: list[str], apart: bool
) -> None:
    """Each op of a step fails once: those of the first stage come first. What drafts has its last one, and may have no
    layers. A captured step runs no op of its own, so that on GPUs it is prompts alone."""
    names = three if apart else three[:2]
    where, drafts = (names[:-1], names[-1]) if apart else (names, None)
    model = drive.open_model(native, small_gguf, ",".join(where), head=True, draft_device=drafts)
    engine = open_engine(model)
    one, other = engine.sequence(), engine.sequence()
    expected = decoded(one)
    steps: list[tuple[list[str], Callable[[], object]]] = [(names, lambda: drive.prefill(one, PROMPT[:7]))]
    if device.startswith("cpu"):
        steps.append((names, lambda: engine.verify([Rows(one, [1, 2])])))
        steps.append(([names[0], names[-1]], lambda: engine.draft([Drafts(one, 1, 1)])))  # It looks its token up there.
    for on, step in steps:
        named = list[str]()
        for after in range(1000):
            one.reset()
            drive.prefill(one, PROMPT)
            with fault(native, Fault.OP, after):
                error = raised(lambda _, step=step: step(), 0)
            if error is None:
                break
            assert isinstance(error, DeviceError) and one.info.failed == 1 and other.info.failed == 0
            named.append(str(error).partition(": ")[0])
        assert [name for name, _ in groupby(named)] == on and len(named) > 3
    for each in (one, other):
        each.reset()
        assert decoded(each) == expected


# ---- the current device


def test_every_call_runs_on_its_engines_device(native: Library, small_gguf: Path, device: str) -> None:
    """Calls run so whatever device the calling thread was left on, with engines on all devices of the kind in
    turn."""
    kind = device.partition(":")[0]
    names = [each.name for each in native.devices() if each.name.startswith(kind)]
    models = [drive.open_model(native, small_gguf, name, head=True) for name in names]
    sequences = [open_engine(model).sequence() for model in models]
    found: list[list[list[int]]] = []
    for leave in (False, True):
        texts = []
        for at, sequence in enumerate(sequences):
            sequence.reset()
            away = (at + 1) % len(names) if len(names) > 1 else -1
            go = (lambda away=away: leave_device(native, away)) if leave else lambda: None
            go()
            text = [drive.start(sequence, PROMPT)]
            while len(text) < 8:
                go()
                drive.draft(sequence, text[-1], 2)
                go()
                choices = drive.verify_draft(sequence, 2)
                go()
                path_, following = sequence.accept([text[-1], *sequence.drafted(2)], None, choices)
                sequence.commit(path_)
                text += [*choices[: len(path_) - 1], following]
            go()
            sequence.dump()
            texts.append(text)
        found.append(texts)
    assert found[0] == found[1] and all(text == found[0][0] for text in found[0])


def test_engines_open_keep_and_close_on_their_own_device(
    native: Library, small_gguf: Path, device: str
) -> None:
    """Another device is current before each call. Steps that follow each other run on the engine's all the
    same, and checkpoints copy there."""
    kind = device.partition(":")[0]
    names = [each.name for each in native.devices() if each.name.startswith(kind)]
    prompt = tokens_of(256, seed=3)
    found = []
    for at, name in enumerate(names):
        away = (at + 1) % len(names) if len(names) > 1 else -1
        model = drive.open_model(native, small_gguf, name, head=True)
        for leave in (False, True):
            go = (lambda away=away: leave_device(native, away)) if leave else lambda: None
            go()
            engine = open_engine(model)
            go()
            sequence = engine.sequence()
            go()
            sequence.prefill(prompt, last=False)
            go()
            checkpoint = sequence.checkpoint()
            go()
            checkpoint.to_host()
            go()
            engine.begin([Rows(sequence, [3])])
            go()
            drive.follow([sequence])
            go()
            choices = [engine.wait()]
            go()
            choices.append(engine.wait())
            go()
            sequence.resume(checkpoint)
            go()
            choices.append(engine.verify([Rows(sequence, [3, 4], [-1, 0])]))
            go()
            checkpoint.to_device()
            go()
            found.append((choices, bytes(checkpoint.save())))
            for each in (checkpoint, sequence, engine):
                go()
                each.close()
    assert all(each[0] == found[0][0] for each in found)
    assert all(found[at][1] == found[at + 1][1] for at in range(0, len(found), 2))


def test_an_op_alone_runs_on_the_device_it_is_given(native: Library, device: str) -> None:
    """A graph that has luce's ops alone, none of ggml's, which would set the device."""
    kind = device.partition(":")[0]
    names = [each.name for each in native.devices() if each.name.startswith(kind)]
    tokens, drafts = np.array([3, -2, 7], np.int32), np.array([[4, 0], [5, 0]], np.int32)
    for at, name in enumerate(names):
        leave_device(native, (at + 1) % len(names) if len(names) > 1 else -1)
        out = op_run(native, name, "row_tokens", [tokens, drafts], [10], shape=(3,), dtype=np.int32)
        assert out.tolist() == [3, 5, 7]
