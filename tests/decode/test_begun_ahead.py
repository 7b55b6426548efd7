"""Rounds that are begun before the tokens of the last one are known: which are, and what ends them."""

import re

import pytest
from depth import examples
from fake_core import (
    EOS,
    PROMPT,
    TOKENIZER,
    FakeEngine,
    drive,
    expected,
    generation,
    hashed,
    nextn,
    run,
    scripted,
)
from fake_sources import Chain, Source
from hypothesis import given
from hypothesis import strategies as st

from luce.decode.events import Failed, Finished, Tokens, Warned
from luce.decode.loop import Loop
from luce.decode.request import Request
from luce.errors import Cancelled, ContextFull, DeviceError, Error, NumericError
from luce.native.structs import Penalties
from luce.speculate.drafting import NOTHING, Draft, Round


class Now(Chain):
    """Drafts true chains where `drafts(round)` says so, and says that the next round stays plain where
    `stays(round)` does. It may be wrong."""

    def __init__(self, core, drafts, stays, length=3):
        super().__init__(core, core.choose, length)
        self.drafts, self.stays = drafts, stays

    def draft(self, anchor, limits):
        draft = super().draft(anchor, limits)
        return draft if self.drafts(len(self.asked)) else Draft()

    def follows(self):
        return NOTHING if self.stays(len(self.asked)) else None


class Unsure(Now):
    """Raises when it is asked whether it stays plain, in one round."""

    def follows(self):
        if len(self.asked) == 3:
            raise RuntimeError("unsure")
        return NOTHING


def begun(events):
    """Says of each round whether it was begun ahead."""
    return [event.ahead for event in events if isinstance(event, Round)]


def rounds_begun(core):
    """Returns how many steps were begun, rather than made in one call."""
    return core.count("wait")


def test_plain_rounds_follow_each_other():
    core = FakeEngine(ahead=True)
    events = run(core, max_tokens=20)
    assert events[-1].tokens == expected(hashed, 20)
    assert begun(events) == [False] + [True] * 18
    assert core.count("verify") == rounds_begun(core) == 19
    assert core.count("commit") == 1, "a step that follows commits the row before it"
    assert core.committed == [*PROMPT, *expected(hashed, 19)]


@pytest.mark.parametrize(
    "asked",
    [{"logprobs": 0}, {"penalties": Penalties(frequency=1.0)}, {"max_tokens": 2}, {"max_tokens": 1}],
    ids=["logprobs", "penalties", "two tokens", "one token"],
)
def test_choices_of_its_own_and_last_tokens_are_not_begun_ahead(asked, monkeypatch):
    core = FakeEngine(ahead=True)
    one = generation(core, Request(PROMPT, **({"max_tokens": 8} | asked)))
    one.sequence.set_penalties = lambda *_: None
    one.sequence.choose = lambda row, mask: hashed(one.sequence.rows[row] if one.sequence.rows else PROMPT)
    one.sequence.logprobs = lambda row, token, top: (row, token, top)
    (events,) = drive(core, [one])
    assert events[-1].tokens == expected(hashed, asked.get("max_tokens", 8))
    assert not any(begun(events))


@pytest.mark.parametrize("stop", ["eos", "stop", "context"])
def test_a_text_that_ends_drops_the_round_that_follows(stop):
    script = [*b"abcdef", EOS if stop == "eos" else ord("g"), *b"hijk"]
    core = FakeEngine(
        scripted(PROMPT, script), ahead=True, n_ctx=len(PROMPT) + 6 if stop == "context" else 99
    )
    events = run(core, max_tokens=None if stop == "context" else 30, stops=("fg",) if stop == "stop" else ())
    assert events[-1].reason == ("length" if stop == "context" else "stop")
    assert events[-1].tokens == tuple(script[:7])
    assert len(core.committed) == len(PROMPT) + 6, "all emitted tokens but the last"
    assert core.count("verify") - rounds_begun(core) == (0 if stop == "context" else 1)


