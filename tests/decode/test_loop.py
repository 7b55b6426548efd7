"""Generations that are driven together: each gives what it gives alone, and fails alone."""

import itertools

import fake_core
import pytest
from depth import examples
from fake_core import EOS, PROMPT, FakeEngine, drive, expected, finish, generation, hashed, nextn, scripted
from fake_sources import Chain, Faulty, OnDevice, Trees
from hypothesis import given
from hypothesis import strategies as st

from luce.decode.events import Failed, Finished, Prefilled, State, Tokens, Warned
from luce.decode.loop import MAX_ROWS, Loop
from luce.decode.request import Request
from luce.errors import ArgumentError, ContextFull, DeviceError, InternalError, NumericError, OutOfMemory
from luce.speculate.drafting import Draft, Round

PROMPTS = tuple(bytes([65 + at]) * (3 * at + 1) for at in range(8))


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["in turn", "ahead"])
def way(request):
    """Runs all tests with rounds in turn, and with rounds that are begun ahead."""
    fake_core.AHEAD = request.param
    yield
    fake_core.AHEAD = False


def requests(n, max_tokens=20):
    return [Request(tuple(prompt), max_tokens + at) for at, prompt in enumerate(PROMPTS[:n])]


def alone(request, **engine):
    return finish(FakeEngine(**engine), prompt=request.prompt, max_tokens=request.max_tokens)


SOURCES = {
    "plain": lambda sequence: None,
    "chain": lambda sequence: Chain(sequence, hashed),
    "wrong": lambda sequence: Chain(sequence, lambda history: 0, 3),
    "device": lambda sequence: OnDevice(4),
    "trees": lambda sequence: Trees(sequence, [[(0, True), (0, False), (1, True)], []], hashed),
    "broken": lambda sequence: Faulty(RuntimeError("broken")),
}


def with_source(core, request, kind, **more):
    one = generation(core, request, **more)
    one._source = SOURCES[kind](one.sequence)
    return one


@examples(60)
@given(
    kinds=st.lists(st.sampled_from(sorted(SOURCES)), min_size=1, max_size=8),
    n_chunk=st.integers(1, 9),
    n_rows=st.integers(1, 9),
    n_ctx=st.integers(24, 60),
)
def test_each_gives_what_it_gives_alone(kinds, n_chunk, n_rows, n_ctx):
    asked = requests(len(kinds))
    sizes = {"n_chunk": n_chunk, "n_rows": n_rows, "n_ctx": n_ctx}
    core = FakeEngine(n_sequences=8, **sizes)
    generations = [with_source(core, *each) for each in zip(asked, kinds, strict=True)]
    found = drive(core, generations)
    for request, events, one in zip(asked, found, generations, strict=True):
        last, plain = events[-1], alone(request, **sizes)
        assert (last.tokens, last.text, last.reason) == (plain.tokens, plain.text, plain.reason)
        assert one.sequence.committed == [*request.prompt, *last.tokens[:-1]]
    assert all(sum(widths) <= MAX_ROWS for verb, widths in core.calls if verb == "verify")


def test_rounds_of_all_are_one_step():
    core = FakeEngine(n_sequences=4)
    drive(core, [generation(core, request, nextn(core, 2)) for request in requests(4, 13)])
    verifies = [widths for verb, widths in core.calls if verb == "verify"]
    drafts = [items for verb, items in core.calls if verb == "draft"]
    assert [3, 3, 3, 3] in verifies and max(map(len, drafts)) == 4
    assert len(drafts) <= len(verifies) < 4 * 6


def test_prompts_are_read_between_rounds_in_the_order_they_came():
    core = FakeEngine(n_sequences=3, n_chunk=4)
    first, *others = (generation(core, Request(PROMPT, 30)) for _ in range(3))
    loop = Loop(core, core.clock)
    loop.add(first)
    while not first.over and core.count("verify") < 2:
        loop.step()
    before = len(core.calls)
    for one in others:
        loop.add(one)
    while loop.running:
        loop.step()
    verbs = [verb for verb, _ in core.calls[before:] if verb in ("prefill", "verify")]
    assert verbs[:8] == ["prefill", "verify"] * 4
    assert not loop.running


