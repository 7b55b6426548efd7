"""Decodes on a simulated device with the loop, the generations and the ledger that a real one has: what
rounds really take there is what auto counts, and it keeps its promise where no draft is right."""

import pytest
from fake_core import PROMPT, TOKENIZER, FakeEngine, drive, generation, hashed
from machines import STEPS_27B

from luce.decode.request import Request
from luce.decode.rounds import timed
from luce.native import Source
from luce.native.structs import Cost
from luce.planning.plan import AUTO_BUDGET
from luce.speculate.acceptance import Known
from luce.speculate.costs import NO_TIME, Costs, Host, Hosts
from luce.speculate.drafting import Drafter, Fixed, Round
from luce.speculate.runner import Runner, plain_round

TOKENS = 256


class Device(FakeEngine):
    """Takes seconds as a GPU does. Steps run one after the other, while the host goes on. A step begins
    `launch` after its call. The host knows its choices `notice` after its end, and may begin the next round
    then. It works for `host` for each of its sequences before it asks for more. `steps` are by rows, a draft
    takes `draft`, and `feeds` are by rows that plain rounds owe."""

    def __init__(self, steps, draft, feeds, launch, notice, host, **more):
        super().__init__(**({"ahead": True, "guess": lambda history: hashed(history) ^ 1} | more))
        self.steps, self.chain, self.feeds = steps, draft, feeds
        self.launch, self.notice, self.host = launch, notice, host
        self.apart = launch + notice  # A step that follows no other takes so much more.
        self.right = Costs(self.costs())
        self.free = 0.0  # The device has done all at this time.
        self.ends, self.owed = [], 0

    def takes(self, seconds):
        self.now += self.launch
        self.free = max(self.now, self.free) + seconds

    def costs(self):
        """Returns what a step takes alone, as a core measures it at the opening."""
        return [
            *(Cost(rows, 0, self.apart + seconds) for rows, seconds in self.steps.items()),
            Cost(1, 1, self.chain),
            *(Cost(rows, 4, seconds) for rows, seconds in self.feeds.items()),
        ]  # fmt: skip

    def called(self, verb, detail=None):
        super().called(verb, detail)
        if verb == "lists":  # The host reads them once they are there.
            self.now = max(self.now, self.free) + self.notice

    def draft(self, items):
        super().draft(items)
        self.takes(max(item.n for item in items) * self.chain)

    def verify(self, items):
        rows = sum(item.width for item in items)
        self.began(rows)
        return super().verify(items)

    def began(self, rows):
        fed = self.owed if rows > 1 or self.owed == AUTO_BUDGET + 1 else 0
        self.owed = 1 if rows == 1 and fed else 0 if rows > 1 else self.owed + 1
        self.takes(self.right.verify(rows) - self.apart + self.right.feed(fed))
        self.ends.append(self.free)

    def start(self, items):
        self.ends = []
        super().start(items)

    def follow(self):
        super().follow()
        self.began(len(self.begun[0][0]))

    def go_on(self, *of):
        self.now = max(self.now, self.ends[0] + self.notice)
        super().go_on(*of)

    def wait(self):
        results = super().wait()
        self.now = max(self.now, self.ends.pop(0) + self.notice) + self.host * len(results)
        return results


FEEDS = {1: 0.036, 32: 0.047}
DEVICES = {
    "27b": dict(steps=STEPS_27B, draft=0.349, feeds=FEEDS, launch=0.018, notice=0.01, host=0.05),
    "27b, a busy host": dict(steps=STEPS_27B, draft=0.349, feeds=FEEDS, launch=0.045, notice=0.03, host=0.2),
    "0.8b": dict(steps={1: 0.778, 2: 0.79, 4: 0.82, 8: 0.86, 9: 1.0, 16: 1.05, 32: 1.3}, draft=0.105,
                 feeds={1: 0.02, 32: 0.03}, launch=0.01, notice=0.01, host=0.03),
    "a slow host": dict(steps={1: 1.0, 2: 1.02, 32: 1.3}, draft=0.05, feeds=FEEDS, launch=0.05, notice=0.05,
                        host=0.4),
    "a host without time": dict(steps={1: 1.0, 2: 1.02, 32: 1.3}, draft=0.05, feeds={1: 0.0}, launch=0.0,
                                notice=0.0, host=0.0),
}  # fmt: skip


