"""How many tokens to draft: the gamma that gives the most tokens a second.

No token depends on it: every gamma gives the same ones, so times may decide.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from luce.drafting import Round

# What auto may lose against plain decoding: 5% of it over 512 tokens is the promise.
HORIZON = 512  # tokens
ALLOWANCE = 0.03  # of plain decoding's time over them; the rest is for noise in what is measured

MARGIN = 1.03  # drafting has to promise so much more than plain decoding
STEADY = 1.02  # and another gamma so much more than the present one

PLAIN_FIRST = 3  # plain rounds that are measured before anything is tried
BURST = 4  # rounds of a trial
FIRST_WAIT, LONGEST_WAIT = 16, 1024  # plain rounds before the next trial, doubled by each that failed
HIGHEST = 0.95  # acceptance to hope for
HOPELESS_WAIT = 512  # plain rounds before the next trial, at least, where not even that would pay
PATIENCE, MOST_PATIENCE = 8, 32  # rounds with drafts before plain decoding is measured again, doubling


class RoundCosts:
    """Seconds of a round by gamma: the median of its last rounds, so that a hiccup does not count, and
    until it was measured a line through plain decoding and the nearest gammas."""

    SAMPLES = 7
    STALE = 64  # rounds after which a cost that was not measured again is forgotten
    UNKNOWN_SLOPE = 0.3  # of each draft, in plain rounds, before any was measured

    def __init__(self, gamma_max: int):
        self.first_s: dict[int, float] = {}  # the first round of a gamma may build its graphs: not a cost
        self._samples: list[deque[float]] = [deque(maxlen=self.SAMPLES) for _ in range(gamma_max + 1)]
        self._measured_at = [0] * (gamma_max + 1)
        self._rounds = 0

    def add(self, gamma: int, seconds: float) -> None:
        """A round that did nothing but its own work."""
        self._rounds += 1
        if gamma not in self.first_s:
            self.first_s[gamma] = seconds
            return
        self._samples[gamma].append(seconds)
        self._measured_at[gamma] = self._rounds
        if gamma:
            for samples, measured_at in list(zip(self._samples, self._measured_at, strict=True))[1:]:
                if self._rounds - measured_at > self.STALE:
                    samples.clear()

    def count(self, gamma: int) -> int:
        """Rounds that are known of a gamma, SAMPLES at most."""
        return len(self._samples[gamma])

    def __getitem__(self, gamma: int) -> float:
        samples = self._samples[gamma]
        if samples:
            return median(samples) if len(samples) > 2 else min(samples)
        known = [g for g, measured in enumerate(self._samples) if measured]
        below = max(g for g in known if g < gamma)
        above = min((g for g in known if g > gamma), default=None)
        if above is not None:
            return self[below] + (self[above] - self[below]) * (gamma - below) / (above - below)
        if below:
            return self[0] + max(self[below] - self[0], 0.0) / below * gamma
        return self[0] * (1 + self.UNKNOWN_SLOPE * gamma)

    def building(self) -> float:
        """Seconds that a gamma's first round takes beyond its cost, as far as seen."""
        return max(first - self[gamma] for gamma, first in self.first_s.items())


class Acceptance:
    """Share of accepted drafts at each position, of those that follow accepted ones."""

    GUESS = 0.7  # before any trial, and worth one
    FORGET = 0.93  # weight that a trial keeps for each newer one: about 14 count
    OLD = 2.0  # trials that earlier text is worth

    def __init__(self, gamma_max: int):
        self._hits, self._trials = [0.0] * gamma_max, [0.0] * gamma_max

    def add(self, drafted: int, accepted: int) -> None:
        """A round: one trial at each position up to the first rejected one."""
        for i in range(min(accepted + 1, drafted)):
            self._trials[i] = self.FORGET * self._trials[i] + 1
            self._hits[i] = self.FORGET * self._hits[i] + (i < accepted)

    def age(self) -> None:
        """What was seen is of earlier text."""
        for i, trials in enumerate(self._trials):
            if trials > self.OLD:
                self._hits[i] *= self.OLD / trials
                self._trials[i] = self.OLD

    def tokens(self, gamma: int) -> float:
        """Expected of a round: 1 + a1 + a1*a2 + ... A position with few trials is drawn to the one before."""
        share, chance, tokens = self.GUESS, 1.0, 1.0
        for i in range(gamma):
            share = (self._hits[i] + share) / (self._trials[i] + 1)
            chance *= share
            tokens += chance
        return tokens