def test_many_share_the_rows_of_a_step():
    core = FakeEngine(n_sequences=40)
    asked = [Request((at,), 12) for at in range(40)]
    found = drive(core, [generation(core, request, OnDevice()) for request in asked])
    for request, events in zip(asked, found, strict=True):
        assert events[-1].tokens == expected(hashed, 12, request.prompt)
    assert max(sum(widths) for verb, widths in core.calls if verb == "verify") <= MAX_ROWS


def test_those_whose_logits_are_not_finite_fail_alone():
    def choose(history):
        return None if history[0] == PROMPTS[1][0] and len(history) > 9 else hashed(history)

    core, asked = FakeEngine(choose, n_sequences=3), requests(3)
    found = drive(core, [generation(core, request, OnDevice(2)) for request in asked])
    assert isinstance(found[1][-1].error, NumericError) and found[1][-1].state is State.VERIFY
    for at in (0, 2):
        assert found[at][-1].tokens == alone(asked[at]).tokens
        assert not any(isinstance(event, Warned) for event in found[at])


@pytest.mark.parametrize("draft", [Draft((1,) * 70), Draft((-1,)), Draft((1, 2), (-1, 0, 5)),
                                   Draft(on_device=9)])  # fmt: skip
def test_a_bad_draft_costs_only_its_own_source(draft):
    core, asked = FakeEngine(n_sequences=3), requests(3)
    sources = [OnDevice(2), Faulty(draft), OnDevice(2)]
    found = drive(core, [generation(core, *each) for each in zip(asked, sources, strict=True)])
    for at, events in enumerate(found):
        assert events[-1].tokens == alone(asked[at]).tokens
        assert any(isinstance(event, Warned) for event in events) == (at == 1)


@pytest.mark.parametrize("error", [DeviceError, InternalError])
def test_what_takes_the_step_along_fails_all_that_were_in_it(error):
    core = FakeEngine(n_sequences=3, n_chunk=2, fail={"verify": (2, error("injected"))})
    long = Request(tuple(PROMPT) * 3, 5)
    found = drive(core, [generation(core, request) for request in (*requests(2), long)])
    assert [isinstance(events[-1], Failed) for events in found] == [True, True, False]
    assert found[2][-1].tokens == expected(hashed, 5, long.prompt)


def test_a_prompt_that_fails_ends_alone():
    core = FakeEngine(n_sequences=2, n_ctx=30)
    found = drive(core, [generation(core, Request((1,) * 31, 5)), generation(core, Request(PROMPT, 5))])
    assert isinstance(found[0][-1].error, ContextFull) and found[0][-1].state is State.IDLE
    assert isinstance(found[1][-1], Finished)


def test_one_is_cancelled_and_the_others_go_on():
    core, asked, seen = FakeEngine(n_sequences=3, ahead=False), requests(3), []
    first, second, third = (
        generation(core, request, cancelled=lambda at=at: at == 1 and len(seen) > 7)
        for at, request in enumerate(asked)
    )
    core.on_call = lambda verb: seen.append(verb) if verb == "commit" else None
    found = drive(core, [first, second, third])
    assert [events[-1].reason for events in found] == ["length", "cancelled", "length"]
    assert found[1][-1].tokens == expected(hashed, len(found[1][-1].tokens), asked[1].prompt)
    assert 0 < len(found[1][-1].tokens) < 20


@pytest.mark.parametrize("verb", ["prefill", "draft", "verify"])
def test_a_cancel_of_all_ends_all_within_a_step(verb):
    def on_call(called):
        if called == verb and core.count(verb) == 3:
            loop.cancel()
            cancelled_at.append(len(core.calls))

    cancelled_at = []
    core = FakeEngine(n_sequences=3, on_call=on_call, n_chunk=4)  # Their prompts take three passes.
    loop, events = Loop(core, core.clock), []
    for request in requests(3):
        loop.add(generation(core, request, OnDevice(1)))
    while loop.running:
        events += [event for _, event in loop.step()]
    assert [event.reason for event in events if isinstance(event, Finished)] == ["cancelled"] * 3
    after = core.calls[cancelled_at[0]:]
    assert not [verb for verb, _ in after if verb in ("prefill", "draft", "verify")]


