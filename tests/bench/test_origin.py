"""Tests of what a recorded row says of its model (luce/bench/origin.py)."""

from __future__ import annotations

import hashlib
import os

import tiny

from luce.bench.origin import model_hash, origin, parts


def test_the_hash_of_a_split_model_covers_all_parts(tmp_path):
    config = tiny.Config()
    first = tiny.write(tmp_path / "m.gguf", config, tiny.layout(config, 1), tensors_per_part=20)
    before = origin("x", "cpu", first, "luce", 1, "abc")["model"]
    last = parts(first)[-1]
    assert len(parts(first)) == 3 and sorted(tmp_path.iterdir()) == parts(first)
    assert before["bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")
    assert origin("x", "cpu", first, "luce", 1, "abc")["model"]["sha256"] != before["sha256"]


def test_a_hash_that_lies_beside_a_model_is_taken_while_the_model_is_the_same(tmp_path):
    model, beside = tmp_path / "m.gguf", tmp_path / "m.gguf.sha256"
    model.write_bytes(b"abc")
    made, other = hashlib.sha256(b"abc").hexdigest(), "5" * 64
    for said, expected in (
        (f"{other}  m.gguf\n".encode(), other),
        (f"{other}  {tmp_path}/m.gguf\n".encode(), other),
        (f"{other}  another.gguf\n".encode(), made),
        (f"{other[1:]}  m.gguf\n".encode(), made),
        (b"", made),
        (b"\xff", made),
    ):
        beside.write_bytes(said)
        os.utime(model, ns=(10**18, beside.stat().st_mtime_ns - 1))
        assert model_hash(model) == expected, said
        assert origin("x", "cpu", model, "luce", 1, "abc")["model"]["sha256"] == expected
    beside.write_text(f"{other}  m.gguf\n")
    os.utime(model, ns=(10**18, beside.stat().st_mtime_ns))
    assert model_hash(model) == made  # It may have changed after its hash was written.


def test_a_split_models_hash_is_not_its_first_parts(tmp_path):
    config = tiny.Config()
    first = tiny.write(tmp_path / "m.gguf", config, tiny.layout(config, 1), tensors_per_part=20)
    before = model_hash(first)
    first.with_name(first.name + ".sha256").write_text(f"{'5' * 64}  {first.name}\n")
    os.utime(first, ns=(10**18, 10**18))
    assert model_hash(first) == before
