"""Runs the state machine, over a fake core: what is emitted, what is committed, how it ends."""

import itertools

import fake_core
import pytest
from depth import examples
from fake_core import EOS, N_VOCAB, PROMPT, FakeEngine, drive, expected, finish, generation, hashed, run, scripted
from fake_sources import Chain, Faulty, OnDevice, Trees
from hypothesis import given
from hypothesis import strategies as st

from luce.decode.events import Event, Failed, Finished, Prefilled, Started, State, Tokens, Warned
from luce.decode.loop import Loop
from luce.decode.request import Request
from luce.errors import ArgumentError, ContextFull, InternalError, NumericError
from luce.native.structs import Sampling
from luce.speculate.drafting import Draft, Round


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["in turn", "ahead"])
def way(request):
    """Runs all tests with rounds in turn, and with rounds that are begun ahead."""
    fake_core.AHEAD = request.param
    yield
    fake_core.AHEAD = False


def test_plain_emits_the_choices_up_to_the_budget():
    core = FakeEngine()
    last = finish(core, max_tokens=20)
    assert last.tokens == expected(hashed, 20)
    assert last.reason == "length"
    assert last.prompt_tokens == len(PROMPT)


def test_events_come_in_order():
    events = run(FakeEngine(n_chunk=3), max_tokens=2)
    assert [type(event) for event in events] == [
        Started, Prefilled, Prefilled, Prefilled, Tokens, Round, Tokens, Finished,
    ]  # fmt: skip
    assert [event.done for event in events[1:4]] == [3, 6, 8]


SOURCES = {"plain": None, "drafts": OnDevice(2), "broken": Faulty(RuntimeError("broken"))}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_events_are_data(source):
    """Text is made by the end of a turn, whoever reads its events and when."""
    events = run(FakeEngine(n_chunk=3), source)
    assert len(events) > 5 and all(isinstance(event, Event) and not callable(event) for event in events)
    held = [value for event in events for value in (event if isinstance(event, tuple) else vars(event).values())]
    assert len(held) > 20 and not any(callable(value) for value in held)


MOVES = {  # By what comes in which state: the states that may follow.
    ("begin", State.IDLE): {State.PREFILL, State.FAILED},
    ("landed", State.PREFILL): {State.PREFILL, State.DRAFT, State.VERIFY, State.DONE, State.FAILED},
    ("offer", State.DRAFT): {State.DRAFT, State.VERIFY, State.FAILED},
    ("landed", State.DRAFT): {State.VERIFY, State.FAILED},
    ("landed", State.VERIFY): {State.DRAFT, State.VERIFY, State.DONE, State.FAILED},
    ("fail", State.PREFILL): {State.FAILED},
    ("fail", State.DRAFT): {State.VERIFY, State.FAILED},
    ("fail", State.VERIFY): {State.VERIFY, State.FAILED},
    ("cancel", State.PREFILL): {State.DONE},
    ("cancel", State.DRAFT): {State.DONE},
    ("cancel", State.VERIFY): {State.DONE},
}


@examples(60)
@given(
    kind=st.sampled_from(["plain", "device", "trees", "faulty"]),
    fail=st.none() | st.tuples(st.sampled_from(["prefill", "draft", "verify", "commit"]), st.integers(0, 6)),
    error=st.sampled_from([NumericError("nan"), ArgumentError("args"), InternalError("defect")]),
    cancelled=st.integers(0, 30),
)
def test_states_follow_each_other_as_the_table_says(kind, fail, error, cancelled):
    asked, answers, moves = ("begin", "offer", "landed", "fail", "cancel"), itertools.count(), []
    core = FakeEngine(n_chunk=3, fail={fail[0]: (fail[1], error)} if fail else {})
    source = {"plain": None, "device": OnDevice(2), "faulty": Faulty(RuntimeError("broken"), "learn"),
              "trees": Trees(core, [[(0, True), (0, False)], []])}[kind]  # fmt: skip
    one = generation(core, Request(PROMPT, 9), source, lambda: next(answers) == cancelled)

    def watched(verb, call):
        def run(*given):
            before, events = one.state, call(*given)
            moves.append((verb, before, one.state))
            return events

        return run

    for verb in asked:
        setattr(one, verb, watched(verb, getattr(one, verb)))
    drive(core, [one])
    for verb, before, after in moves:
        assert after in MOVES[verb, before]
    assert moves[0][:2] == ("begin", State.IDLE) and one.over
    assert [after for *_, after in moves if after in (State.DONE, State.FAILED)] == [one.state]