class AutoGamma:
    """The gamma from 0 up that gives the most tokens a second, from what rounds cost and accept.

    Drafting has to be tried to learn whether it pays: in bursts, the rarer the more of them have failed.
    A ledger of the seconds lost against plain decoding bounds what trials may cost. While drafting pays,
    plain decoding is measured again at times, as contexts grow and machines change their pace.
    """

    CATCH_UP = 0.02  # plain rounds for each token that the head lags behind, before it was measured

    def __init__(self, gamma_max: int):
        self._max = gamma_max
        self._cost, self._acceptance = RoundCosts(gamma_max), Acceptance(gamma_max)
        self._catch_up_s: float | None = None  # for each token that the head lags behind
        self.begin(HORIZON)

    def begin(self, budget: int) -> None:
        """A text of at most `budget` tokens. Costs stay known, acceptance hardly, the ledger is empty."""
        self._budget, self._tokens = budget, 0
        self._draft_s, self._draft_tokens = 0.0, 0  # the ledger: rounds with drafts
        self._lag = 0  # committed tokens that the head has not seen; of a prompt it has seen all
        self._last = 0  # gamma of the last round
        self._drafting, self._lost_before = False, 0.0  # seconds lost when drafting began
        self._burst = 0  # rounds left of a trial
        self._plain_rounds, self._wait = FIRST_WAIT, FIRST_WAIT  # since drafting ended; to the next trial
        self._since_plain, self._patience = 0, PATIENCE  # rounds since plain was measured; to the next time
        self._plain_left = 0  # rounds of such a measurement
        self._acceptance.age()

    def gamma(self, limit: int) -> int:
        """For the next round, in which at most `limit` >= 1 drafts are of use."""
        limit = min(limit, self._max)
        if self._cost.count(0) < PLAIN_FIRST:
            return 0
        if self._drafting:
            if self._plain_is_due(limit):
                return 0
            best = max(self._best(limit), self._trial(limit) if self._burst else 0)
            if best:
                return best
            self._pause()
        elif self._plain_rounds >= self._wait and self._affordable(self._trial(limit)):
            self._start()
            return max(self._best(limit), self._trial(limit))
        return 0

    def learn(self, done: Round) -> None:
        """A round that is over."""
        self._tokens += done.accepted + 1
        if done.drafted:
            self._since_plain += 1
            self._burst = max(self._burst - 1, 0)
            self._draft_s += done.seconds
            self._draft_tokens += done.accepted + 1
            self._acceptance.add(done.drafted, done.accepted)
        else:
            self._since_plain = 0
            self._plain_rounds += 1
            self._plain_left = max(self._plain_left - 1, 0)
        self._measure(done.drafted, done.seconds)
        self._lag = 0 if done.drafted else self._lag + 1
        self._last = done.drafted

    def _measure(self, gamma: int, seconds: float) -> None:
        if gamma == 0 or self._lag <= gamma + 1:
            self._cost.add(gamma, seconds)
        elif self._lag >= FIRST_WAIT and self._cost.count(gamma):
            self._catch_up_s = max(seconds - self._cost[gamma], 0.0) / self._lag

    # ---- drafting begins and ends

    def _start(self) -> None:
        self._drafting, self._lost_before = True, self._lost()
        self._burst, self._since_plain, self._plain_left = BURST, 0, 0
        self._acceptance.age()

    def _pause(self) -> None:
        self._drafting, self._burst, self._plain_rounds = False, 0, 0
        self._wait = FIRST_WAIT if self._lost() < self._lost_before else min(2 * self._wait, LONGEST_WAIT)
        if not any(self._can_pay(gamma) for gamma in self._reach(self._max)):
            self._wait = max(self._wait, HOPELESS_WAIT)

    def _plain_is_due(self, limit: int) -> bool:
        """Plain decoding is measured again, the sooner the less drafting gains; never within a trial."""
        if self._burst or self._plain_left:
            return not self._burst
        gains_much = self._rate(self._best(limit)) > 1.25 * self._rate(0)
        if self._since_plain < self._patience * (4 if gains_much else 1):
            return False
        self._plain_left, self._patience = 2, min(2 * self._patience, MOST_PATIENCE)
        return True

    # ---- what pays

    def _rate(self, gamma: int) -> float:
        """Tokens a second."""
        return self._acceptance.tokens(gamma) / self._cost[gamma]

    def _reach(self, limit: int) -> range:
        """Gammas to choose from: at most twice as far as tried, what costs lie beyond is a guess."""
        return range(1, min(limit, max(1, 2 * max(self._cost.first_s))) + 1)

    def _can_pay(self, gamma: int) -> bool:
        """If acceptance were as high as it gets."""
        tokens = sum(HIGHEST**i for i in range(gamma + 1))
        return tokens / self._cost[gamma] > MARGIN * self._rate(0)

    def _trial(self, limit: int) -> int:
        """The smallest gamma that can pay; none: 1, for costs may have changed."""
        return next((gamma for gamma in self._reach(limit) if self._can_pay(gamma)), min(1, limit))

    def _best(self, limit: int) -> int:
        """The best gamma by present knowledge; 0: none pays."""
        rates = {gamma: self._rate(gamma) for gamma in self._reach(limit)}
        if not rates or not any(self._cost.count(gamma) for gamma in range(1, self._max + 1)):
            return 0
        least = (MARGIN if self._lost() <= self._allowance() else MARGIN + 0.1) * self._rate(0)
        best = max(rates, key=lambda gamma: rates[gamma])
        if rates[best] < least:
            return 0
        present = rates.get(self._last, 0.0)
        if present < least:
            return best
        if not self._worth_building(best, 1 / present - 1 / rates[best]):
            best = max((gamma for gamma in rates if gamma in self._cost.first_s), key=lambda g: rates[g])
        return best if rates[best] > STEADY * present else self._last

    def _worth_building(self, gamma: int, gain: float) -> bool:
        """Whether graphs that do not exist yet are earned back, `gain` seconds a token, by as many tokens as
        came and at least half a horizon; and can be afforded if they are not."""
        if gamma in self._cost.first_s:
            return True
        left = min(self._budget - self._tokens, max(self._tokens, HORIZON / 2))
        building = self._cost.building()
        return gain * left > building and self._lost() + building <= self._allowance()

    # ---- the ledger

    def _lost(self) -> float:
        """Seconds that rounds with drafts took longer than plain decoding of their tokens."""
        return self._draft_s - self._draft_tokens * self._cost[0]

    def _allowance(self) -> float:
        """Seconds that may be lost up to now."""
        return ALLOWANCE * max(min(HORIZON, self._budget), self._tokens) * self._cost[0]

    def _affordable(self, gamma: int) -> bool:
        """A trial, even if nothing is accepted."""
        loss = BURST * max(self._cost[gamma] - self._cost[0], 0.0)
        loss += self._lag * (self.CATCH_UP * self._cost[0] if self._catch_up_s is None else self._catch_up_s)
        if gamma not in self._cost.first_s:
            loss += min(self._cost.building(), self._allowance() / 2)
        return self._lost() + loss <= self._allowance()