def auto_of(device, costs, known, hosts=NO_TIME):
    """Returns what makes the runner of a text."""
    return lambda sequence: Runner(
        sequence, costs, [Drafter(sequence, Source.NEXTN, 8, max(device.n_top, 1))], AUTO_BUDGET, known, hosts
    )


def timed_of(device):
    """Returns what steps of the device cost and what rounds take beside them, as an engine has it."""
    return timed(device, TOKENIZER, auto_of(device, Costs(device.costs()), Known()), device.clock)


def decode(device, source=None, prompt=PROMPT):
    """Returns (seconds, rounds) from the first token of a text to its last, and the source."""
    one = generation(device, Request(prompt, TOKENS))
    one._source = made = source(one.sequence) if source else None
    began = device.now
    (events,) = drive(device, [one])
    return device.now - began, [event for event in events if isinstance(event, Round)], made


@pytest.mark.parametrize("name", DEVICES)
def test_auto_is_at_most_3_percent_slower_than_plain_where_no_draft_is_right(name):
    """It is so in the first text of a process and in later ones, and its ledger has what was really lost."""
    device, known = Device(**DEVICES[name]), Known()
    plain, _, _ = decode(device)
    costs, hosts = timed_of(device)
    for _ in range(3):
        seconds, rounds, auto = decode(device, auto_of(device, costs, known, hosts))
        assert any(each.drafted for each in rounds) and not any(each.accepted for each in rounds)
        lost = (seconds / plain - 1) * (TOKENS - 1)
        assert 0 < lost <= 0.03 * (TOKENS - 1)
        assert 0.85 * auto._lost < lost < 1.05 * auto._lost


@pytest.mark.long
@pytest.mark.parametrize(("share", "most"), [(0.3, 2), (0.5, 2), (0.65, 4), (0.8, 6)])
@pytest.mark.parametrize("name", ["27b", "0.8b"])
def test_auto_has_97_percent_of_the_best_number_of_drafts_at_first_and_98_later(name, share, most):
    """It has them in the first text of a process and in later ones. Whatever a wrong draft's next best
    candidates are worth is found out soon: they are never right here, and cheap to try."""

    def guess(history):
        right = hashed(history)
        return right if hashed((*history, 3)) / 256 < share else right ^ 128

    def seconds(source):
        devices = [Device(**DEVICES[name], guess=guess, n_top=8) for _ in range(6)]
        return sum(decode(device, source, (*PROMPT, at))[0] for at, device in enumerate(devices))

    device, known = Device(**DEVICES[name], n_top=8), Known()
    costs, hosts = timed_of(device)
    best = min(
        seconds(lambda sequence, n=n: Fixed(Drafter(sequence, Source.NEXTN, 8), n))
        for n in range(most - 1, most + 2)
    )
    first = seconds(lambda sequence: auto_of(device, costs, Known(), hosts)(sequence))
    later = seconds(auto_of(device, costs, known, hosts))
    assert first < best / 0.97 and later < best / 0.98


@pytest.mark.parametrize("name", ["27b", "27b, a busy host", "0.8b"])
def test_rounds_are_begun_ahead_where_only_a_hopeless_head_may_draft(name):
    """One begins after a round that drafts, and after the first ones of a text, where a lookup may still
    come."""
    device = Device(**DEVICES[name])
    costs, hosts = timed_of(device)
    _, rounds, auto = decode(device, auto_of(device, costs, Known(), hosts))
    behind = sum(not each.ahead for each in rounds)
    assert behind <= 2 * sum(each.drafted > 0 for each in rounds) + 1 / (2 * auto._apart)
    assert behind < TOKENS / 2


@pytest.mark.parametrize("name", DEVICES)
def test_the_part_of_the_host_is_what_rounds_take(name):
    device, sizes = Device(**DEVICES[name]), DEVICES[name]
    costs, hosts = timed_of(device)
    assert hosts.of(1) == pytest.approx((sizes["host"], -sizes["launch"] - sizes["notice"]))
    assert costs.verify(1) == Costs(device.costs()).verify(1) and not device.open


