"""Opens a few of tools/fuzz_loader.py's mutated files; bench/results has what a million of them did."""

from collections import Counter

import fuzz_loader
import pytest


@pytest.mark.sanitize
def test_mutated_files_are_opened_or_refused_in_words(native, tmp_path):
    """What is not for users, or no error of luce's, ends the test."""
    (tmp_path / "seeds").mkdir()
    case = fuzz_loader.Case(native, tmp_path, fuzz_loader.make_seeds(tmp_path / "seeds"), seed=1)
    found = [case.run(number) for number in range(400)]
    assert Counter(outcome for outcome, _ in found).keys() == {"opened", "FileError", "UnsupportedError"}
    assert len(set(found)) > 50, "many checks were met"


def test_a_case_is_made_again_from_its_number(tmp_path):
    seeds = fuzz_loader.make_seeds(tmp_path)
    for number in range(50):
        once, again = (fuzz_loader.make_case(seeds, 1, number) for _ in range(2))
        assert once == again
