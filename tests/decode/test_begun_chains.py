"""Rounds with drafts that the wait for the last round begins: which are, and what keeps them from it."""

import pytest
from depth import examples
from fake_core import EOS, PROMPT, FakeEngine, Text, drive, expected, generation, hashed, nextn, run, scripted
from hypothesis import given
from hypothesis import strategies as st

from luce.decode.events import Failed, Finished, Tokens, Warned
from luce.decode.request import Request
from luce.errors import ArgumentError, Cancelled, DeviceError, OutOfMemory, StateError
from luce.native import Source
from luce.speculate.drafting import NOTHING, Drafter, Fixed, Round


class Says(Fixed):
    """Drafts as many as `drafts` says of each round, and says that the next one is begun with what `follows`
    has of it. It may be wrong."""

    def __init__(self, core, drafts, follows):
        super().__init__(Drafter(Text(core), Source.NEXTN, 8), 8)
        self.counts, self.ahead, self.asked = drafts, follows, 0
        self.rounds = []

    def draft(self, anchor, limits):
        self.asked += 1
        drafts = min(self.counts[self.asked % len(self.counts)], limits.candidates, limits.depth)
        return self._drafter.draft(anchor, drafts) if drafts else NOTHING

    def follows(self):
        drafts = self.ahead[self.asked % len(self.ahead)]
        return drafts if drafts is None else self._drafter.chains[drafts]

    def learn(self, done):
        self.rounds.append(done)


def rounds_of(events):
    return [event for event in events if isinstance(event, Round)]


def test_chains_follow_each_other():
    """The first one is drafted once its anchor is known, and the last ones are too long for what is left."""
    core = FakeEngine(ahead=True, guess=lambda history: hashed(history) ^ (len(history) % 3 == 0))
    events = run(core, nextn(core, 3), max_tokens=60)
    assert events[-1].tokens == expected(hashed, 60)
    rounds = rounds_of(events)
    begun = [each.ahead for each in rounds]
    assert begun == [False] + [True] * (begun.count(True)) + [False] * (len(rounds) - 1 - begun.count(True))
    assert begun.count(True) > 15 and all(each.drafted == 3 for each in rounds if each.ahead)
    assert [each.behind for each in rounds] == [False, *(not ahead for ahead in begun[1:])]
    assert core.committed == [*PROMPT, *events[-1].tokens[:-1]]
    assert core.count("drafted") == 0, "the tokens come with the choices"


@examples(150)
@given(
    drafts=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    follows=st.lists(st.one_of(st.none(), st.integers(0, 8)), min_size=1, max_size=5),
    right=st.lists(st.booleans(), min_size=1, max_size=7),
    budget=st.integers(1, 40),
    n_ctx=st.integers(8, 60),
    end=st.integers(0, 50),
    stops=st.sampled_from([(), ("never",)]),
)
def test_any_chains_give_the_tokens_of_plain_decoding(drafts, follows, right, budget, n_ctx, end, stops):
    choose = scripted(PROMPT, [*expected(hashed, end), EOS])
    plain_core = FakeEngine(choose, n_ctx=n_ctx)
    plain = run(plain_core, max_tokens=budget, stops=stops)[-1]
    guess = lambda history: choose(history) if right[len(history) % len(right)] else 0  # noqa: E731
    core = FakeEngine(choose, n_ctx=n_ctx, guess=guess, ahead=True)
    source = Says(core, drafts, follows)
    events = run(core, source, max_tokens=budget, stops=stops)
    last = events[-1]
    assert (last.tokens, last.text, last.reason) == (plain.tokens, plain.text, plain.reason)
    assert source.rounds == rounds_of(events), "the source is told all of them"
    kept = len(plain_core.committed)
    assert core.committed[:kept] == plain_core.committed
    assert len(core.committed) == kept or (last.reason == "stop" and source.rounds[-1].drafted)


def texts(core, n):
    return [generation(core, Request((*PROMPT, at), 40), nextn(core, 2 + at)) for at in range(n)]


def test_texts_that_decode_together_follow_together():
    """Each has a chain of its own length."""
    core = FakeEngine(
        n_sequences=3, ahead=True, guess=lambda history: hashed(history) ^ (not len(history) % 4)
    )
    found = drive(core, texts(core, 3))
    for at, events in enumerate(found):
        assert events[-1].tokens == expected(hashed, 40, (*PROMPT, at))
    assert [2, 3, 4] in [detail for verb, detail in core.calls if verb == "ask"]
    assert sum(each.ahead for each in rounds_of(found[0])) > 5


