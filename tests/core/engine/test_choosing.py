"""Checks penalties, masks and log-probabilities: by definition, by row, and with the tokens of plain
decoding."""

from contextlib import ExitStack

import drive
import numpy as np
import pytest
import tiny
from box_model import DRAFTER, GGUF, PROMPTS
from depth import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from op_run import penalise

from luce.decode.engine import Engine
from luce.decode.events import Finished, Tokens
from luce.decode.request import Request
from luce.errors import ArgumentError, NumericError, StateError
from luce.native.structs import Logprobs, Penalties, Sampling
from luce.planning.opened import Files
from luce.planning.plan import Options

N_VOCAB = 40
FLOATS = st.floats(-2, 2, width=32)
PENALTIES = st.builds(
    Penalties,
    repetition=st.sampled_from([1.0, 1.3, 0.5]),
    presence=FLOATS,
    frequency=FLOATS,
    bias=st.lists(st.tuples(st.integers(0, N_VOCAB - 1), FLOATS), max_size=5).map(tuple),
)


def processed(logits: np.ndarray, penalties: Penalties, tokens: list[int], n_prompt: int) -> np.ndarray:
    """Applies the bias, transformers' RepetitionPenaltyLogitsProcessor, and OpenAI's mu - c * frequency - (c
    > 0) * presence, all in F32."""
    scores = logits.copy()
    for token, bias in penalties.bias:
        scores[token] += np.float32(bias)
    seen = np.unique(np.array(tokens, int))
    score, repetition = scores[seen], np.float32(penalties.repetition)
    scores[seen] = np.where(score < 0, score * repetition, score / repetition)
    count = np.bincount(np.array(tokens[n_prompt:], int), minlength=len(scores)).astype(np.float32)
    scores = scores - count * np.float32(penalties.frequency)
    return np.where(count > 0, scores - np.float32(penalties.presence), scores)


@examples(200)
@given(
    penalties=PENALTIES,
    tokens=st.lists(st.integers(0, N_VOCAB - 1), max_size=30),
    n_prompt=st.integers(0, 35),
    seed=st.integers(0, 99),
)
def test_penalties_are_what_others_define(native, penalties, tokens, n_prompt, seed):
    logits = np.random.default_rng(seed).normal(0, 3, N_VOCAB).astype(np.float32)
    found = penalise(native, logits, penalties, tokens, n_prompt)
    assert found.tolist() == processed(logits, penalties, tokens, n_prompt).tolist()


@pytest.mark.references
def test_the_repetition_penalty_is_transformers(native):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits, tokens = np.random.default_rng(1).normal(0, 3, N_VOCAB).astype(np.float32), [3, 3, 17, 0, 39]
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    theirs = processor(torch.tensor([tokens]), torch.tensor(logits[None]))[0].numpy()
    assert penalise(native, logits, Penalties(repetition=1.3), tokens).tolist() == theirs.tolist()


@pytest.mark.parametrize(
    "penalties",
    [
        Penalties(repetition=-1),
        Penalties(repetition=np.inf),
        Penalties(presence=np.nan),
        Penalties(frequency=np.inf),
        Penalties(bias=((N_VOCAB, 1.0),)),
        Penalties(bias=((-1, 1.0),)),
        Penalties(bias=((0, np.inf),)),
    ],
    ids=str,
)
def test_penalties_out_of_range_are_refused(native, penalties):
    with pytest.raises(ArgumentError):
        penalise(native, np.zeros(N_VOCAB, np.float32), penalties, [])


def test_logits_stay_finite_whatever_the_penalties(native):
    logits = np.array([3e38, -3e38, 1e-30, 5], np.float32)
    wild = Penalties(1e-30, 3e38, 3e38, bias=((0, 3e38), (1, -3e38)))
    assert np.isfinite(penalise(native, logits, wild, [0, 1, 2, 3, 3, 3])).all()


# ---- choices of rows


@pytest.fixture(scope="module")
def sequence(native, device, tmp_path_factory):
    config = tiny.Config(n_nextn=1)
    path = tiny.write(tmp_path_factory.mktemp("choosing") / "tiny.gguf", config, tiny.layout(config, seed=1))
    return drive.open_sequence(drive.open_model(native, path, device), n_ctx=64, n_rows=12)


def bits(allowed: np.ndarray) -> bytes:
    return np.packbits(allowed, bitorder="little").tobytes()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=9, top_p=0.9, seed=3)], ids=str)
def test_each_row_of_a_tree_is_chosen_with_its_own_path(native, sequence, sampling):
    rng = np.random.default_rng(4)
    n_vocab = sequence.engine.n_vocab
    prompt = rng.integers(0, n_vocab, 9).tolist()
    penalties = Penalties(1.4, 0.7, 0.3, bias=((5, 1.5), (7, -30.0)))
    sequence.reset()
    sequence.set_sampling(sampling)
    sequence.set_penalties(penalties, len(prompt))
    drive.prefill(sequence, prompt)

    def check(row: int, before: list[int]) -> None:
        logits = penalise(native, sequence.logits(row), penalties, before, len(prompt))
        assert sequence.choose(row) == native.sample(logits, sampling, len(before))
        allowed = rng.random(n_vocab) < 0.1
        allowed[rng.integers(n_vocab)] = True
        masked = np.where(allowed, logits, -np.inf).astype(np.float32)
        assert sequence.choose(row, bits(allowed)) == native.sample(masked, sampling, len(before))
        short = bits(np.arange(8) == 6)  # What the mask does not reach is not allowed.
        assert sequence.choose(row, short) == 6

    check(0, prompt)
    committed = prompt
    for _ in range(3):
        parents = drive.random_tree(rng, 12)
        tokens = rng.integers(0, 12, 12).tolist()
        drive.verify(sequence, tokens, parents)
        for row in range(12):
            check(row, [*committed, *(tokens[at] for at in drive.root_path(parents, row))])
        path = drive.root_path(parents, 11)
        sequence.commit(path)
        committed = [*committed, *(tokens[at] for at in path)]


