"""Same tokens, whoever drafts: every source, size and mixture of them over the real core, alone and in
company of up to 8, at context edges, resumed and cancelled. Plain decoding with the same engine is what they
are held to: its tokens, and its committed state byte for byte."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import drive
import numpy as np
import pytest
import tiny
import tiny_dflash
from depth import deeper, deeper_but, examples
from fake_core import TOKENIZER
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from luce.decode.events import Finished, Warned
from luce.decode.generation import Generation
from luce.decode.loop import Loop
from luce.decode.request import Request
from luce.native import Form, Source
from luce.native.structs import Cost, Sampling
from luce.speculate.auto import Auto
from luce.speculate.drafting import NOTHING, Draft, Drafter, Fixed, TextLookup
from luce.speculate.prices import Costs

N_CTX, N_CHUNK, MOST = 300, 256, 40
CASE = tiny_dflash.Case(
    tiny.Config(n_nextn=1), tiny_dflash.drafter(tiny.Config(), n_layer=2, target_layer_ids=(0, 2)), 5
)
COSTS = [
    Costs(Cost(*each) for each in verifies + drafts)
    for verifies, drafts in (  # By the first, all is worth a try.
        ([(1, 0, 1.0), (64, 0, 1.5)], [(1, 1, 0.02), (1, 2, 0.05), (1, 3, 0.01)]),
        ([(1, 0, 1.0), (2, 0, 1.2), (16, 0, 4.0)], [(1, 1, 0.1), (1, 2, 0.2), (1, 3, 0.05)]),
    )
]
FILTERS = [{}, {"top_k": 20}, {"top_p": 0.95}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.95, "min_p": 0.05}]
SAMPLINGS = [
    Sampling(),
    *(
        Sampling(temperature, seed=2**64 - 1 - at, **filters)
        for temperature in (0.7, 1.0, 1.5)
        for at, filters in enumerate(FILTERS)
    ),
]
RNG = np.random.default_rng(8)
PROMPTS = [
    (1, 2, 3),
    tuple(range(10, 22)) * 3,  # A lookup finds something from the start.
    tuple(int(t) for t in RNG.integers(0, 250, 60)),
    # It is longer than a chunk, with 280 of 300 positions.
    tuple(int(t) for t in RNG.integers(0, 250, 20)) * 14,
]


class Told:
    """Proposes the true continuation as far as it is told to, and junk beside and behind it."""

    name = "told"

    def __init__(self, text, seed, tree):
        self.text, self.tree, self.rng = text, tree, np.random.default_rng(seed)
        self.done = 1

    def begin(self, budget):
        pass

    def draft(self, anchor, limits):
        n = int(self.rng.integers(0, limits.candidates + 1)) + 1
        parents = drive.random_tree(self.rng, n) if self.tree else [row - 1 for row in range(n)]
        tokens, row = [anchor, *(int(t) for t in self.rng.integers(0, 384, n - 1))], 0
        depths = [0] * n
        for at in range(1, n):
            depths[at] = depths[parents[at]] + 1
        fitting = next((at for at in range(n) if depths[at] > limits.depth), n)
        tokens, parents = tokens[:fitting], parents[:fitting]
        for right in self.text[self.done :]:
            children = [at for at in range(row + 1, len(parents)) if parents[at] == row]
            if not children or self.rng.random() > 0.8:
                break
            row = int(self.rng.choice(children))
            tokens[row] = right
        return Draft(tuple(tokens[1:]), tuple(parents))

    def follows(self):
        return NOTHING if self.rng.random() < 0.5 else None

    def learn(self, done):
        self.done += len(done.tokens)

    def propose(self, anchor, limits):
        pass


class Always:
    """Drafts a chain that is always wrong, always right, random, or right but slow."""

    name = "always"

    def __init__(self, text, how):
        self.text, self.how, self.rng, self.done = text, how, np.random.default_rng(1), 1

    def begin(self, budget):
        pass

    def draft(self, anchor, limits):
        right = self.text[self.done : self.done + min(limits.candidates, limits.depth, 7)]
        if self.how == "slow":
            time.sleep(0.002)
        if self.how == "wrong":
            right = [(token + 1) % 384 for token in right]
        if self.how == "random":
            right = [int(token) for token in self.rng.integers(0, 384, len(right))]
        return Draft(tuple(right))

    def follows(self):
        return None

    def learn(self, done):
        self.done += len(done.tokens)

    def propose(self, anchor, limits):
        pass


class Bad:
    """Fails in its own way after a few rounds."""

    name = "bad"

    def __init__(self, draft, after):
        self._draft, self._left = draft, after

    def begin(self, budget):
        pass

    def draft(self, anchor, limits):
        self._left -= 1
        if self._left >= 0:
            return Draft()
        if isinstance(self._draft, Exception):
            raise self._draft
        return self._draft

    def follows(self):
        if self._left <= 0 and isinstance(self._draft, AttributeError):
            raise self._draft
        return None if self._left % 2 else NOTHING

    def learn(self, done):
        pass

    def propose(self, anchor, limits):
        pass


BAD = [RuntimeError("broken"), Draft((10**6,)), Draft((-1,)), Draft((2**40,)), Draft((1,) * 400),
       Draft((1, 2), (-1, 0, 5)), Draft(on_device=99), AttributeError("no such answer")]  # fmt: skip


def source_of(kind, size, number, sequence, text):
    """Makes a source of a kind, of a size 1..63."""
    nextn = Drafter(sequence, Source.NEXTN, 8, 63)
    block = Drafter(sequence, Source.DFLASH, 15, 63, form=Form.INDEPENDENT)
    part = Drafter(sequence, Source.PART, 8, 63, 128)
    match kind:
        case "mtp":
            return Fixed(nextn, 1 + size % 8)
        case "mtp-part":
            return Fixed(part, 1 + size % 8, size if number % 2 else None)
        case "mtp-tree":
            return Fixed(nextn, 1 + number % 8, size)
        case "dflash":
            return Fixed(block, min(size, 15))
        case "dflash-tree":
            return Fixed(block, 15, size)
        case "lookup":
            return TextLookup(sequence, size)
        case "auto":
            drafters = [[], [nextn], [nextn, part], [block], [nextn, part, block]][number % 5]
            return Auto(COSTS[number % 2], size).source(sequence, drafters)
        case "chain" | "tree":
            return Told(text, number, kind == "tree")
        case "wrong" | "right" | "random" | "slow":
            return Always(text, kind)
        case "bad":
            return Bad(BAD[number % len(BAD)], size % 4)
    return None


# At most this share of a source's drafts is accepted.
ALWAYS = {"wrong": 0, "random": 0.1, "right": 1, "slow": 1}
KINDS = [
    "mtp",
    "mtp-part",
    "mtp-tree",
    "dflash",
    "dflash-tree",
    "lookup",
    "auto",
    "auto",
    "chain",
    "tree",
    "bad",
    "plain",
]


@dataclass
class Bench:
    """This is an engine, and what its sequences write plain."""

    engine: object
    texts: dict = field(default_factory=dict)

    def plain(self, prompt, sampling):
        """Returns (tokens, committed bytes after each of them)."""
        if (prompt, sampling) not in self.texts:
            request = Request(PROMPTS[prompt], MOST, SAMPLINGS[sampling], ignore_eos=True)
            ahead, self.engine.ahead = self.engine.ahead, False  # A dump rejects rows of a step under way.
            with self.engine.sequence() as sequence:
                one = Generation(sequence, self.engine.info, TOKENIZER, request)
                states, loop = {}, Loop(self.engine)
                close, sequence.close = sequence.close, lambda: None
                loop.add(one)
                while loop.running:
                    for _, event in loop.step():
                        last = event
                    states[sequence.info.n_past] = sequence.dump()
                close()
            self.engine.ahead = ahead
            self.texts[prompt, sampling] = last.tokens, states
        return self.texts[prompt, sampling]


class Kept:
    """This is a checkpoint of the first chunk of the one prompt that has one."""

    def __init__(self):
        self.checkpoint = None

    def resume(self, sequence, prompt):
        if self.checkpoint is None or list(prompt[:N_CHUNK]) != self.checkpoint.tokens:
            sequence.reset()
            return 0
        sequence.resume(self.checkpoint)
        return N_CHUNK

    def again(self, sequence):
        return 0

    def ends(self, sequence):
        return range(N_CHUNK, 10 * N_CHUNK, N_CHUNK)

    def reached(self, sequence):
        self.checkpoint = self.checkpoint or sequence.checkpoint()


@pytest.fixture(scope="module")
def bench(native, device, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    weights = tiny.layout(CASE.target, CASE.seed)
    weights["output.weight"][4:] = 0  # Texts have few tokens, so that all sources are right now and then.
    target = tiny.write(folder / "target.gguf", CASE.target, weights)
    drafter = tiny_dflash.write(folder / "drafter.gguf", CASE, tiny_dflash.weights(CASE))
    model = drive.open_model(native, target, device, head=True, drafter=drafter)
    return Bench(drive.open_engine(
        model, n_ctx=N_CTX, n_chunk=N_CHUNK, n_sequences=8, n_checkpoints=1, n_rows=64, n_draft=8, blocks=1,
        n_top=63, n_part=128,
    ))  # fmt: skip


def check(bench, event, state, prompt, sampling):
    """Compares the end of a generation, and what it has committed, with plain decoding."""
    tokens, plain_states = bench.plain(prompt, sampling)
    assert isinstance(event, Finished), event
    if event.reason != "cancelled":
        assert len(event.tokens) == len(tokens)
    n_past, dump = state
    assert event.tokens == tokens[: len(event.tokens)]
    assert n_past in plain_states or event.reason == "cancelled"
    assert dump == plain_states.get(n_past, dump)


def same_in_company(bench, company, kept, ahead, of="accepted"):
    """Runs (kind, size, number, prompt, sampling, turns until it is cancelled) together, and holds each to
    its plain text: accepted candidates by source, or drafted ones. `ahead` says whether rounds may be begun
    before the last ones have ended, as a GPU's engine does."""
    for _, _, _, prompt, sampling, _ in company:
        bench.plain(prompt, sampling)
    usual, bench.engine.ahead = bench.engine.ahead, ahead
    try:
        return _same_in_company(bench, company, kept, of)
    finally:
        bench.engine.ahead = usual