def test_a_text_whose_rounds_cannot_be_begun_ahead_loses_nothing_by_that():
    """Plain decoding of it takes as long: of a text with logprobs, penalties or a grammar."""
    device = Device(**DEVICES["27b, a busy host"])
    costs, hosts = timed_of(device)
    one = generation(device, Request(PROMPT, TOKENS))
    one._by_itself = False
    one._source = auto = auto_of(device, costs, Known(), hosts)(one.sequence)
    (events,) = drive(device, [one])
    rounds = [event for event in events if isinstance(event, Round)]
    assert not any(each.ahead or each.behind for each in rounds)
    failed = sum(each.drafted > 0 for each in rounds)
    assert 0 < failed < len(rounds) / 2 and auto._lost < 0.5 * failed


def beside_a_reader(device, auto=None):
    """Returns (seconds, rounds) of a text beside a prompt that is read all the time, and its source."""
    one, reader = generation(device, Request(PROMPT, TOKENS)), generation(device, Request(PROMPT * 600, 1))
    one._source = made = auto and auto(one.sequence)
    began = device.now
    events, _ = drive(device, [one, reader])
    return device.now - began, [event for event in events if isinstance(event, Round)], made


@pytest.mark.parametrize("name", DEVICES)
def test_a_neighbour_that_reads_a_prompt_is_no_loss_of_auto(name):
    """It keeps rounds from being begun ahead, those of plain decoding too."""

    def device():
        return Device(**DEVICES[name], n_sequences=2, n_chunk=len(PROMPT), n_ctx=len(PROMPT) * 600 + 1)

    plain, _, _ = beside_a_reader(device())
    decoding = device()
    costs, hosts = timed_of(decoding)
    seconds, rounds, auto = beside_a_reader(decoding, auto_of(decoding, costs, Known(), hosts))
    assert not any(each.ahead or each.behind for each in rounds)
    assert 0 < sum(each.drafted > 0 for each in rounds) < len(rounds) / 2
    lost = (seconds - plain) / plain_round(costs, hosts.of(1))
    assert 0 < lost <= 0.03 * (TOKENS - 1)
    assert 0.85 * auto._lost < lost < 1.05 * auto._lost


@pytest.mark.parametrize("dearer", [0.3, 2.0])
def test_a_step_that_was_timed_too_dear_costs_as_much_as_a_round(dearer, monkeypatch):
    """Else plain rounds that are not begun ahead would be held for as dear, and so would lost ones."""
    device, sizes = Device(**DEVICES["27b"]), DEVICES["27b"]
    steps = [Cost(rows, 0, device.right.verify(rows) + dearer) for rows in sizes["steps"]]
    monkeypatch.setattr(device, "costs", lambda: steps)
    costs, hosts = timed_of(device)
    apart = sizes["launch"] + sizes["notice"] + sizes["host"]
    assert costs.verify(1) == pytest.approx(sizes["steps"][1] + apart)
    assert costs.verify(2) == Costs(device.costs()).verify(2) > costs.verify(1)
    assert hosts.of(1) == pytest.approx((0.0, -apart)) and isinstance(hosts.of(1), Host)


def test_a_step_of_several_that_was_timed_too_dear_costs_as_much_as_their_round(monkeypatch):
    """Then narrower steps cost no more than it, and wider ones no more than several of it."""
    device, sizes = Device(**DEVICES["27b"], n_sequences=4), DEVICES["27b"]
    steps = [Cost(rows, 0, 3 * device.right.verify(rows)) for rows in sizes["steps"]]
    monkeypatch.setattr(device, "costs", lambda: steps)
    costs, hosts = timed_of(device)
    undisturbed, beside = timed_of(Device(**sizes, n_sequences=4))
    assert costs.verify(4) == pytest.approx(undisturbed.verify(4) + beside.of(4).between)
    assert costs.verify(1) <= costs.verify(2) <= costs.verify(4) and costs.verify(8) <= 2 * costs.verify(4)
    assert hosts.of(4).between == 0