def test_prompt_is_committed_in_whole_chunks():
    core = FakeEngine(n_chunk=3)
    run(core, max_tokens=0)
    assert [chunks for verb, chunks in core.calls if verb == "prefill"] == [
        [PROMPT[0:3]], [PROMPT[3:6]], [PROMPT[6:8]],
    ]  # fmt: skip


def test_sampling_reaches_the_core_before_the_first_choice():
    core, sampling = FakeEngine(), Sampling(temperature=0.5, seed=3)
    run(core, max_tokens=1, sampling=sampling)
    verbs = [verb for verb, _ in core.calls]
    assert ("set_sampling", sampling) in core.calls
    assert verbs.index("set_sampling") < verbs.index("prefill")


def test_budget_of_zero_emits_nothing():
    core = FakeEngine()
    last = finish(core, max_tokens=0)
    assert (last.tokens, last.text, last.reason, last.truncated_by) == ((), "", "length", "max_tokens")
    assert core.count("verify") == 0


def test_budget_of_one_needs_no_round():
    core = FakeEngine()
    assert finish(core, max_tokens=1).tokens == expected(hashed, 1)
    assert core.count("verify") == 0


def test_end_of_text_as_first_token():
    core = FakeEngine(scripted(PROMPT, [EOS]))
    last = finish(core)
    assert (last.tokens, last.text, last.reason, last.truncated_by) == ((EOS,), "", "stop", None)
    assert core.committed == list(PROMPT)


def test_end_of_text_on_the_last_token_of_the_budget_is_a_stop():
    assert finish(FakeEngine(scripted(PROMPT, [65, EOS])), max_tokens=2).reason == "stop"


def test_nothing_follows_an_end_of_text_inside_an_accepted_block():
    choose = scripted(PROMPT, [65, 66, EOS, 67, 68])
    core = FakeEngine(choose)
    last = finish(core, source=Chain(core, choose))
    assert last.tokens == (65, 66, EOS)
    assert last.text == "AB"
    assert core.committed == [*PROMPT, 65, 66]


def test_empty_prompt_fails_and_says_why():
    last = run(FakeEngine(), prompt=())[-1]
    assert isinstance(last, Failed) and isinstance(last.error, ArgumentError)
    assert "at least one token" in str(last.error)


def test_prompt_of_one_token():
    assert finish(FakeEngine(), prompt=(5,), max_tokens=3).tokens == expected(hashed, 3, (5,))


@pytest.mark.parametrize(("room", "tokens"), [(0, 1), (1, 2), (5, 6)])
@pytest.mark.parametrize("budget", [20, None])
def test_context_full_ends_with_length_and_says_so(room, tokens, budget):
    core = FakeEngine(n_ctx=len(PROMPT) + room)
    last = finish(core, max_tokens=budget, source=OnDevice())
    assert last.tokens == expected(hashed, tokens)
    assert (last.reason, last.truncated_by) == ("length", "context")


@pytest.mark.parametrize("room", [0, 5])
def test_a_budget_that_ends_where_the_context_does_is_a_budget(room):
    last = finish(FakeEngine(n_ctx=len(PROMPT) + room), max_tokens=room + 1)
    assert (last.reason, last.truncated_by) == ("length", "max_tokens")


def test_an_end_of_text_is_a_token_where_it_is_ignored():
    last = finish(FakeEngine(scripted(PROMPT, [65, EOS, 66])), max_tokens=3, ignore_eos=True)
    assert (last.tokens, last.text, last.reason) == ((65, EOS, 66), "AB", "length")


def test_prompt_longer_than_the_context_names_both():
    core = FakeEngine(n_ctx=len(PROMPT) - 1)
    last = run(core)[-1]
    assert isinstance(last.error, ContextFull)
    assert "8" in str(last.error) and "7" in str(last.error)
    assert core.count("prefill") == 0


SHAPES = st.lists(st.lists(st.tuples(st.integers(0, 70), st.booleans()), max_size=70), min_size=1, max_size=4)


@examples(200)
@given(
    shapes=SHAPES,
    budget=st.integers(0, 40),
    n_rows=st.integers(1, 64),
    n_ctx=st.integers(8, 60),
    end=st.integers(0, 50),
)
def test_any_tree_gives_the_tokens_of_plain_decoding(shapes, budget, n_rows, n_ctx, end):
    script = [*expected(hashed, end), EOS]
    plain_core = FakeEngine(scripted(PROMPT, script), n_ctx=n_ctx)
    plain = finish(plain_core, max_tokens=budget)
    core = FakeEngine(scripted(PROMPT, script), n_ctx=n_ctx, n_rows=n_rows)
    events = run(core, max_tokens=budget, source=Trees(core, shapes))
    last = events[-1]
    assert not any(isinstance(event, Warned) for event in events)
    assert (last.tokens, last.text, last.reason) == (plain.tokens, plain.text, plain.reason)
    assert core.committed == plain_core.committed == [*PROMPT, *last.tokens[:-1]]
    assert last.stats.rounds <= plain.stats.rounds


