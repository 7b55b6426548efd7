"""Checks what is computed of measures of servers; bench/peer_serve.py's parts of a run."""

import argparse
import sys

import peer_serve
import pytest

from luce.bench.serve import Answered, Row, together
from luce.data import BOX
from luce.native import File


def row(mode, measure, prompt=128, streams=1, **numbers):
    return Row(mode, measure, prompt, streams, **numbers)


def test_medians_are_of_what_measures_the_same():
    rows = [row("luce off", "streams", streams=n, tok_per_s=speed, tok_per_s_decoding=1.0)
            for n, speed in ((1, 10.0), (2, 1.0), (1, 30.0), (2, 3.0), (1, 20.0))]  # fmt: skip
    one, two = peer_serve.medians(rows)
    assert (one["streams"], one["tok_per_s"], one["runs"], one["first_s"]) == (1, 20.0, 3, None)
    assert (two["tok_per_s"], two["runs"]) == (2.0, 2)


def test_each_mode_is_held_against_its_peer():
    rows = []
    for mode, speed in (
        ("luce off", 30.0),
        ("luce auto", 50.0),
        ("llama-server", 20.0),
        ("llama-server drafts", 100.0),
    ):
        rows.append(row(mode, "streams", streams=4, tok_per_s=speed, tok_per_s_decoding=2 * speed))
    rows += [row("llama-server", "cold", 1024, first_s=1.0), row("llama-server", "cold", 8192, first_s=8.0)]
    turns = [(9.0, None), (3.0, 0.9), (2.0, 1.0)]
    rows += [row("luce auto", f"turn {n}", 100 * n, first_s=s, reused=r) for n, (s, r) in enumerate(turns)]
    rows.append(row("luce auto", "conversation", 300, first_s=3.0, reused=0.95, seconds=14.0))
    found = peer_serve.ratios(peer_serve.medians(rows))
    plain, drafting = found["luce off"], found["luce auto"]
    assert (
        plain["streams"] == plain["decoding"] == {"4": 1.5}
        and plain["reused"] is plain["warm_of_cold"] is None
    )
    assert drafting["peer"] == "llama-server drafts" and drafting["streams"] == {"4": 0.5}
    assert (drafting["reused"], drafting["reused_least"], drafting["warm_of_cold"]) == (0.95, 0.9, 0.25)


def test_a_copy_says_that_it_was_trained_for_more(tmp_path):
    assert peer_serve.with_context(BOX, None, tmp_path) == BOX
    with File(BOX) as box, File(peer_serve.with_context(BOX, 40960, tmp_path)) as copy:
        differ = {key for key in box.kv if box.kv[key] != copy.kv[key]}
        assert differ == {"qwen35.context_length"} and copy.kv["qwen35.context_length"] == 40960


def test_the_streams_of_a_run_are_repeated():
    args = argparse.Namespace(
        repeat=2, counts=[1, 4], prompt_tokens=8, n_gen=4, lengths=[64], turns=3, conversation=99
    )
    parts = [(part.long, part.arguments[0]) for part in peer_serve.parts(args)]
    assert parts == [(False, [1]), (False, [4]), (False, [1]), (False, [4]), (True, [64]), (True, 3)]


def test_servers_of_long_prompts_have_to_be_there(monkeypatch, capsys, tmp_path):
    words = [
        "peer_serve.py",
        str(BOX),
        "--no-server",
        "--long",
        "llama-server",
        "--device",
        "cpu",
        "--modes",
        "off",
    ]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="--long llama-server: the servers are luce off"):
        peer_serve.main()


def test_what_streams_decode_together_is_counted_while_all_of_them_decode():
    """The second begins at 3 and the first ends at 5: between, they have 4 + 6 tokens more."""
    first = Answered(0.0, 1.0, 5.0, 9, 0, 0, 0, ((1.0, 1), (2.0, 3), (3.0, 5), (4.0, 7), (5.0, 9)))
    second = Answered(0.0, 3.0, 7.0, 13, 0, 0, 0, ((3.0, 1), (4.0, 4), (5.0, 7), (6.0, 10), (7.0, 13)))
    assert together([first, second]) == (4 + 6) / 2
    apart = Answered(0.0, 6.0, 7.0, 2, 0, 0, 0, ((6.0, 1), (7.0, 2)))
    assert together([first, apart]) is None
    assert together([first, Answered(0.0, 1.0, 5.0, 9, 0, 0, 0, ((5.0, 9),))]) is None
