"""Opens a few of tools/fuzz_loader.py's mutated files; bench/results has what a million of them did."""

import os
from collections import Counter

import fuzz_loader
import gguf
import pytest
import tiny

from luce.errors import FileError
from luce.native import File


@pytest.mark.sanitize
def test_mutated_files_are_opened_or_refused_in_words(native, tmp_path):
    """What is not for users, or no error of luce's, ends the test."""
    (tmp_path / "seeds").mkdir()
    case = fuzz_loader.Case(native, tmp_path, fuzz_loader.make_seeds(tmp_path / "seeds"), seed=1)
    found = [case.run(number) for number in range(400)]
    assert Counter(outcome for outcome, _ in found).keys() == {"opened", "FileError", "UnsupportedError"}
    assert len(set(found)) > 50, "many checks were met"


@pytest.mark.sanitize
def test_mutated_towers_are_opened_or_refused_in_words(native, tmp_path):
    (tmp_path / "seeds").mkdir()
    case = fuzz_loader.Case(native, tmp_path, fuzz_loader.make_tower_seeds(tmp_path / "seeds"), seed=1)
    found = [case.run(number) for number in range(400)]
    assert {"opened", "FileError"} <= Counter(outcome for outcome, _ in found).keys(), Counter(o for o, _ in found)
    assert len(set(found)) > 30, "many checks were met"


def test_a_case_is_made_again_from_its_number(tmp_path):
    seeds = fuzz_loader.make_seeds(tmp_path)
    for number in range(50):
        once, again = (fuzz_loader.make_case(seeds, 1, number) for _ in range(2))
        assert once == again


@pytest.mark.parametrize("parts", [0, 12], ids=["one file", "parts"])
def test_a_file_that_is_cut_at_any_boundary_is_refused(native, tmp_path, parts):
    """Each key, each entry of a tensor and each tensor's bytes begin and end at one; of a file in parts the
    first one is cut."""
    config = tiny.Config(n_layer=2, interval=2)
    path = tiny.write(tmp_path / "cut.gguf", config, tiny.layout(config, 1), tensors_per_part=parts)
    reader = gguf.GGUFReader(path)
    tensors = [(tensor.data_offset, tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors]
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    ends = {*(field.offset for field in fields), *(at for both in tensors for at in both)}
    cuts = {cut for end in ends for cut in (end - 1, end, end + 1)} | set(range(32))
    last = max(end for _, end in tensors)
    del reader
    File(path, native).close()
    refused = sorted((cut for cut in cuts if 0 <= cut < last), reverse=True)
    assert len(refused) > 150
    for cut in refused:
        os.truncate(path, cut)
        with pytest.raises(FileError, match=path.name):
            File(path, native)
