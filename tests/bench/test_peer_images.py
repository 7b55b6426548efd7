"""Measures of images: an oracle that sees, luce's own rows of them, and what llama-server's log tells of encodes."""

import json
import sys

import peer_images
import pytest
from oracle_tower import MARKS, TEMPLATE, make_tower, tower_of

from luce.bench.oracle_model import SHAPES, make_oracle
from luce.native import File, Tower

pytest.importorskip("PIL.Image")

# As llama-server of the pinned archive writes it with --log-prefix --log-timestamps -lv 4.
LOG = """0.01.200.000 I slot update_slots: id  0 | task 0 | encoding mtmd batch from idx = 12, n_chunks = 1
0.01.450.500 I decoding image batch 1/2, n_tokens_batch = 2048
0.01.500.000 I image decoded (batch 1/2) in 50 ms
0.01.600.000 I decoding image batch 2/2, n_tokens_batch = 2032
1.02.000.000 I slot update_slots: id  0 | task 9 | encoding mtmd batch from idx = 12, n_chunks = 1
1.03.000.250 I decoding image batch 1/1, n_tokens_batch = 64
"""


def test_the_log_tells_how_long_each_encode_took():
    assert peer_images.encodes(LOG) == pytest.approx([0.2505, 1.00025])


def test_an_encode_that_the_log_does_not_end_is_none():
    assert peer_images.encodes(LOG.splitlines()[0]) == []


@pytest.mark.parametrize("shape", ["27b", "0.8b"])
def test_towers_of_real_models_have_their_published_shape(shape):
    c = tower_of(SHAPES[shape].n_embd)
    published = {"27b": (27, 1152, 16, 4304, 5120), "0.8b": (12, 768, 12, 3072, 1024)}
    assert (c.n_layer, c.n_embd, c.n_head, c.n_ff, c.n_out) == published[shape]


@pytest.mark.long
def test_one_run_measures_encodes_and_first_tokens(tmp_path, monkeypatch, capsys):
    make_oracle(tmp_path / "model.gguf", "mini", marks=MARKS, template=TEMPLATE)
    make_tower(tmp_path / "mmproj.gguf", SHAPES["mini"].n_embd, "luce oracle mini")
    with File(tmp_path / "mmproj.gguf") as file, Tower(file) as tower:
        assert tower.info.n_out == SHAPES["mini"].n_embd
    words = ["peer_images.py", str(tmp_path / "model.gguf"), "--mmproj", str(tmp_path / "mmproj.gguf")]
    words += ["--device", "cpu", "--threads", "1", "--sizes", "300x200,200x500", "--repeat", "1", "--ctx", "2048"]
    monkeypatch.setattr(sys, "argv", [*words, "--save", str(tmp_path / "rows")])
    peer_images.main()
    (saved,) = (tmp_path / "rows").glob("*-images-model-cpu.json")
    row = json.loads(saved.read_text())
    assert row == json.loads(capsys.readouterr().out)
    assert row["tower"]["file"] == "mmproj.gguf" and len(row["tower"]["sha256"]) == 64
    found = {(each["measure"], each["image"]): each for each in row["rows"]}
    assert list(found) == [
        (measure, image) for measure in ("encode", "first token") for image in ("300x200", "200x500")
    ]
    assert found["encode", "200x500"]["tokens"] == 6 * 16 and found["encode", "200x500"]["seconds"] > 0
    for image in ("300x200", "200x500"):
        first = found["first token", image]
        assert first["prompt"] > found["encode", image]["tokens"]  # The server's prompt has the image's rows.
        assert min(first["cold_s"], first["warm_s"]) > 0


def test_sizes_are_two_numbers():
    assert peer_images.sizes("1920x1080,8x8") == [(1920, 1080), (8, 8)]
    with pytest.raises(Exception, match="expected sizes"):
        peer_images.sizes("1920")