def test_a_stray_cancel_repeats_the_step_that_it_ended():
    """It is the core's flag, which nobody of these set: an earlier generation did, which ended before it was
    seen."""
    for verb in ("prefill", "draft", "verify"):
        core = FakeEngine(n_sequences=2)
        core.on_call = lambda called, core=core, verb=verb: (
            core.cancel() if called == verb and core.count(verb) == 2 else None
        )
        asked = requests(2)
        found = drive(core, [generation(core, request, OnDevice(3)) for request in asked])
        assert [events[-1].tokens for events in found] == [alone(request).tokens for request in asked]
        assert not any(isinstance(event, Warned) for events in found for event in events)


class Grown(OnDevice):
    """Its two drafts grow into as many rows as it may have."""

    def draft(self, anchor, limits):
        def grow():
            return Draft(tuple(range(limits.candidates)), (-1, *[0] * limits.candidates))

        return Draft(on_device=min(2, limits.depth), grow=grow)


@pytest.mark.parametrize("verb", ["draft", "verify"])
@pytest.mark.parametrize("source", [None, Grown()])
def test_who_comes_while_a_step_was_interrupted_leaves_it_its_rows(verb, source):
    def on_call(called):
        if called == verb and core.count(verb) == 2:
            core.cancel()
            interrupted.append(True)

    asked, interrupted = requests(2), []
    core = FakeEngine(n_sequences=2, on_call=on_call)
    loop, events = Loop(core, core.clock), []
    loop.add(generation(core, asked[0], Grown()))
    while not interrupted:
        events += loop.step()
    loop.add(generation(core, asked[1], source))
    while loop.running:
        events += loop.step()
    assert {last.tokens for _, last in events if isinstance(last, Finished)} == {
        alone(request).tokens for request in asked
    }
    widths = [widths for verb, widths in core.calls if verb == "verify"]
    assert max(map(sum, widths)) == MAX_ROWS and max(map(len, widths)) == 2


def test_a_closed_loop_leaves_no_sequence_open():
    core = FakeEngine(n_sequences=2)
    loop = Loop(core, core.clock)
    for request in requests(2):
        loop.add(generation(core, request))
    loop.step()
    loop.close()
    assert not core.open and not loop.running


def test_events_of_each_come_in_its_own_order():
    core = FakeEngine(scripted(PROMPT, [65, 66, EOS]), n_sequences=2, n_chunk=5)
    for events in drive(core, [generation(core, Request(PROMPT, 9)) for _ in range(2)]):
        kinds = [type(event) for event in events[1:]]
        read = kinds.count(Prefilled)  # Once or more in each pass: the second one begins behind the first.
        assert read in (2, 3)
        assert kinds == [*[Prefilled] * read, Tokens, Round, Tokens, Round, Tokens, Finished]


def test_a_generation_that_cannot_begin_is_one_failed_event():
    core = FakeEngine()
    (events,) = drive(core, [generation(core, Request((), 5))])
    assert isinstance(events[-1].error, ArgumentError) and len(events) == 1


# ---- prompts beside rounds


def read_beside(share, chunk_takes, tokens=40, n_chunk=4, n_cut=1, **seconds):
    """Reads a prompt beside one that decodes, with rounds of 0.25 seconds. Returns its chunks' tokens, and how many
    rounds are between each and the next."""
    took = lambda chunks: chunk_takes(sum(map(len, chunks)))  # noqa: E731
    seconds |= {"prefill": took, "verify": 0.25}
    core = FakeEngine(n_sequences=2, n_chunk=n_chunk, n_cut=n_cut, seconds=seconds)
    loop = Loop(core, core.clock, share)
    loop.add(generation(core, Request((65,), 2000)))
    for _ in range(3):
        loop.step()
    loop.add(generation(core, Request(tuple(b"A" * tokens), 1)))
    while loop.running > 1:
        loop.step()
    calls = [(verb, detail) for verb, detail in core.calls if verb in ("prefill", "verify")]
    chunks = [at for at, (verb, _) in enumerate(calls) if verb == "prefill"][1:]
    between = [after - before - 1 for before, after in itertools.pairwise(chunks)]
    return [sum(map(len, calls[at][1])) for at in chunks], between