def _same_in_company(bench, company, kept, of):
    prefixes, loop, last, warned, running = (Kept() if kept else None), Loop(bench.engine), {}, {}, {}
    cancels, states = {}, {}
    for kind, size, number, prompt, sampling, cancelled in company:
        tokens, _ = bench.plain(prompt, sampling)
        sequence = bench.engine.sequence()
        request = Request(PROMPTS[prompt], MOST, SAMPLINGS[sampling], ignore_eos=True)
        source = source_of(kind, size, number, sequence, tokens)
        one = Generation(sequence, bench.engine.info, TOKENIZER, request, source, prefixes=prefixes)
        running[one], warned[one], cancels[one] = (kind, prompt, sampling), [], cancelled

        def end(one=one, sequence=sequence, close=sequence.close):
            states[one] = sequence.info.n_past, sequence.dump()
            close()

        sequence.close = end
        loop.add(one)
    for turn in range(2000):
        for one, event in loop.step():
            last[one] = event
            warned[one] += [event.message] if isinstance(event, Warned) else []
        loop.keep()
        for one, cancelled in cancels.items():
            if cancelled == turn and not one.over:
                one.cancelled = lambda: True
        if not loop.running:
            break
    if prefixes and prefixes.checkpoint:
        prefixes.checkpoint.close()
    for one, (kind, prompt, sampling) in running.items():
        failed = kind == "bad" and (cancels[one] is None or len(warned[one]) > 0)
        assert len(warned[one]) == failed, warned[one]
        check(bench, last[one], states[one], prompt, sampling)
    accepted = Counter()
    for event in last.values():
        accepted.update({name: counts[of] for name, counts in event.stats.by_source.items()})
    return accepted


