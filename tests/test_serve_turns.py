"""Where prompts are cut: what is read again of a conversation is little, and each turn has the bits of a cold
one, with chunks as long as a GPU's."""


import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from luce._native import File
from luce.server.turns import LOST, PAGE, Turns
from luce.tokenizer import Tokenizer

CHUNK = 1024  # luce.server.models.GPU_CHUNK
MARK = 0  # the token that begins a message here


class Marked:
    """The tiny model's tokenizer, with a token that begins messages."""

    def __init__(self, tokenizer):
        self.control = {"<|im_start|>": MARK}
        self.decode, self.encode = tokenizer.decode, tokenizer.encode

    def message(self, role, n, seed):
        """A message of n tokens."""
        head = [MARK, *self.encode(f"{role}\n")]
        words = np.random.default_rng(seed).integers(33, 200, max(n - len(head), 0))
        return [*head, *(int(token) for token in words)]


@pytest.fixture(scope="module")
def long_gguf(tmp_path_factory):
    config = tiny.Config(n_ctx=10752)
    path = tmp_path_factory.mktemp("models") / "long.gguf"
    return tiny.write(path, config, tiny.layout(config, seed=1))


@pytest.fixture(scope="module")
def marked(native, long_gguf):
    with File(long_gguf, native) as file:
        return Marked(Tokenizer(file.kv))


def conversation(marked, turns, first, each):
    """Yields the prompts of an agent's turns: calls of tools, and what they answer."""
    prompt = marked.message("system", first - 60, 1) + marked.message("user", 60, 2)
    for turn in range(turns):
        head = marked.message("assistant", 0, 0)
        yield tuple(prompt + head)
        prompt = prompt + head + marked.message("user", each - len(head), 3 + turn)


LENGTHS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.integers(0, 900)), max_size=40)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, LENGTHS, LENGTHS, st.integers(0, 40), st.sampled_from([256, 768, 1024, 2048]))
def test_prompts_that_begin_alike_are_cut_alike(marked, same, one, other, torn, n_chunk):
    turns = Turns(marked, n_chunk)

    def prompt(messages, seed):
        return sum((marked.message(role, n, seed) for role, n in messages), [])

    begin = prompt(same, 1)
    begin = begin[: max(len(begin) - torn, 0)]  # they part within a message
    first, second = begin + prompt(one, 2), begin + prompt(other, 3)
    (ends, kept), (others, _) = turns.cut(first), turns.cut(second)
    alike = next((at for at, pair in enumerate(zip(first, second)) if pair[0] != pair[1]),  # noqa: B905
                 min(len(first), len(second)))  # fmt: skip
    for end in {*ends} & {*others}:
        if end <= alike:
            assert [at for at in ends if at <= end] == [at for at in others if at <= end]
    assert kept <= {*ends} and all(end % PAGE == 0 for end in ends)
    assert {*range(n_chunk, len(first) + 1, n_chunk)} <= {*ends}


@settings(max_examples=60, deadline=None)
@given(LENGTHS)
def test_little_is_read_again_of_a_turn(marked, messages):
    """The next prompt of a conversation goes on where the answer begins."""
    head = marked.message("assistant", 0, 0)
    prompt = sum((marked.message(role, n, 1) for role, n in messages), []) + head
    _, kept = Turns(marked, CHUNK).cut(prompt)
    assert len(prompt) - max(kept, default=0) <= max(len(prompt) / LOST, PAGE) + len(head)
