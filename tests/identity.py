"""Says whether two runs print the same tokens, and how far apart they are where they may not.

Where steps are exact (the device says so) tokens are equal, always. On other GPUs, where ggml's kernels
differ between row counts, the first difference of a pair of runs may only be a near-tie: the logits that
chose there differ by rounding, a greedy choice by no more than that, and the rule makes each run's choice of
its logits, so nothing else has a part in it. What follows a first difference is another text and is not
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from drive import Decoded

# With ggml's matmuls on CUDA, the logits of a row at two row counts differ by less where the first token
# differs: by 0.01 (F32) to 0.31 (Q4_K, q8_0 KV) on an H100, with logits of standard deviation 2 to 3.5.
CUDA_GAP = 0.4

# It chooses by the logits and the index of the token after the prompt.
Rule = Callable[[np.ndarray, int], int]


def greedy_rule(logits: np.ndarray, at: int) -> int:
    return int(logits.argmax())


@dataclass
class Identity:
    """Identity counts over all pairs of runs of a test; a failed comparison is counted too."""

    runs_compared: int = 0
    runs_that_differ: int = 0
    greedy_runs_that_differ: int = 0
    tokens_compared: int = 0  # Each run counts up to its first difference, and with it.
    tokens_after_a_difference: int = 0
    max_abs_logit_difference_there: float = 0.0
    # These are of greedy runs, in the plain run's logits. The first says how far its choice is above the
    # other run's choice, which is no less than its two largest logits are apart. The second says it in units
    # of the logit difference there.
    max_choice_gap_there: float = 0.0
    max_choice_gap_in_differences: float = 0.0

    def compare(self, exact: bool, found: Decoded, plain: Decoded, n: int, rule: Rule = greedy_rule) -> None:
        """Compares the first n tokens, which `rule` chose. Where they need not be equal, both runs need the
        logits that chose them."""
        pairs = zip(found.tokens[:n], plain.tokens[:n], strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        self.runs_compared += 1
        self.tokens_compared += n if at is None else at + 1
        if at is not None:
            self.runs_that_differ += 1
            self.tokens_after_a_difference += n - at - 1
            assert not exact, f"token {at}: {found.tokens[at]}, not {plain.tokens[at]}"
            self._check_near_tie(found, plain, at, rule)

    def _check_near_tie(self, found: Decoded, plain: Decoded, at: int, rule: Rule) -> None:
        mine, theirs = (run.logits[at].astype(np.float64) for run in (found, plain))
        difference = float(np.abs(mine - theirs).max())
        self.max_abs_logit_difference_there = max(self.max_abs_logit_difference_there, difference)
        assert difference > 0, f"token {at}: another choice from the same logits"
        assert difference <= CUDA_GAP, f"token {at}: not a near-tie, logits differ by {difference}"
        for run in (found, plain):
            assert rule(run.logits[at], at) == run.tokens[at], f"token {at}: not the choice of its logits"
        if rule is greedy_rule:
            gap = float(theirs.max() - theirs[found.tokens[at]])
            self.greedy_runs_that_differ += 1
            self.max_choice_gap_there = max(self.max_choice_gap_there, gap)
            self.max_choice_gap_in_differences = max(self.max_choice_gap_in_differences, gap / difference)
            # One logit may have fallen and the other risen by the whole difference.
            assert gap <= 2 * difference, f"token {at}: logits {gap} apart, moved by {difference} at most"