def test_a_round_begun_ahead_takes_no_longer_in_any_company():
    """What was timed may meet where no number was timed."""
    hosts = Hosts({1: Host(119e-6, 4e-6), 4: Host(518e-6, 430e-6)})
    assert hosts.of(4) == Host(518e-6, 430e-6) and hosts.of(16).ahead == hosts.of(16).between > 518e-6


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("sequences", [2, 6])
def test_the_part_of_the_host_grows_with_the_company(name, sequences):
    """It works for each sequence. So much is known of one and of four, and more lie on the line of these;
    unless the host works longer than a step takes."""
    device, sizes = Device(**DEVICES[name], n_sequences=sequences), DEVICES[name]
    costs, hosts = timed_of(device)
    assert sorted(hosts.timed) == [1, min(sequences, 4)] and not device.open
    assert hosts.of(1) == pytest.approx((sizes["host"], -sizes["launch"] - sizes["notice"]))
    assert hosts.of(sequences).between == pytest.approx(sizes["host"] * sequences)
    if name != "a slow host":
        assert hosts.of(sequences).ahead == pytest.approx(-sizes["launch"] - sizes["notice"])


def company(device, sequences, source=None):
    """Returns what each of several texts took that decode together, and their sources."""
    texts = [generation(device, Request((*PROMPT, at), TOKENS)) for at in range(sequences)]
    for one in texts:
        one._source = source(one.sequence) if source else None
    sources = [one._source for one in texts]
    return [events[-1].stats.decode_s for events in drive(device, texts)], sources


@pytest.mark.parametrize("name", ["27b", "27b, a busy host"])
def test_the_host_s_part_is_counted_for_each_sequence_of_a_company(name):
    """Where it was counted once, four texts without a right draft took up to 4.6% longer than plain ones."""
    device, known = Device(**DEVICES[name], n_sequences=4), Known()
    plain, _ = company(device, 4)
    costs, hosts = timed_of(device)
    for _ in range(2):
        seconds, _ = company(device, 4, auto_of(device, costs, known, hosts))
        assert all(1 < took / alone <= 1.03 for took, alone in zip(seconds, plain, strict=True))


def right_with(share):
    """Returns what guesses of a head whose drafts are right with a share."""

    def guess(history):
        right = hashed(history)
        return right if hashed((*history, 3)) / 256 < share else right ^ 128

    return guess


@pytest.mark.long
@pytest.mark.parametrize("sequences", [2, 8])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("name", ["27b", "27b, a busy host", "0.8b"])
def test_texts_that_decode_together_are_at_most_3_percent_slower_than_plain(name, share, sequences):
    """Where each drafted in rounds of its own, and all others waited, eight texts with half of the drafts
    right took up to a fifth longer."""
    device, known = Device(**DEVICES[name], n_sequences=sequences, n_top=8, guess=right_with(share)), Known()
    plain, _ = company(device, sequences)
    costs, hosts = timed_of(device)
    for _ in range(2):
        seconds, _ = company(device, sequences, auto_of(device, costs, known, hosts))
        assert sum(seconds) <= 1.03 * sum(plain)


@pytest.mark.parametrize(
    ("name", "share", "gammas", "at_first"),
    [
        ("27b", 1.0, (7, 8), 0.97),
        ("0.8b", 1.0, (7, 8), 0.97),
        ("27b", 0.8, (4, 5), 0.97),
        ("0.8b", 0.8, (4, 5), 0.96),
    ],
)
def test_texts_that_decode_together_have_the_best_number_of_drafts(name, share, gammas, at_first):
    """The first texts of an engine learn what is right. Those of a small model can try less meanwhile, since
    feeding its head takes more of a plain round. Later ones have 98% of the best fixed number."""
    device = Device(**DEVICES[name], n_sequences=4, guess=right_with(share))

    def seconds(source):
        return sum(company(device, 4, source)[0])

    best = min(seconds(lambda text, n=n: Fixed(Drafter(text, Source.NEXTN, 8), n)) for n in gammas)
    (costs, hosts), known = timed_of(device), Known()
    for least in (at_first, 0.98):
        assert best > least * seconds(auto_of(device, costs, known, hosts))


def test_a_text_whose_drafts_pay_for_all_drafts_beside_others_that_draft_nothing():
    def guess(history):
        return hashed(history) ^ (history[len(PROMPT)] != 0)

    device = Device(**DEVICES["27b"], n_sequences=4, guess=guess)
    plain, _ = company(device, 4)
    costs, hosts = timed_of(device)
    seconds, _ = company(device, 4, auto_of(device, costs, Known(), hosts))
    assert seconds[0] < plain[0] / 3 and max(seconds) < 1.15 * max(plain) and sum(seconds) < sum(plain)
