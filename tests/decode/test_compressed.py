"""What of a prompt is read (luce.decode.request.Compressed), and by which key such a prompt is kept."""

from __future__ import annotations

import random

import pytest

from luce.decode.request import Compressed, Request

WHOLE = tuple(range(1000, 1100))


def request(*spans):
    kept = Compressed("m", 0.5, len(WHOLE), spans)
    return Request(kept.of(WHOLE), compressed=kept)


@pytest.mark.parametrize(
    ("spans", "gaps"),
    [
        (((0, 100),), ()),
        (((0, 10), (20, 100)), ((10, 10),)),
        (((5, 10), (12, 13), (99, 100)), ((0, 5), (5, 2), (6, 86))),
        (((0, 10),), ()),
    ],
)
def test_gaps_are_where_tokens_lack(spans, gaps):
    asked = request(*spans)
    assert asked.gaps == gaps
    assert asked.compressed.read == len(asked.prompt)
    # Each token stands where it stood: at its place in the prompt, and as far behind as was left out ahead of it.
    positions = [at + sum(n for gap, n in gaps if gap <= at) for at in range(len(asked.prompt))]
    assert [WHOLE[at] for at in positions] == list(asked.prompt)


def key_of(*spans):
    return tuple(request(*spans).key.tolist())


def test_a_key_tells_gaps_and_what_stands_behind_them():
    parts = ((0, 100),), ((0, 10), (20, 100)), ((0, 10), (21, 100)), ((0, 11), (21, 100))
    keys = [key_of(*spans) for spans in parts]
    assert keys[0] == WHOLE
    assert len({key[:11] for key in keys}) == 3, "the last one has its gap a token later"
    assert all(key[:10] == WHOLE[:10] for key in keys)
    assert key_of((0, 10), (20, 100)) == keys[1], "the same gap has the same name again"
    same = Request((*WHOLE[:10], 1021, *WHOLE[21:]), compressed=Compressed("m", 0.5, 101, ((0, 10), (20, 100))))
    assert same.key[10] not in (keys[1][10], keys[2][10]), "another token stands behind the gap"


def test_random_keys_are_equal_where_tokens_and_gaps_are():
    rng, seen = random.Random(1), {}
    for _ in range(500):
        cuts = sorted(rng.sample(range(30), 4))
        asked = request((0, cuts[0] + 1), (cuts[1] + 1, cuts[2] + 1), (cuts[3] + 1, 40))
        n = rng.randint(1, len(asked.prompt))
        beginning = asked.prompt[:n], tuple(gap for gap in asked.gaps if gap[0] < n)
        assert seen.setdefault(tuple(asked.key[:n].tolist()), beginning) == beginning


def test_the_report_counts_both_parts():
    found = request((0, 10), (20, 30)).compressed.as_json()
    assert found == {"model": "m", "keep": 0.5, "read": 20, "left_out": 80, "spans": [[0, 10], [20, 30]]}