def test_a_source_that_fails_where_it_is_asked_for_the_next_round_is_dropped():
    core = FakeEngine(ahead=True)
    source = Unsure(core, lambda at: False, lambda at: True)
    events = run(core, source, max_tokens=12)
    assert events[-1].tokens == expected(hashed, 12)
    assert [event.message for event in events if isinstance(event, Warned)] == [
        "chain drafting failed and is off: unsure"
    ]
    assert len(source.asked) == 3


@examples(60)
@given(
    drafts=st.lists(st.booleans(), min_size=1),
    stays=st.lists(st.booleans(), min_size=1),
    n=st.integers(1, 40),
)
def test_a_source_may_be_wrong_about_the_next_round(drafts, stays, n):
    core = FakeEngine(ahead=True)
    source = Now(core, lambda at: drafts[at % len(drafts)], lambda at: stays[at % len(stays)])
    events = run(core, source, max_tokens=n)
    assert events[-1].tokens == expected(hashed, n)
    rounds = [event for event in events if isinstance(event, Round)]
    assert source.rounds == rounds, "the source is told all of them"
    assert not any(each.ahead and each.drafted for each in rounds)
    assert [each.behind for each in rounds[1:]] == [not each.ahead for each in rounds[1:]]
    assert not any(each.behind for each in rounds[:1]), "it follows the prompt, where it is plain too"
    assert core.committed == [*PROMPT, *expected(hashed, n - 1)]


def test_a_source_is_asked_in_every_round_and_drafts_one_later():
    core = FakeEngine(ahead=True)
    source = Now(core, lambda at: at == 5, lambda at: at != 5)
    events = run(core, source, max_tokens=20)
    rounds = [event for event in events if isinstance(event, Round)]
    assert [each.ahead for each in rounds][:8] == [False, True, True, True, True, False, True, True]
    assert not any(each.drafted for each in rounds), "in round 5 it was too late, in round 6 it had nothing"
    assert [anchor for anchor, *_ in source.asked] == list(expected(hashed, 18))


@pytest.mark.parametrize("stops", [(), ("no such text",)], ids=["free", "stop strings"])
def test_text_is_made_while_the_next_round_is_under_way(stops, monkeypatch):
    """A stop string may end the text, so with one it is made before a round that is not begun already. A first token's
    is made before any round."""
    core = FakeEngine(ahead=True)
    monkeypatch.setattr(TOKENIZER, "bytes_of", lambda token: core.calls.append(("text", token)) or b"x")
    events = run(core, nextn(core, 3), max_tokens=30, stops=stops)
    assert events[-1].tokens == expected(hashed, 30) and events[-1].text == "x" * 30
    order = "".join(verb[0] for verb, _ in core.calls if verb in ("draft", "verify", "wait", "text"))
    assert order == "tdvw" + "dvttttw" * 6 + ("ttttvwt" if stops else "vttttwt")


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in turn"])
def test_all_who_share_a_round_propose_before_one_of_them_drafts(ahead):
    """So a draft can be chosen for all of them at once, whether their rounds begin ahead or not."""
    core = FakeEngine(n_sequences=3, ahead=ahead)
    order = []

    class Asked(Source):
        name = "asked"

        def propose(self, anchor, limits):
            order.append("p")

        def draft(self, anchor, limits):
            order.append("d")
            return NOTHING

        def follows(self):
            return NOTHING if order.count("d") % 7 else None

    prompts = PROMPT, b"other", b"third"
    ones = [generation(core, Request(prompt, 20), Asked()) for prompt in prompts]
    drive(core, ones)
    # While prompts are read, fewer share a round. The last round of each text has room for no draft.
    assert re.fullmatch("(pd)*(ppdd)*(pppddd){15,}(ppdd)*(pd)*", "".join(order)), order


