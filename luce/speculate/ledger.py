"""The ledger of a text: what it has lost against plain decoding, and what trials may still lose."""

from __future__ import annotations

from luce.speculate.prices import Prices

PROMISE = 0.03  # A text whose drafts all fail takes at most this part longer than plain decoding.
# The promise is given over so many tokens, the length of an answer: trials come first, so what a whole answer
# may lose is there at its start. BEYOND is given for each token after that: such texts seldom improve.
HORIZON, BEYOND = 256, 0.01
BOOKED = 0.97  # So much of it is for rounds that are booked; plain ones behind drafts are a little late, and are not.
BET = 0.5  # One round may lose this part of what is left, so that three misses still leave an eighth.


class Ledger:
    """Account of a text of at most `most` tokens, in plain rounds. Rounds are booked as they were observed, and by
    their price where all have one pace (prices.py), by the number of texts that shared them and whether rounds were
    hidden, so that what they lost is known as well as plain rounds are. What a round gains can be lost again."""

    def __init__(self, most: int):
        self.most, self.tokens = most, 0
        self._within = min(HORIZON, most) - 1  # The prompt gives one.
        self.paid = 0.0  # What was paid of what others had lost, below 0 where others paid.
        self._lost = 0.0
        # (seconds, tokens) of rounds before which too few plain ones were seen, and turns of the host.
        self._unsettled: dict[tuple[int, bool], tuple[float, int]] = {}
        self._turns: dict[tuple[int, bool], int] = {}

    def book(self, sequences: int, hidden: bool, seconds: float, turns: int, tokens: int) -> None:
        """Books seconds, turns of the host, and the tokens for which plain decoding would have taken some too."""
        key = sequences, hidden
        before, known = self._unsettled.get(key, (0.0, 0))
        self._unsettled[key] = before + seconds, known + tokens
        self._turns[key] = self._turns.get(key, 0) + turns

    def lost(self, prices: Prices) -> float:
        """Returns how many plain rounds were lost against plain decoding, below 0 where they were gained. Each
        counts as one of the texts that decoded together then. What a plain round takes is taken as it is known
        when a round is booked, and a turn as it is known now: errors of the one differ from round to round."""
        unsettled = 0.0
        for key, (seconds, tokens) in [*self._unsettled.items()] if self._unsettled else ():
            plain, known = prices.least(*key)
            if plain:
                unsettled += seconds / plain - tokens
            if plain and known:
                self._lost += seconds / plain - tokens
                unsettled -= seconds / plain - tokens
                del self._unsettled[key]
        for key, turns in self._turns.items():
            if turns:
                _, plain, turn = prices.terms(*key)
                unsettled += turns * turn / plain
        return self._lost + unsettled + self.paid

    def rest(self, prices: Prices, sequences: int, hidden: bool, fed: float) -> float:
        """Returns how many plain rounds may still be lost. `fed` seconds of one keep a head ready to draft, which
        plain decoding without drafts would not take; a quarter is left for trials whatever that takes. Until a
        plain round was seen, it may take less than steps that were measured alone, and half is kept back."""
        plain = prices.plain(sequences, hidden)
        feeding = fed / plain if plain else 0.0
        allowed = max(PROMISE - feeding, PROMISE / 4) * self._within
        if self.tokens > HORIZON:
            allowed += max(BEYOND - feeding, BEYOND / 4) * (self.tokens - HORIZON)
        allowed *= BOOKED
        return (allowed if prices.seen(sequences, hidden) else allowed / 2) - self.lost(prices)