def test_a_mask_without_a_token_and_a_late_choice_are_refused(sequence):
    sequence.reset()
    drive.prefill(sequence, [1, 2, 3])
    for mask in (b"", b"\0" * 8):
        with pytest.raises(ArgumentError, match="allows no token"):
            sequence.choose(0, mask)
    assert sequence.choose(0, b"\1") == 0, "nothing was done by that"
    drive.verify(sequence, [5])
    with pytest.raises(ArgumentError):
        sequence.choose(1)
    sequence.commit([0])
    with pytest.raises(StateError, match="committed"):  # The token after it is not this row's alone.
        sequence.choose(0)
    drive.verify(sequence, [6])
    sequence.dump()  # This rejects them.
    with pytest.raises(StateError, match="rejected"):
        sequence.choose(0)
    sequence.reset()
    with pytest.raises(StateError):
        sequence.choose(0)


def test_logprobs_are_those_of_the_softmax(sequence):
    sequence.reset()
    sequence.set_sampling(Sampling(0.5, seed=1))  # Log-probabilities do not depend on it.
    drive.prefill(sequence, [1, 2, 3])
    drive.verify(sequence, [5, 6])
    logits = sequence.logits(1).astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    found = sequence.logprobs(1, 9, 4)
    assert [token for token, _ in found.top] == np.argsort(-logits, kind="stable")[:4].tolist()
    wanted = [expected[9], *np.sort(expected)[::-1][:4]]
    np.testing.assert_allclose([found.logprob, *(p for _, p in found.top)], wanted, rtol=1e-12)
    assert sequence.logprobs(0, 0) == Logprobs(sequence.logprobs(0, 0, 1).logprob)
    for token, top in ((-1, 0), (len(logits), 0), (0, len(logits) + 1)):
        with pytest.raises(ArgumentError):
            sequence.logprobs(0, token, top)


# ---- whole generations: drafts change nothing


class Turns:
    """This is a grammar in which token after token has another remainder, until one of `last` ends the
    text."""

    def __init__(self, n_vocab: int, seed: int, last: int):
        self._n, self._rng, self._left = n_vocab, np.random.default_rng(seed), last
        self._allowed: np.ndarray | None = None

    def mask(self) -> bytes:
        self._allowed = self._rng.random(self._n) < 0.5
        return bits(self._allowed)

    def consume(self, token: int) -> None:
        assert self._allowed is not None and self._allowed[token]
        self._left -= 1

    @property
    def is_stopped(self) -> bool:
        return self._left <= 0


@pytest.fixture(scope="module")
def engines(device):
    """Opens a plain engine, then one for each way to draft: chains, trees with blocks, the text's own words.
    """
    ways = {"mtp": {"gamma": 3}, "dflash": {"budget": 12}, "lookup": {"budget": 6}}
    with Files(GGUF, device=device, drafter=DRAFTER) as files, ExitStack() as opened:
        options = [Options(ctx=256, threads=1, spec=spec, **more) for spec, more in ways.items()]
        yield [
            opened.enter_context(Engine.open(files, each))
            for each in (Options(ctx=256, threads=1, spec="off"), *options)
        ]


def outcome(engine: Engine, request: Request) -> tuple[Finished, list[Logprobs]]:
    events = list(engine.generate(request))
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1], [one for event in events if isinstance(event, Tokens) for one in event.logprobs]


@examples(20, suppress_health_check=list(HealthCheck))
@given(
    prompt=st.sampled_from(PROMPTS),
    penalties=PENALTIES,
    sampling=st.sampled_from(
        [Sampling(), Sampling(0.7, 20, 0.95, seed=1), Sampling(1.0, min_p=0.05, seed=2)]
    ),
    turns=st.none() | st.integers(1, 40),
    top=st.sampled_from([None, 0, 3]),
    way=st.integers(1, 3),
)
def test_drafts_change_no_token(engines, prompt, penalties, sampling, turns, top, way):
    """That holds with every mix of penalties, sampling, a grammar and log-probabilities."""
    ids = engines[0].tokenizer.encode(prompt)
    n_vocab = engines[0].model.info.n_vocab
    grammar = (lambda: Turns(n_vocab, 3, turns)) if turns else None
    request = Request(tuple(ids), 32, sampling, (), True, penalties, grammar, top)
    (plain, plain_logprobs), (drafted, logprobs) = (outcome(engines[at], request) for at in (0, way))
    assert (plain.tokens, plain.text, plain.reason) == (drafted.tokens, drafted.text, drafted.reason)
    assert plain.reason == ("stop" if turns and turns <= 32 else "length")
    assert len(plain.tokens) == min(32, turns or 32)
    assert drafted.stats.drafted > 0 or way == 3 or turns == 1
    assert logprobs == plain_logprobs and len(logprobs) == (0 if top is None else len(plain.tokens))


def test_a_grammar_that_raises_ends_its_generation_alone(engines):
    def refuse() -> Turns:
        raise NumericError("no such grammar")

    ids = tuple(engines[1].tokenizer.encode(PROMPTS[0]))
    requests = [Request(ids, 5), Request(ids, 5, grammar=refuse), Request(ids, 5)]
    last = {index: event for index, event in engines[1].run(requests)}
    assert [type(last[index]).__name__ for index in range(3)] == ["Finished", "Failed", "Finished"]
    assert last[0].tokens == last[2].tokens