def test_who_joins_ends_it_and_then_all_go_on():
    core = FakeEngine(n_sequences=2, ahead=True)
    loop, events = Loop(core, core.clock), {}
    first, second = (generation(core, Request(prompt, 20)) for prompt in (PROMPT, b"other"))
    loop.add(first)
    for turn in range(60):
        for one, event in loop.step():
            events.setdefault(one, []).append(event)
        if turn == 4:
            loop.add(second)
    assert events[first][-1].tokens == expected(hashed, 20)
    assert events[second][-1].tokens == expected(hashed, 20, b"other")
    assert begun(events[first]).count(False) > 1 and True in begun(events[second])
    assert not any(event.behind for one in events.values() for event in one if isinstance(event, Round))
    together = [detail for verb, detail in core.calls if verb == "verify" and detail == [1, 1]]
    assert len(together) > 10


def test_one_of_two_is_cancelled_while_a_round_is_under_way():
    core = FakeEngine(n_sequences=2, ahead=True)
    asked = [Request(PROMPT, 20), Request(tuple(b"other"), 20)]
    first = generation(core, asked[0])
    second = generation(core, asked[1], cancelled=lambda: core.count("wait") > 4)
    found = drive(core, [first, second])
    assert (found[0][-1].reason, found[1][-1].reason) == ("length", "cancelled")
    assert found[0][-1].tokens == expected(hashed, 20)
    assert found[1][-1].tokens == expected(hashed, len(found[1][-1].tokens), b"other")
    assert 1 < len(found[1][-1].tokens) < 10 and not core.open


def test_all_are_cancelled_and_another_loop_begins_while_a_round_is_under_way():
    core = FakeEngine(ahead=True)
    for ending in ("cancel", "close"):
        loop = Loop(core, core.clock)
        loop.add(generation(core, Request(PROMPT, 20)))
        for _ in range(4):
            loop.step()
        assert core.begun, "a round is under way"
        if ending == "cancel":
            loop.cancel()
            assert [event.reason for _, event in loop.step() if isinstance(event, Finished)] == ["cancelled"]
            assert loop.step() == []
        else:
            loop.close()
        assert not core.open
        assert run(core)[-1].tokens == expected(hashed, 20)


@pytest.mark.parametrize("error", [Cancelled("stray"), ContextFull("full"), DeviceError("gone")])
@pytest.mark.parametrize("number", range(1, 6))
def test_a_round_that_cannot_follow(error, number):
    """What did nothing is asked again in turn; a device that fails ends the text after the last round."""
    core = FakeEngine(ahead=True, fail={"verify": (number, error)})
    events = run(core)
    emitted = tuple(token for event in events if isinstance(event, Tokens) for token in event.ids)
    if isinstance(error, DeviceError):
        assert events[-1] == Failed(error, events[-1].state)
        assert emitted == expected(hashed, number + 1)
    else:
        assert events[-1].tokens == expected(hashed, 20)
        assert begun(events).count(False) == 2


@pytest.mark.parametrize("number", range(1, 6))
def test_a_wait_that_fails_ends_all(number):
    core = FakeEngine(n_sequences=2, ahead=True, fail={"wait": (number, DeviceError("gone"))})
    found = drive(core, [generation(core, Request(prompt, 20)) for prompt in (PROMPT, b"other")])
    for events, prompt in zip(found, (PROMPT, b"other"), strict=True):
        assert isinstance(events[-1], Failed) and isinstance(events[-1].error, Error)
        emitted = tuple(token for event in events if isinstance(event, Tokens) for token in event.ids)
        assert emitted == expected(hashed, 1 + number, prompt)  # One is the prompt's.


def test_one_of_two_whose_logits_are_not_finite_fails_alone():
    core = FakeEngine(lambda history: None if history[0] == 111 and len(history) > 9 else hashed(history),
                      n_sequences=2, ahead=True)  # fmt: skip
    found = drive(core, [generation(core, Request(prompt, 20)) for prompt in (PROMPT, b"other")])
    assert found[0][-1].tokens == expected(hashed, 20)
    assert isinstance(found[1][-1], Failed) and isinstance(found[1][-1].error, NumericError)
    emitted = tuple(token for event in found[1] if isinstance(event, Tokens) for token in event.ids)
    assert emitted == expected(hashed, 5, b"other")
