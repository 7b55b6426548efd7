"""The scorer of prompts (luce/prompts/scorer.py), as which the box serves: what it reads of chats, what it refuses."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tiny
from depth import deeper

from luce.data import BOX
from luce.errors import ArgumentError, Cancelled, ContextFull, UnsupportedError
from luce.files.tokenizer import Tokenizer, difference
from luce.native import Engine, File, Model, Rows
from luce.native.structs import EngineParams
from luce.prompts.scorer import AHEAD, HEADS, ROWS, Scorer
from luce.prompts.spans import LEAST


@pytest.fixture(scope="module")
def file():
    with File(BOX) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(file):
    return Tokenizer(file.kv)


@pytest.fixture(scope="module")
def scorer(file, tokenizer):
    with Scorer(BOX, tokenizer, file.kv, device="cpu", threads=1) as opened:
        yield opened


def chat(seed):
    """Returns the text of a chat in ChatML, whose lines are code."""
    rng = random.Random(seed)
    text = "<|im_start|>system\nYou write Python. Tools: []<|im_end|>\n" if rng.random() < 0.5 else ""
    for turn in range(rng.randint(1, 5)):
        n = rng.randint(1, 25)
        lines = (f"x{rng.randint(0, 99)} = f{rng.randint(0, 9)}({rng.randint(0, 999)})" for _ in range(n))
        text += f"<|im_start|>{('user', 'assistant')[turn % 2]}\n" + "\n".join(lines) + "<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


@pytest.mark.parametrize("seed", [1, *deeper(0, *range(2, 8))])
def test_chats_keep_control_tokens_system_text_and_the_end(scorer, tokenizer, seed):
    tokens = tokenizer.encode(chat(seed))
    kept = scorer.compressed(tokens, 0.3)
    read = {at for first, end in kept.spans for at in range(first, end)}
    assert {at for at, token in enumerate(tokens) if token in tokenizer.control.values()} <= read
    users = [at for at, token in enumerate(tokens) if tokenizer.decode(tokens[at : at + 1]) == "user"]
    assert set(range(users[0] - 1)) <= read, "system text"
    assert set(range(max(users[-1] - 1, len(tokens) - LEAST), len(tokens))) <= read, "the last message, or its end"
    heads = [at for at, token in enumerate(tokens) if token == tokenizer.control["<|im_start|>"]]
    assert {at + 1 for at in heads} <= read, "the role"
    assert kept.of(tokens) == tuple(tokens[at] for at in sorted(read)) and kept.read == len(read)
    assert sum(n for _, n in kept.gaps) + kept.read == kept.total == len(tokens)


def test_scores_are_those_of_the_last_rows_and_of_what_the_model_goes_on_with(scorer, file, tokenizer):
    """A plain greedy continuation gives the look-ahead, and one verify of all these rows the scores."""
    tokens = tokenizer.encode(chat(1))[:300]
    with Model(file, "cpu") as model, Engine(model, EngineParams(n_rows=32, scores=1, n_threads=1)) as engine:
        sequence, first = engine.sequence(), len(tokens) - ROWS
        sequence.prefill(tokens[:first], last=False)
        rows = tokens[first:]
        while len(rows) < ROWS + AHEAD:
            ((*_, choice),) = engine.verify([Rows(sequence, rows)])
            if choice in tokenizer.eos_ids:
                break
            rows.append(choice)
        engine.verify([Rows(sequence, rows)])
        assert np.array_equal(scorer.scores(tokens), sequence.scores(len(tokens), HEADS))


def test_the_same_prompt_has_the_same_scores_again(scorer, tokenizer):
    tokens = tokenizer.encode(chat(2))
    first = scorer.scores(tokens).copy()
    scorer.scores(tokens[:-5])
    assert np.array_equal(scorer.scores(tokens), first)


@pytest.mark.parametrize("n", [1, 2, ROWS, ROWS + 1])
def test_short_prompts_are_scored_too(scorer, tokenizer, n):
    scores = scorer.scores(tokenizer.encode("def f(x):\n" * 20)[:n])
    assert len(scores) == n and (scores > 0).all() and np.isfinite(scores).all()


def test_a_prompt_of_which_all_stays_is_read_whole(scorer, tokenizer):
    tokens = tokenizer.encode("x = 1\ny = 2\n")
    assert scorer.compressed(tokens, 0.1).spans == ((0, len(tokens)),)


def test_a_prompt_as_long_as_the_context_is_scored(file, tokenizer):
    with Scorer(BOX, tokenizer, file.kv, 100, "cpu", 1) as small:
        tokens = tokenizer.encode("def f(x):\n" * 100)[: small.n_ctx]
        assert len(small.scores(tokens)) == 100 + AHEAD
        with pytest.raises(ContextFull, match="a scorer with a context of 108"):
            small.scores(tokens + tokens)


def test_it_can_be_cancelled(scorer, tokenizer):
    tokens = tokenizer.encode(chat(3))
    with pytest.raises(Cancelled):
        scorer.scores(tokens[3:], lambda: True)
    assert len(scorer.scores(tokens[3:])) == len(tokens) - 3


def test_what_cannot_be_is_refused(scorer, file, tokenizer, tmp_path):
    for keep in (0, -1, 1.01):
        with pytest.raises(ArgumentError, match="the share of a prompt that is kept is"):
            scorer.compressed([1, 2, 3], keep)
    with pytest.raises(UnsupportedError, match="with images"):
        scorer.scores([1, -2, 3])
    with pytest.raises(ContextFull, match="was trained for 2048 tokens, and the prompt has 5000"):
        Scorer(BOX, tokenizer, file.kv, 5000, "cpu", whole=True)
    with Scorer(BOX, tokenizer, file.kv, 5000, "cpu") as shorter:
        assert shorter.n_ctx == 2048
    config = tiny.Config()
    path = tiny.write(tmp_path / "tiny.gguf", config, tiny.layout(config, seed=1))
    with pytest.raises(UnsupportedError, match="cannot score prompts of this model: key tokenizer.ggml.tokens has"):
        Scorer(path, tokenizer, file.kv, None, "cpu")


def test_a_tokenizer_differs_in_what_decides_ids(file):
    ours = {key: file.kv[key] for key in file.kv if key.startswith("tokenizer.ggml.")}
    assert difference(ours, dict(ours)) is None
    assert difference(ours, ours | {"tokenizer.ggml.eos_token_id": 5, "general.name": "x"}) is None
    tokens = list(ours["tokenizer.ggml.tokens"])
    said = {
        "entry 7 of key tokenizer.ggml.tokens": {"tokenizer.ggml.tokens": [*tokens[:7], "?", *tokens[8:]]},
        "key tokenizer.ggml.tokens has": {"tokenizer.ggml.tokens": tokens[:-1]},
        "key tokenizer.ggml.pre is 'x'": {"tokenizer.ggml.pre": "x"},
        "key tokenizer.ggml.merges is None": {"tokenizer.ggml.merges": None},
    }
    for words, change in said.items():
        assert words in difference(ours, ours | change)