@pytest.mark.parametrize(("share", "rounds"), [(1.0, 1), (0.5, 4), (0.25, 12)])
def test_rounds_have_their_share_of_the_time_while_prompts_are_read(share, rounds):
    """A prompt may be cut at its chunks alone."""
    assert read_beside(share, lambda n: 1.0, n_cut=4) == ([4] * 10, [rounds] * 9)


@pytest.mark.parametrize(("share", "size", "rounds"), [(1.0, 8, 1), (0.8, 8, 1), (0.5, 2, 1), (0.2, 1, 2)])
def test_chunks_are_as_long_as_rounds_leave_time_for(share, size, rounds):
    """A token of them takes half a round. The first chunk says so, and is as long as chunks may be."""
    sizes, between = read_beside(share, lambda n: n * 0.125, n_chunk=8)
    assert sizes[0] == 8 and set(sizes[1:-1]) == {size} and set(between[1:]) == {rounds}


def test_chunks_are_not_so_short_that_they_are_slow():
    """A chunk takes a second whatever it has, and more by its tokens. Short ones are tried and given up."""
    sizes, between = read_beside(0.5, lambda n: 1 + n / 64, tokens=64 * 60, n_chunk=64)
    assert sum(sizes) == 64 * 60 and sizes[0] == 64
    # 64 tokens take 2 seconds and so 8 rounds, 32 of them 1.5 seconds, not more than 1.5 times as long a token. Fewer
    # are slow. They are tried again now and then, since contexts and what decodes meanwhile change.
    assert set(zip(sizes[1:-1], between[1:], strict=True)) >= {(32, 6)} and 64 not in sizes[1:]
    assert sizes.count(32) > 0.9 * len(sizes)


def test_a_pass_beside_rounds_takes_until_its_end():
    """Where passes follow each other over several GPUs, a call says little of what its pass takes."""
    assert read_beside(0.5, lambda n: 0.25, n_cut=4, finish_prompts=0.75) == ([4] * 10, [4] * 9)


def test_passes_over_prompts_alone_follow_each_other():
    core = FakeEngine(n_chunk=4, n_cut=4, seconds={"prefill": 0.001, "finish_prompts": 1.0})
    loop = Loop(core, core.clock)
    loop.add(generation(core, Request(tuple(b"A" * 40), 1)))
    while loop.running:
        loop.step()
    assert core.count("prefill") == 10 and core.count("finish_prompts") == 1  # The first one says what they take.


def test_one_that_decodes_not_has_whole_chunks():
    core = FakeEngine(n_sequences=1, n_chunk=8, seconds={"prefill": 1.0})
    loop = Loop(core, core.clock, 0.5)
    loop.add(generation(core, Request(tuple(b"A" * 24), 1)))
    while loop.running:
        loop.step()
    assert [list(map(len, chunks)) for verb, chunks in core.calls if verb == "prefill"] == [[8], [8], [8]]


def test_a_short_prompt_waits_for_no_long_one_and_the_long_one_is_read():
    core = FakeEngine(n_sequences=4, n_chunk=4)
    long = generation(core, Request(tuple(b"A" * 80), 1))
    shorts = [generation(core, Request(tuple(b"B" * 8), 1)) for _ in range(3)]
    loop, ended = Loop(core, core.clock), []
    for one in (long, *shorts):
        loop.add(one)
    while loop.running:
        ended += [one for one, event in loop.step() if isinstance(event, Finished)]
    assert ended == [*shorts, long]
    first = [chunks[0][0] for verb, chunks in core.calls if verb == "prefill"]
    assert first[:12].count(65) == 6  # Every other pass is the oldest's.


def passes(core):
    """Returns of each pass over prompts the first token of each chunk, and how many it has."""
    return [[(chunk[0], len(chunk)) for chunk in chunks] for verb, chunks in core.calls if verb == "prefill"]


def read_all(core, prompts, **more):
    """Reads prompts that come at once. Returns the passes that this takes, and the order in which they ended."""
    asked = [generation(core, Request(tuple(prompt), 1), **more) for prompt in prompts]
    loop, ended = Loop(core, core.clock), []
    for one in asked:
        loop.add(one)
    while loop.running:
        ended += [asked.index(one) for one, event in loop.step() if isinstance(event, Finished)]
    return passes(core), ended


