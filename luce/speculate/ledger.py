"""The ledger of a text: what it has lost against plain decoding, and what trials may still lose."""

from __future__ import annotations

from luce.speculate.prices import Prices, Work

# A text whose drafts all fail takes at most this part longer than plain decoding. It is given over so many tokens, the
# length of an answer: trials come first, so what a whole answer may lose is there at its start.
PROMISE, HORIZON = 0.03, 256
# This part of the promise is kept for what prices are off by: replayed texts lost up to 0.6% more than was booked.
KEPT = 0.01
# One round may lose this part of what is left, so that three misses still leave an eighth. By counted costs the worst
# class of recorded texts has 0.95 of the best fixed way; with 0.75 it has 0.53, whose first bet was lost.
BET = 0.5
# What two misses leave of the promise is left for trials in any case: for each token beyond HORIZON, since such texts
# seldom improve, and where feeding a head, which is within the promise too, takes more than the rest of it.
TRIALS = PROMISE * BET**2


class Ledger:
    """Account of a text of at most `most` tokens, in plain rounds: what rounds took beyond what plain decoding would
    have for their tokens, by their prices (prices.py), which vary less than rounds do. What a round gains can be lost
    again. `paid` is what was paid of what other texts had lost, below 0 where others paid."""

    def __init__(self, most: int):
        self.most, self.tokens, self.lost, self.paid = most, 0, 0.0, 0.0
        # Rounds whose price is not settled: how many had the same work, their tokens, and what was booked of them.
        self._open = dict[Work, tuple[int, int, float]]()

    def book(self, work: Work, tokens: int, prices: Prices) -> None:
        """Books a round by its price, and anew once that is settled."""
        if work.drafted or work.turns:
            lost = prices.lost(work, 1, tokens)
            rounds, came, booked = self._open.get(work, (0, 0, 0.0))
            self._open[work] = rounds + 1, came + tokens, booked + lost
            self.lost += lost
        if self._open and prices.settled(work.sequences, work.hidden):
            for of in [of for of in self._open if (of.sequences, of.hidden) == (work.sequences, work.hidden)]:
                rounds, came, booked = self._open.pop(of)
                self.lost += prices.lost(of, rounds, came) - booked

    def allowed(self, fed: float) -> float:
        """Returns how many plain rounds may be lost in all by now. Keeping a head ready to draft takes `fed` of each
        plain round, which plain decoding without drafts would not take."""
        within = min(HORIZON, self.most) - 1  # The prompt gives one.
        return (1 - KEPT) * max(PROMISE - fed, TRIALS) * within + TRIALS * max(self.tokens - HORIZON, 0)

    def rest(self, fed: float = 0.0) -> float:
        """Returns how many plain rounds may still be lost."""
        return self.allowed(fed) - self.lost - self.paid