def test_a_right_chain_saves_rounds():
    core = FakeEngine()
    last = finish(core, max_tokens=19, source=Chain(core, hashed, length=8))
    assert last.tokens == expected(hashed, 19)
    assert last.stats.rounds == 2  # The prefill gives 1 token, and each round 9.
    assert (last.stats.drafted, last.stats.accepted, last.stats.acceptance) == (16, 16, 1.0)
    assert last.stats.mean_accepted_length == 9.0
    assert last.stats.mode == "chain"


def test_a_wrong_chain_costs_no_tokens():
    core = FakeEngine()
    last = finish(core, max_tokens=10, source=Chain(core, lambda history: (hashed(history) + 1) % 256))
    assert last.tokens == expected(hashed, 10)
    assert (last.stats.rounds, last.stats.accepted, last.stats.acceptance) == (9, 0, 0.0)
    assert last.stats.mean_accepted_length == 1.0


def test_plain_has_no_acceptance():
    core = FakeEngine(ahead=False, seconds={"prefill": 3, "verify": 0.5, "commit": 0.25})
    stats = finish(core, max_tokens=5).stats
    assert (stats.mode, stats.rounds, stats.drafted, stats.acceptance) == ("plain", 4, 0, None)
    assert (stats.acceptance_by_position, stats.rounds_by_drafts) == ([], [4])
    assert (stats.prefill_s, stats.decode_s, stats.tok_per_s) == (3, 3, 4 / 3)
    assert (stats.draft_s, stats.verify_s, stats.commit_s) == (0, 2, 1)


def test_a_source_is_told_what_is_useful():
    core = FakeEngine(n_rows=4, n_ctx=len(PROMPT) + 6)
    source = Chain(core, lambda history: 0)
    run(core, max_tokens=4, source=source)
    assert [(rows, depth) for _, rows, depth in source.asked] == [(3, 2), (3, 1)]


@pytest.mark.parametrize(
    "draft",
    [
        RuntimeError("broken"),
        NumericError("nan"),
        Draft((1,) * 64),
        Draft((N_VOCAB,)),
        Draft((-1,)),
        Draft((1, 2), (-1, 0, 5)),
    ],
    ids=["raises", "numeric", "too many", "past the vocabulary", "negative", "parents"],
)
def test_a_failing_source_is_dropped_and_decoding_goes_on(draft):
    source = Faulty(draft)
    events = run(FakeEngine(), max_tokens=10, source=source)
    assert [type(event) for event in events].count(Warned) == 1
    assert events[-1].tokens == expected(hashed, 10)
    assert source.calls == 1


@pytest.mark.parametrize("verb", ["begin", "draft", "learn", "propose"])
def test_a_source_that_raises_anywhere_is_dropped(verb):
    events = run(FakeEngine(), max_tokens=10, source=Faulty(RuntimeError("broken"), verb))
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "faulty drafting failed and is off: broken"
    ]
    assert events[-1].tokens == expected(hashed, 10) and events[-1].reason == "length"


def test_a_chain_past_the_context_is_dropped_and_decoding_goes_on():
    core = FakeEngine(n_ctx=len(PROMPT) + 3)
    events = run(core, source=Faulty(Draft((1,) * 10)))
    assert [type(event) for event in events].count(Warned) == 1
    assert events[-1].tokens == expected(hashed, 4)


@pytest.mark.parametrize(
    ("verb", "number", "state"),
    [
        ("reset", 0, State.IDLE),
        ("set_sampling", 0, State.IDLE),
        ("prefill", 0, State.PREFILL),
        ("prefill", 1, State.PREFILL),
        ("verify", 0, State.VERIFY),
        ("verify", 5, State.VERIFY),
        ("accept", 0, State.COMMIT),
        ("commit", 0, State.COMMIT),
        ("commit", 18, State.COMMIT),
    ],
)
def test_a_failure_in_any_state_is_one_failed_event(verb, number, state):
    error = InternalError("injected")
    events = run(FakeEngine(n_chunk=4, fail={verb: (number, error)}))
    if fake_core.AHEAD and number == 18:  # What commits then is the step that follows.
        assert isinstance(events[-1], Finished)
    else:
        assert events[-1] == Failed(error, state)