@pytest.mark.long
@examples(20, suppress_health_check=list(HealthCheck))
@given(
    company=st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.integers(1, 63),
            st.integers(0, 2**20),
            st.integers(0, len(PROMPTS) - 1),
            st.integers(0, len(SAMPLINGS) - 1),
            st.one_of(st.none(), st.integers(1, 12)),  # It is cancelled after so many turns.
        ),
        min_size=4,
        max_size=8,
    ),
    kept=st.booleans(),
    ahead=st.booleans(),
)
def test_mixtures_give_the_tokens_and_bytes_of_plain_decoding(bench, company, kept, ahead):
    same_in_company(bench, company, kept, ahead)


@pytest.mark.parametrize("ahead", [*deeper(False), True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("kind", sorted(set(KINDS)))
def test_every_source_gives_the_tokens_and_bytes_of_plain_decoding(bench, kind, ahead):
    """Eight run at once, and some of what each source proposes is accepted."""
    sizes = [1, 3, 8, 15, 22, 40, 63, 16]
    company = [(kind, size, at, at % 4, (0, 1)[at > 3], None) for at, size in enumerate(sizes)]
    accepted = same_in_company(bench, company, True, ahead)
    assert sum(accepted.values()) > 0 or kind in ("plain", "bad")


@pytest.mark.parametrize("kind", ["dflash-tree", *deeper("mtp-tree"), "auto"])
@pytest.mark.parametrize("first", deeper_but(range(1, 64, 8), 17))
def test_every_budget_at_every_temperature_gives_the_tokens_of_plain_decoding(bench, first, kind):
    """Budgets 1 to 63 of trees of blocks, combs and auto, eight at once, each sampled in another way."""
    company = [
        (kind, size, size, size % 2, (size + first // 8) % len(SAMPLINGS), None)
        for size in range(first, min(first + 8, 64))
    ]
    assert sum(same_in_company(bench, company, False, first // 8 % 2 == 1).values()) > 0


@pytest.mark.parametrize("how", ALWAYS)
def test_sources_that_are_always_wrong_right_random_or_slow_change_no_token(bench, how):
    company = [(how, 0, 0, at % 4, at % 5, None) for at in range(5)]
    counts = same_in_company(bench, company, False, True, of="drafted")
    accepted = same_in_company(bench, company, False, False)
    assert counts["always"] > 100
    assert accepted["always"] <= ALWAYS[how] * counts["always"]
    assert ALWAYS[how] < 1 or accepted == counts