@pytest.mark.parametrize("verb", ["draft", "verify", "wait"])
def test_a_device_that_fails_in_a_round_that_follows_ends_the_text(verb):
    error = DeviceError("gone")
    core = FakeEngine(ahead=True, fail={verb: (3, error)})
    events = run(core, nextn(core, 2))
    assert events[-1] == Failed(error, events[-1].state)
    emitted = tuple(token for event in events if isinstance(event, Tokens) for token in event.ids)
    assert emitted == expected(hashed, len(emitted)) and len(emitted) > 6


@pytest.mark.parametrize("error", [Cancelled("stray"), StateError("no step"), ArgumentError("rows")])
def test_a_round_that_cannot_follow_is_begun_in_its_turn(error):
    core = FakeEngine(ahead=True, fail={"ask": (3, error)})
    events = run(core, nextn(core, 2), max_tokens=31)
    assert events[-1].tokens == expected(hashed, 31)
    assert [each.ahead for each in rounds_of(events)] == [False, *[True] * 3, False, *[True] * 5]


def test_one_of_two_is_cancelled_while_a_chain_is_under_way():
    core = FakeEngine(n_sequences=2, ahead=True)
    first = generation(core, Request(PROMPT, 30), nextn(core, 3))
    second = generation(
        core, Request(tuple(b"other"), 30), nextn(core, 3), cancelled=lambda: core.count("wait") > 4
    )
    found = drive(core, [first, second])
    assert (found[0][-1].reason, found[1][-1].reason) == ("length", "cancelled")
    assert found[0][-1].tokens == expected(hashed, 30)
    assert found[1][-1].tokens == expected(hashed, len(found[1][-1].tokens), b"other") and not core.open


def test_a_head_that_is_not_finite_is_dropped_and_the_text_goes_on():
    core = FakeEngine(ahead=True, guess=lambda history: None if len(history) > 20 else hashed(history))
    events = run(core, nextn(core, 3), max_tokens=40)
    assert events[-1].tokens == expected(hashed, 40)
    (warning,) = [event.message for event in events if isinstance(event, Warned)]
    assert "not finite" in warning


def test_an_end_of_the_text_within_a_chain_drops_the_round_that_follows():
    core = FakeEngine(scripted(PROMPT, [*b"abcdef", EOS, *b"ghi"]), ahead=True)
    core.guess = core.choose
    events = run(core, nextn(core, 4), max_tokens=60)
    assert isinstance(events[-1], Finished) and events[-1].reason == "stop"
    assert events[-1].tokens == (*b"abcdef", EOS) and not core.open


def test_what_chooses_for_itself_does_not_follow():
    core = FakeEngine(ahead=True)
    one = generation(core, Request(PROMPT, 20, logprobs=0), nextn(core, 3))
    one.sequence.logprobs = lambda row, token, top: (row, token, top)
    (events,) = drive(core, [one])
    assert events[-1].tokens == expected(hashed, 20)
    assert not any(each.ahead or each.behind for each in rounds_of(events)) and not core.count("ask")


class Failing(Fixed):
    """Raises in a verb of its own, in its third round."""

    def __init__(self, core, verb):
        super().__init__(Drafter(Text(core), Source.NEXTN, 8), 3)
        self.asked = 0
        own = getattr(self, verb)
        setattr(self, verb, lambda *given: self.fail() if self.asked == 3 else own(*given))

    def fail(self):
        raise RuntimeError("no more")

    def draft(self, anchor, limits):
        self.asked += 1
        return super().draft(anchor, limits)


@pytest.mark.parametrize("verb", ["propose", "follows", "learn"])
def test_a_source_that_is_dropped_begins_no_other_round(verb):
    """The one that is under way then has its drafts."""
    core = FakeEngine(ahead=True)
    events = run(core, Failing(core, verb), max_tokens=60)
    assert events[-1].tokens == expected(hashed, 60)
    (at,) = [at for at, event in enumerate(events) if isinstance(event, Warned)]
    drafted = [each.drafted for each in rounds_of(events[at:])]
    assert drafted[0] == 3 and not any(drafted[1:]) and len(drafted) > 10


@pytest.mark.parametrize("verb", ["draft", "verify"])
def test_a_chain_that_fails_at_first_begins_no_other_round(verb):
    core = FakeEngine(ahead=True, fail={verb: (0, OutOfMemory("full"))})
    events = run(core, nextn(core, 3), max_tokens=30)
    assert events[-1].tokens == expected(hashed, 30)
    assert not any(each.drafted for each in rounds_of(events))


def test_rounds_that_the_core_would_not_begin_count_as_not_begun_ahead():
    core = FakeEngine(ahead=True)
    core.go_on = lambda *of: None
    rounds = rounds_of(run(core, nextn(core, 3), max_tokens=41))
    assert [(each.ahead, each.behind) for each in rounds] == [(False, False)] + [(False, True)] * 9