def test_a_failing_round_without_candidates_is_not_retried():
    core = FakeEngine(fail={"verify": (0, ArgumentError("injected"))})
    assert isinstance(run(core)[-1], Failed)
    assert core.count("verify") == 1


def test_what_was_emitted_before_a_failure_is_right():
    events = run(FakeEngine(fail={"verify": (3, NumericError("nan"))}))
    emitted = [token for event in events if isinstance(event, Tokens) for token in event.ids]
    assert tuple(emitted) == expected(hashed, 4)


@pytest.mark.parametrize("verb", ["prefill", "verify", "commit"])
def test_a_sequence_is_usable_after_a_failure(verb):
    core = FakeEngine(fail={verb: (0, NumericError("nan"))})
    assert isinstance(run(core)[-1], Failed)
    assert finish(core).tokens == expected(hashed, 20)


@pytest.mark.parametrize("asked", range(12))
def test_cancelled_between_chunks_and_rounds(asked):
    answers = itertools.count()
    core = FakeEngine(n_chunk=2)
    last = finish(core, cancelled=lambda: next(answers) == asked)
    assert last.reason == "cancelled"
    assert core.count("prefill") == min(asked, 4)
    assert last.tokens == expected(hashed, max(asked - 3, 0))
    assert finish(core).tokens == expected(hashed, 20)


@pytest.mark.parametrize("verb", ["prefill", "draft", "verify"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_cancel_reaches_the_call_that_runs(verb, number):
    """It comes from within the call, as a signal does: the call does nothing, and no other one follows."""

    def on_call(called):
        if called == verb and core.count(verb) == number + 1:
            loop.cancel()

    core = FakeEngine(n_chunk=3, on_call=on_call)
    one = generation(core, Request(PROMPT, 20), OnDevice(1))
    loop, events = Loop(core, core.clock), []
    loop.add(one)
    while loop.running:
        events += [event for _, event in loop.step()]
    assert (events[-1].reason, core.count(verb)) == ("cancelled", number + 1)
    assert events[-1].tokens == expected(hashed, 0 if verb == "prefill" else 1 + 2 * number)
    core.on_call = lambda called: None
    assert finish(core).tokens == expected(hashed, 20)


def test_a_cancel_that_comes_too_late_ends_nothing_else():
    core = FakeEngine()
    finish(core)
    core.cancel()  # No call was left that it could end.
    assert finish(core).tokens == expected(hashed, 20)


def test_a_finished_generation_is_not_cancelled():
    core = FakeEngine(ahead=False)
    last = finish(core, max_tokens=3, cancelled=lambda: core.count("verify") == 2)
    assert last.reason == "length"


def test_stop_string_across_tokens():
    core = FakeEngine(scripted(PROMPT, list(b"one, two, three")))
    last = finish(core, stops=("two",))
    assert (last.text, last.reason) == ("one, ", "stop")
    assert last.tokens == tuple(b"one, two")


def test_text_that_may_become_a_stop_is_held_back():
    core = FakeEngine(scripted(PROMPT, list(b"ab#x")))
    events = run(core, max_tokens=4, stops=("##",))
    assert [event.text for event in events if isinstance(event, Tokens)] == ["a", "b", "", "#x"]


@pytest.mark.parametrize("ending", ["length", "cancelled", "eos"])
def test_held_text_is_emitted_at_the_end(ending):
    core = FakeEngine(scripted(PROMPT, [*b"ab#", EOS]), ahead=False)
    cancelled = (lambda: core.count("verify") == 2) if ending == "cancelled" else (lambda: False)
    last = finish(core, max_tokens=3 if ending == "length" else 9, stops=("##",), cancelled=cancelled)
    assert last.text == "ab#"


def test_half_a_character_is_not_shown_until_the_end():
    core = FakeEngine(scripted(PROMPT, list("é".encode() + b"\xe2\x82")))
    events = run(core, max_tokens=4)
    assert [event.text for event in events if isinstance(event, Tokens)] == ["", "é", "", "�"]


@examples(200)
@given(
    body=st.lists(st.sampled_from(b"abc"), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
    length=st.integers(0, 8),
)
def test_text_ends_before_the_first_stop_in_every_mode(body, stops, length):
    choose = scripted(PROMPT, [*body, EOS])
    core = FakeEngine(choose)
    last = finish(core, stops=tuple(stops), source=Chain(core, choose, length))
    text = bytes(body).decode()
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    assert last.text == (text[: min(ends)[1]] if ends else text)
    assert last.tokens == (tuple(body[: min(ends)[0]]) if ends else (*body, EOS))
    assert last.reason == "stop"