def test_prompts_that_wait_share_a_pass():
    core = FakeEngine(n_sequences=16, n_chunk=2048, n_cut=128)
    found, ended = read_all(core, [bytes([at]) * 128 for at in range(16)])
    assert found == [[(at, 128) for at in range(16)]] and ended == list(range(16))


def test_a_pass_has_as_many_tokens_as_a_chunk_may():
    """What is left of it is for a part of the next prompt, which ends where it may be cut."""
    core = FakeEngine(n_sequences=4, n_chunk=512, n_cut=128)
    found, ended = read_all(core, [b"A" * 200, b"B" * 500, b"C" * 100, b"D" * 20])
    # Who came first is read first, and in the next pass who has least left.
    assert found == [[(65, 200), (66, 256), (68, 20)], [(67, 100), (66, 244)]]
    assert ended == [0, 3, 2, 1]


def test_a_long_prompt_is_read_beside_short_ones_that_keep_coming():
    core = FakeEngine(n_sequences=8, n_chunk=512, n_cut=128)
    long, loop, came = generation(core, Request(tuple(b"A" * 4096), 1)), Loop(core, core.clock), 0
    loop.add(long)
    while not long.over:
        while loop.running < 8:
            loop.add(generation(core, Request(tuple(b"B" * 256), 1)))
            came += 1
        loop.step()
    assert sum(any(token == 65 for token, _ in each) for each in passes(core)) == 8
    assert came > 8 and len(passes(core)) <= 17


def test_where_bits_depend_on_company_prompts_are_read_one_by_one():
    core = FakeEngine(n_sequences=3, n_chunk=512, n_cut=512)
    found, _ = read_all(core, [b"A" * 20, b"B" * 20, b"C" * 600])
    assert all(len(each) == 1 for each in found)


@pytest.mark.parametrize("error", [ArgumentError, ContextFull, OutOfMemory])
def test_a_pass_that_one_is_to_blame_for_fails_that_one(error):
    core = FakeEngine(n_sequences=3)
    prefill, asked = core.prefill, [generation(core, request) for request in requests(3)]

    def refuses(items):
        if any(item.sequence is asked[1].sequence for item in items):
            raise error("item 1: injected")
        return prefill(items)

    core.prefill = refuses
    found = drive(core, asked)
    assert isinstance(found[1][-1], Failed) and found[1][-1].state is State.PREFILL
    for at in (0, 2):
        assert found[at][-1].tokens == alone(requests(3)[at]).tokens


def test_one_whose_prompt_is_not_finite_fails_alone():
    core = FakeEngine(n_sequences=3)
    prefill, asked = core.prefill, [generation(core, request) for request in requests(3)]
    core.prefill = lambda items: [
        NumericError("nan") if item.sequence is asked[1].sequence else choice
        for item, choice in zip(items, prefill(items), strict=True)
    ]
    found = drive(core, asked)
    assert isinstance(found[1][-1].error, NumericError) and found[1][-1].state is State.PREFILL
    for at in (0, 2):
        assert found[at][-1].tokens == alone(requests(3)[at]).tokens


def test_a_pass_that_fails_fails_all_that_were_in_it():
    core = FakeEngine(n_sequences=4, n_chunk=8, fail={"prefill": (0, DeviceError("gone"))})
    found = drive(core, [generation(core, Request(tuple(bytes([at]) * 4), 3)) for at in range(65, 69)])
    assert [isinstance(events[-1], Failed) for events in found] == [True, True, False, False]


def test_one_that_is_cancelled_while_prompts_are_read_leaves_the_others():
    core = FakeEngine(n_sequences=3, n_chunk=4)
    gone = []
    asked = [Request(tuple(bytes([at]) * 9), 5) for at in (65, 66, 67)]
    one, two, three = (
        generation(core, request, cancelled=lambda at=at: at == 1 and bool(gone)) for at, request in enumerate(asked)
    )
    core.on_call = lambda verb: gone.append(verb) if core.count("prefill") == 2 else None
    found = drive(core, [one, two, three])
    assert [events[-1].reason for events in found] == ["length", "cancelled", "length"]
    for at in (0, 2):
        assert found[at][-1].tokens == expected(hashed, 5, asked[at].prompt)
