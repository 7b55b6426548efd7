"""The ledger of a text: what it has lost against plain decoding, and what trials may still lose."""

from __future__ import annotations

from luce.speculate.prices import Prices

PROMISE = 0.03  # A text whose drafts all fail takes at most this part longer than plain decoding.
# The promise is given over so many tokens, the length of an answer: trials come first, so what a whole answer
# may lose is there at its start. BEYOND is given for each token after that: such texts seldom improve.
HORIZON, BEYOND = 256, 0.01
BET = 0.5  # One round may lose this part of what is left, so that three misses still leave an eighth.


class Ledger:
    """Account of a text of at most `most` tokens. Rounds are booked as they were observed, by the number of
    texts that shared them and whether rounds were hidden, so that what they lost is known as well as plain
    rounds are. What a round gains can be lost again."""

    def __init__(self, most: int):
        self.most, self.tokens = most, 0
        self.paid = 0.0  # Seconds that were paid of what others had lost, below 0 where others paid.
        self._booked: dict[tuple[int, bool], tuple[float, int, int]] = {}

    def book(self, sequences: int, hidden: bool, seconds: float, turns: int, tokens: int) -> None:
        """Books seconds, turns of the host, and the tokens for which plain decoding would have taken some too."""
        before = self._booked.get((sequences, hidden), (0.0, 0, 0))
        self._booked[sequences, hidden] = before[0] + seconds, before[1] + turns, before[2] + tokens

    def lost(self, prices: Prices) -> float:
        """Returns the seconds that were lost against plain decoding, below 0 where they were gained."""
        lost = self.paid
        for key, (seconds, turns, tokens) in self._booked.items():
            _, plain, turn = prices.terms(*key)
            lost += seconds + turns * turn - tokens * plain
        return lost

    def rest(self, prices: Prices, sequences: int, hidden: bool, fed: float) -> float:
        """Returns the seconds that may still be lost. `fed` seconds of a plain round keep a head ready to
        draft, which plain decoding without drafts would not take. Until a plain round was seen, it may take
        less than steps that were measured alone, and half is kept back."""
        plain = prices.plain(sequences, hidden)
        within, beyond = min(HORIZON, self.most) - 1, max(self.tokens - HORIZON, 0)  # The prompt gives one.
        allowed = sum(
            max(part * plain - fed, part * plain / 4) * n for part, n in ((PROMISE, within), (BEYOND, beyond))
        )
        return (allowed if prices.seen(sequences, hidden) else allowed / 2) - self.lost(prices)
