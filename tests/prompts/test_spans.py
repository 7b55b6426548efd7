"""Which lines of a prompt are read (luce/prompts/spans.py): properties over random chats, and some chats by hand."""

from __future__ import annotations

import random

import pytest

from luce.prompts.spans import FIRST, LAST, LEAST, LONGEST, Marks, budget_of, chosen, joined, lines_of, marked, pooled

TURN, END, THINK, BREAK, USER, ASSISTANT, SYSTEM = 100, 101, 102, 10, 1, 2, 3
MARKS = Marks(frozenset((TURN, END, THINK)), TURN, frozenset((BREAK,)))


def message(role, *lines):
    """Returns the tokens of a message: `lines` have lengths."""
    text = [token for n in lines for token in [*([50] * (n - 1)), BREAK]]
    return [TURN, role, BREAK, *text, END, BREAK]


def random_chat(seed):
    """Returns the tokens of a chat, and where messages of users begin."""
    rng = random.Random(seed)
    tokens, users = message(SYSTEM, rng.randint(1, 300)) if rng.random() < 0.5 else [], []
    for turn in range(rng.randint(1, 12)):
        role = USER if turn % 2 == 0 else ASSISTANT
        if role == USER:
            users.append(len(tokens))
        tokens += message(role, *(rng.choice((1, 2, 9, 40, 200)) for _ in range(rng.randint(1, 20))))
        if rng.random() < 0.3:
            tokens[-3:-3] = [THINK, 50, BREAK, THINK]
    if rng.random() < 0.7:
        tokens += [TURN, ASSISTANT, BREAK]
    return tokens, users if rng.random() < 0.9 else []


def spans_of(tokens, users, keep, scores):
    budget = budget_of(len(tokens), keep)
    return chosen(marked(tokens, MARKS, users, budget), pooled(scores), budget)


@pytest.mark.parametrize("seed", range(60))
def test_random_chats_keep_whole_lines_and_what_always_stays(seed):
    tokens, users = random_chat(seed)
    rng = random.Random(seed)
    scores, keep = [rng.random() for _ in tokens], rng.choice((0.01, 0.1, 0.25, 0.5, 0.9, 1.0))
    budget = budget_of(len(tokens), keep)
    lines, spans = marked(tokens, MARKS, users, budget), spans_of(tokens, users, keep, scores)
    read = {at for first, end in spans for at in range(first, end)}

    assert [line.first for line in lines] == [0, *(line.end for line in lines[:-1])]
    assert lines[-1].end == len(tokens) and max(map(len, lines)) <= LONGEST
    for line in lines:  # Each is read whole, or not at all.
        inside = read & set(range(line.first, line.end))
        assert len(inside) in (0, len(line)) and (inside or not line.stays)
    assert spans == joined(spans) and all(first < end for first, end in spans)
    assert all(first > end for (_, end), (first, _) in zip(spans, spans[1:], strict=False))
    assert {at for at, token in enumerate(tokens) if token in MARKS.control} <= read
    assert set(range(min(FIRST, len(tokens)))) <= read
    assert set(range(users[0] if users else 0)) <= read
    last = users[-1] if users else 0
    if len(tokens) - last > budget // 2:  # Else all of the last message stays.
        last = max(last, len(tokens) - min(LAST, max(LEAST, budget // 4)))
    assert set(range(last, len(tokens))) <= read
    assert len(read) <= max(budget, sum(len(line) for line in lines if line.stays))
    if keep == 1.0:
        assert spans == [(0, len(tokens))]


@pytest.mark.parametrize("seed", range(20))
def test_a_larger_share_reads_as_much_or_more(seed):
    tokens, users = random_chat(seed)
    scores = [random.Random(seed + at).random() for at in range(len(tokens))]
    read = [sum(end - first for first, end in spans_of(tokens, users, keep, scores)) for keep in (0.1, 0.3, 0.6, 1)]
    # A line that has no room gives it to smaller ones, so that a larger share may read a little less of others.
    assert all(more >= less - LONGEST for less, more in zip(read, read[1:], strict=False))
    assert read[-1] == len(tokens)


def test_the_head_and_end_of_a_message_stay_with_their_line_breaks():
    tokens = message(SYSTEM, 40) + message(USER, *[40] * 30) + message(ASSISTANT, *[40] * 30) + message(USER, 5)
    users = [at for at, token in enumerate(tokens) if token == TURN and tokens[at + 1] == USER]
    spans = spans_of(tokens, users, 0.01, [0.0] * len(tokens))
    kept = [tokens[at] for first, end in spans for at in range(first, end)]
    heads = [TURN, USER, BREAK, END, BREAK, TURN, ASSISTANT, BREAK, END, BREAK]
    assert kept[len(message(SYSTEM, 40)) :][-len(heads) - len(message(USER, 5)) :] == heads + message(USER, 5)


def test_the_best_lines_are_kept_up_to_the_budget():
    tokens = [50] * 9 + [BREAK]
    tokens = tokens * 100
    scores = [0.0] * 1000
    scores[505] = 1.0
    scores[705] = 0.5
    assert spans_of(tokens, [], 0.09, scores) == [(0, 40), (500, 510), (700, 710), (970, 1000)]
    assert spans_of(tokens, [], 0.07, scores) == [(0, 40), (500, 510), (980, 1000)]
    assert spans_of(tokens, [], 0.01, scores) == [(0, 40), (980, 1000)], "what stays is read whatever the budget is"


def test_a_long_line_is_cut():
    assert lines_of([50] * 300, MARKS) == [(0, 128), (128, 256), (256, 300)]
    assert lines_of([], MARKS) == []
    assert lines_of([BREAK], MARKS) == [(0, 1)]


def test_a_last_message_that_is_long_keeps_its_end():
    tokens = message(SYSTEM, 9) + message(USER, *[20] * 100)
    spans = spans_of(tokens, [len(message(SYSTEM, 9))], 0.1, [0.0] * len(tokens))
    quarter = len(tokens) // 40
    assert spans[-1][1] == len(tokens) and quarter <= spans[-1][1] - spans[-1][0] < quarter + 20
    assert sum(end - first for first, end in spans) <= len(tokens) / 10 + 1


def test_pooling_is_a_mean_of_neighbours():
    assert pooled([0, 0, 0, 3, 0, 0, 0], 3) == [0, 0, 1, 1, 1, 0, 0]
    assert pooled([2, 4], 13) == [3, 3]
    assert pooled([], 3) == []
