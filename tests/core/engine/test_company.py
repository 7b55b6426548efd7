"""Holds tokens to be the same in company: whatever else runs in its engine, a sequence has the logits and
tokens that it has alone, bit for bit.

Hypothesis makes schedules: up to 16 sequences with different prompts and sampling, plain, with chains of
drafts, blocks or trees, are started and stopped at random. Prompts are read between rounds, alone or together,
sequences fork, checkpoints move, calls are cancelled, junk runs beside, rows are NaN, and pages are nearly out.
Scratch is NaN before each draft, verify and prefill, and so are pages and slots that nobody holds. Alone means plain
decoding in an engine with one sequence and no head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import drive
import numpy as np
import pytest
import tiny
import tiny_dflash
import tiny_gemma4
from depth import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from op_run import poison
from split import drafts_apart
from tiny import Config

from luce.convert.gemma4_layout import Config as Gemma4
from luce.errors import Cancelled, NumericError, OutOfMemory, StateError
from luce.native import Checkpoint, Drafts, Engine, Library, Model, Prompt, Rows, Source
from luce.native import Sequence as Timeline
from luce.native.structs import Sampling

CONFIGS = {
    "F32": Config(n_layer=3, recurrent=(True, False, True), n_nextn=1, n_head=4, n_head_kv=2, n_v_head=4),
    "Q4_K": Config(n_layer=2, interval=2, n_embd=256, n_ff=256, n_head=4, n_head_kv=2, n_v_head=4,
                   state_size=64, n_nextn=1),
}  # fmt: skip
CONFIGS |= {f"{kind} experts": tiny.with_experts(c) for kind, c in CONFIGS.items()}
# It has no recurrent state and no drafters, windows over a page and within one, and layers that read others' cells.
GEMMA = Gemma4(sliding=(True, False, True, False), window=270, n_head_kv_swa=1, n_shared_kv=2, n_embd_per_layer=32,
                n_expert=4, n_expert_used=2, n_ff_expert=64, tied=False)  # fmt: skip
APART = " apart"  # Such a model has what drafts on a device of its own.
SEED = 71
BAD = 7  # This token's row is NaN.
N_VOCAB = 384
N_TOKENS = 20  # Each text has so many.
N_SEQUENCES, N_PAGES, N_CHECKPOINTS, MAX_ROWS = 16, 20, 3, 64
N_ROWS = 16  # A sequence has so many rows in a step. A text of nearly N_TOKENS gets as many at once.
BLOCK = 5  # A DFlash drafter's block has so many rows.
MODES: tuple[str | int, ...] = ("plain", 1, 2, 3, 5, 8, "tree", "wide tree", "block")
UNDRAFTED = ("plain", "tree", "wide tree")  # Nothing is drafted on the device.
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, top_k=20, seed=5),
    Sampling(temperature=1.2, top_k=60, top_p=0.9, min_p=0.02, seed=2**63),
)


def junk(n: int, seed: int) -> list[int]:
    tokens = np.random.default_rng(seed).integers(0, N_VOCAB, n)
    return [int(t) for t in np.where(tokens == BAD, BAD + 1, tokens)]


LONG = junk(600, seed=1)  # Its parts are prompts that share their first chunks.
PROMPTS = [junk(1, 2), junk(2, 3), junk(5, 4), junk(17, 5), junk(40, 6), junk(3, 7), junk(255, 8), LONG[:256],
           LONG[:257], LONG[:300], LONG[:511], LONG[:513]]  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A text is its tokens after the prompt, and the logits that chose each."""

    tokens: list[int]
    logits: list[np.ndarray]


@dataclass(repr=False)  # hypothesis spells the arguments of each example, and these are megabytes.
class Bench:
    """This is a model and what its sequences write alone."""

    model: Model
    poisons: bool  # Then BAD is a row of NaN, which no quantised type can hold.
    engine: Engine
    lone: Timeline
    modes: tuple[str | int, ...] = MODES
    texts: dict[tuple[int, int], Text] = field(default_factory=dict)

    def text(self, prompt: int, sampling: int) -> Text:
        if (prompt, sampling) not in self.texts:
            self.lone.set_sampling(SAMPLINGS[sampling])
            made = drive.decode(self.lone, PROMPTS[prompt], N_TOKENS + N_ROWS, logits=True)
            self.texts[prompt, sampling] = Text(made.tokens, made.logits)
        return self.texts[prompt, sampling]


@pytest.fixture(scope="module")
def bench_of(
    native: Library, device: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Bench]:
    """Gives bench_of(a key of CONFIGS, kv_type), made once: examples before have used its slots and pages."""
    folder = tmp_path_factory.mktemp("company")

    @cache
    def make(kind: str, kv_type: str) -> Bench:
        type_name = kind.split()[0]
        sizes = {"n_ctx": 640, "n_chunk": 256, "kv_type": kv_type}
        many = {"n_sequences": N_SEQUENCES, "n_pages": N_PAGES, "n_checkpoints": N_CHECKPOINTS}
        if kind.endswith("gemma4"):
            weights = tiny_gemma4.layout(GEMMA, SEED)
            weights["token_embd.weight"][BAD] = np.nan if type_name == "F32" else 0
            weights["output.weight"][BAD] = 0
            path = tiny_gemma4.write(folder / f"{kind}.gguf", GEMMA, weights, type_name, quantize=native.quantize)
            several = "," in device
            if several and not device.startswith("cpu"):
                pytest.skip("GPUs do not read each other's cells, and all of its layers read those of others")
            model = drive.open_model(native, path, device, layers=(2, 2) if several else ())
            engine = drive.open_engine(model, n_rows=N_ROWS, **many, **sizes)
            lone = drive.open_sequence(model, n_rows=1, **sizes)
            return Bench(model, type_name == "F32", engine, lone, UNDRAFTED)
        c = CONFIGS[kind.removesuffix(APART)]
        weights = tiny.layout(c, SEED)
        weights["token_embd.weight"][BAD] = np.nan if type_name == "F32" else 0
        weights["output.weight"][BAD] = 0  # It is never among the largest, so nothing chooses or drafts it.
        path = tiny.write(folder / f"{kind}.gguf", c, weights, type_name, quantize=native.quantize)
        blocks = tiny_dflash.drafter(c, n_layer=1, block_size=BLOCK, target_layer_ids=(0, c.n_layer - 1))
        case = tiny_dflash.Case(c, blocks, SEED)
        drafter = tiny_dflash.write(folder / f"{kind}-dflash.gguf", case, tiny_dflash.weights(case))
        where, drafts = drafts_apart(device) if kind.endswith(APART) else (device, None)
        model = drive.open_model(native, path, where, head=True, drafter=drafter, draft_device=drafts)
        plain = drive.open_model(native, path, device)
        engine = drive.open_engine(model, n_rows=N_ROWS, n_draft=8, blocks=1, **many, **sizes)
        lone = drive.open_sequence(plain, n_rows=1, **sizes)
        return Bench(model, type_name == "F32", engine, lone)

    return make


class Runner:
    """This is one sequence on its way through its prompt and its text."""

    def __init__(self, bench: Bench, sequence: Timeline, prompt: int, sampling: int, mode: str | int):
        self.bench, self.sequence, self.prompt, self.mode = bench, sequence, PROMPTS[prompt], mode
        self.text = bench.text(prompt, sampling)
        self.tokens: list[int] = []
        sequence.set_sampling(SAMPLINGS[sampling])

    @property
    def reading(self) -> bool:
        return not self.tokens

    def check(self, token: int, row: int) -> None:
        """Compares a token and the row of logits that chose it with those of the text alone."""
        at = len(self.tokens)
        self.tokens.append(token)
        found, expected = self.sequence.logits(row), self.text.logits[at]
        worst = np.abs(found - expected).max()
        assert found.tobytes() == expected.tobytes(), f"token {at}: logits differ by {worst}"
        assert token == self.text.tokens[at]

    @property
    def chunk(self) -> Prompt:
        done = self.sequence.info.n_past
        end = min(done + 256 - done % 256, len(self.prompt))
        return Prompt(self.sequence, self.prompt[done:end], last=end == len(self.prompt))

    def prefill(self) -> None:
        read([self])

    def candidates(self, rng: np.random.Generator, most: int) -> tuple[list[int], list[int]]:
        """Makes a tree of junk after the anchor, which may hold the true continuation and near misses of it.
        """
        n = int(rng.integers(1, most + 1)) if self.mode == "tree" else most
        parents, tokens = drive.random_tree(rng, n), junk(n, int(rng.integers(1 << 30)))
        tokens[0] = self.tokens[-1]
        following, row = self.text.tokens[len(self.tokens) :], 0
        while following and rng.random() < 0.8:
            children = [child for child in range(row + 1, n) if parents[child] == row]
            if not children:
                break
            row = int(rng.choice(children))
            tokens[row] = following.pop(0)
        return tokens, parents


def read(runners: Sequence[Runner]) -> None:
    """Reads the next chunks of their prompts in one call."""
    choices = runners[0].sequence.engine.prefill([runner.chunk for runner in runners])
    for runner, choice in zip(runners, choices, strict=True):
        if choice is not None:
            assert not isinstance(choice, NumericError)
            runner.check(choice, 0)


class Junk:
    """This is a sequence that decodes what nobody checks, beside the others."""

    def __init__(self, sequence: Timeline):
        self.sequence = sequence


class Company:
    """These are the schedule's hands: each operation takes a number, from which it makes its choices."""

    def __init__(self, bench: Bench):
        self.bench, self.engine = bench, bench.engine
        self.runners: list[Runner] = []
        self.junk: list[Junk] = []
        self.checkpoints: list[Checkpoint] = []

    def run(self, schedule: Sequence[tuple[str, int]]) -> None:
        try:
            for name, number in schedule:
                getattr(self, name)(np.random.default_rng(number))
            for _ in range(6 * N_TOKENS):  # It goes to the end of all texts, if there are pages enough.
                if not self.runners:
                    break
                self.prefill(np.random.default_rng(1))
                self.round(np.random.default_rng(len(self.runners)), everyone=True)
        finally:
            for each in [*self.runners, *self.junk]:
                each.sequence.close()
            for checkpoint in self.checkpoints:
                checkpoint.close()
        info = self.engine.info
        left = info.pages_free, info.sequences_free, info.checkpoints_free
        assert left == (N_PAGES, N_SEQUENCES, N_CHECKPOINTS)

    # ---- what holds for every call

    def infos(self) -> list[object]:
        return [self.engine.info, *(each.sequence.info for each in [*self.runners, *self.junk])]

    def attempt(self, call: Callable[[], object], rng: np.random.Generator) -> bool:
        """Says whether there was memory for it; else nothing was done, and something is given up for later.
        """
        before = self.infos()
        try:
            call()
            return True
        except OutOfMemory:
            assert self.infos() == before
        if self.checkpoints and rng.random() < 0.7:
            self.checkpoints.pop(0).close()
        elif self.junk:
            self.junk.pop().sequence.close()
        elif self.runners:
            self.close(self.runners[int(rng.integers(len(self.runners)))])
        return False

    def close(self, runner: Runner) -> None:
        self.runners.remove(runner)
        runner.sequence.close()

    # ---- operations

    def start(self, rng: np.random.Generator) -> None:
        if len(self.runners) + len(self.junk) == N_SEQUENCES:
            with pytest.raises(OutOfMemory):
                self.engine.sequence()
            return
        if rng.random() < 0.2:
            one = Junk(self.engine.sequence())
            self.junk.append(one)
            self.attempt(lambda: one.sequence.prefill(junk(int(rng.integers(1, 256)), 9)), rng)
            return
        prompt = int(rng.integers(len(PROMPTS)))
        self.add(prompt if rng.random() < 0.5 else prompt % 6, rng)

    def add(self, prompt: int, rng: np.random.Generator) -> Runner:
        modes = self.bench.modes
        sampling, mode = int(rng.integers(len(SAMPLINGS))), modes[int(rng.integers(len(modes)))]
        runner = Runner(self.bench, self.engine.sequence(), prompt, sampling, mode)
        self.runners.append(runner)
        return runner

    def stop(self, rng: np.random.Generator) -> None:
        everyone = [*self.runners, *self.junk]
        if everyone:
            one = everyone[int(rng.integers(len(everyone)))]
            self.close(one) if isinstance(one, Runner) else (self.junk.remove(one), one.sequence.close())

    def restart(self, rng: np.random.Generator) -> None:
        if self.runners:
            runner = self.runners[int(rng.integers(len(self.runners)))]
            runner.sequence.reset()
            runner.tokens = []

    def prefill(self, rng: np.random.Generator) -> None:
        reading = [runner for runner in self.runners if runner.reading]
        if reading:
            poison(self.engine)
            some = rng.permutation(np.array(reading, object))[: int(rng.integers(1, len(reading) + 1))]
            self.attempt(lambda: read(list(some)), rng)

    def keep(self, rng: np.random.Generator) -> None:
        """Takes a checkpoint of a sequence that is at the end of a chunk; of a new one, if there is none."""
        ends = [one for one in self.runners if one.reading and one.sequence.info.n_past in (256, 512)]
        if not ends and len(self.runners) + len(self.junk) < N_SEQUENCES:
            one = self.add(int(rng.integers(PROMPTS.index(LONG[:257]), len(PROMPTS))), rng)
            ends = [one] if self.attempt(one.prefill, rng) else []
        if ends:
            one = ends[int(rng.integers(len(ends)))]
            if self.engine.info.checkpoints_free:
                self.checkpoints.append(one.sequence.checkpoint())
            else:
                with pytest.raises(OutOfMemory):
                    one.sequence.checkpoint()

    def fork(self, rng: np.random.Generator) -> None:
        """Lets a new sequence, or one that runs, go on from a checkpoint of its prompt."""
        if not self.checkpoints:
            return
        checkpoint = self.checkpoints[int(rng.integers(len(self.checkpoints)))]
        n = checkpoint.info.n_past
        fitting = [
            at for at, prompt in enumerate(PROMPTS) if prompt[:n] == checkpoint.tokens and len(prompt) > n
        ]
        running = [one for one in self.runners if one.prompt[:n] == checkpoint.tokens and len(one.prompt) > n]
        if running and rng.random() < 0.4:
            runner = running[int(rng.integers(len(running)))]
        elif len(self.runners) + len(self.junk) < N_SEQUENCES:
            runner = self.add(fitting[int(rng.integers(len(fitting)))], rng)
        else:
            return

        def resume() -> None:
            runner.sequence.resume(checkpoint)
            runner.tokens = []

        self.attempt(resume, rng)

    def move(self, rng: np.random.Generator) -> None:
        """Lets a checkpoint travel, or end."""
        if not self.checkpoints:
            return
        at = int(rng.integers(len(self.checkpoints)))
        checkpoint = self.checkpoints[at]
        how = int(rng.integers(5))
        if how == 0:
            self.attempt(checkpoint.to_device, rng)
        elif how == 1:
            self.checkpoints[at] = self.engine.load_checkpoint(checkpoint.save())
            checkpoint.close()
        elif how == 2:
            del self.checkpoints[at]
            checkpoint.close()
        else:
            checkpoint.to_host()

    def cancel(self, rng: np.random.Generator) -> None:
        """Cancels, so that the next call does nothing at all."""
        if self.runners:
            runner, before = self.runners[int(rng.integers(len(self.runners)))], self.infos()
            self.engine.cancel()
            with pytest.raises(Cancelled):
                drive.verify(runner.sequence, [1]) if rng.random() < 0.5 else runner.sequence.prefill([1])
            assert self.infos() == before

    def round(self, rng: np.random.Generator, everyone: bool = False) -> None:
        """Runs a draft and a verify of some of those that decode, in one step."""
        self.one_round(rng, everyone, bad=None)

    def nan(self, rng: np.random.Generator) -> None:
        """Does the same, with a row of NaN in one of the sequences, which alone fails."""
        if self.runners:
            self.one_round(rng, False, bad=self.runners[int(rng.integers(len(self.runners)))])

    def one_round(self, rng: np.random.Generator, everyone: bool, bad: Runner | None) -> None:
        items: list[tuple[Runner | Junk, Rows]] = []
        drafts: list[Drafts] = []
        for one in rng.permutation(np.array([*self.runners, *self.junk], object)):
            room = MAX_ROWS - sum(rows.n or len(rows.tokens or ()) for _, rows in items)
            if room < 16 or not (everyone or rng.random() < 0.6):
                continue
            if one is bad:
                tokens = junk(int(rng.integers(1, 9)), 1)
                tokens[int(rng.integers(len(tokens)))] = BAD
                items.append((one, Rows(one.sequence, tokens)))
            elif isinstance(one, Junk):
                n = int(rng.integers(1, 17))
                items.append((one, Rows(one.sequence, junk(n, n), drive.random_tree(rng, n))))
            elif one.reading:
                continue
            elif isinstance(one.mode, int) or one.mode == "block":
                most, source = (BLOCK - 1, Source.DFLASH) if one.mode == "block" else (one.mode, Source.NEXTN)
                drafts.append(Drafts(one.sequence, one.tokens[-1], most, source))
                n = most if rng.random() < 0.8 else int(rng.integers(most + 1))
                items.append((one, Rows(one.sequence, n=n + 1)))
            elif one.mode == "plain":
                items.append((one, Rows(one.sequence, one.tokens[-1:])))
            else:
                items.append((one, Rows(one.sequence, *one.candidates(rng, 16))))
        poison(self.engine)
        for source in (Source.NEXTN, Source.DFLASH):
            some = [each for each in drafts if each.source == source]
            if some and not self.attempt(lambda some=some: self.engine.draft(some), rng):
                return
        if not items:
            return
        poison(self.engine)
        results: list[list[int] | NumericError] = []
        if self.attempt(lambda: results.extend(self.engine.verify([rows for _, rows in items])), rng):
            done = [(one, rows, result) for (one, rows), result in zip(items, results, strict=True)]
            for one, _, result in done:
                assert isinstance(result, NumericError) == (one is bad and self.bench.poisons)
            self.commit(done, bad, rng)

    def commit(
        self,
        done: list[tuple[Runner | Junk, Rows, list[int] | NumericError]],
        bad: Runner | None,
        rng: np.random.Generator,
    ) -> None:
        for one, rows, result in done:
            if one is bad:
                self.heal(one, rng)
            elif isinstance(one, Junk):
                parents = rows.parents
                assert parents is not None
                if rng.random() < 0.8 and one.sequence.info.n_past < 560:
                    one.sequence.commit(drive.root_path([*parents], int(rng.integers(len(parents)))))
            elif rng.random() < 0.9:  # Else the rows are rejected, and the round is tried again.
                assert isinstance(one, Runner) and isinstance(result, list)
                tokens = rows.tokens
                if tokens is None:
                    tokens = [one.tokens[-1], *one.sequence.drafted(max(rows.n - 1, 1))[: rows.n - 1]]
                path, following = one.sequence.accept(tokens, rows.parents, result)
                for row in path:
                    one.check(result[row], row)
                assert one.tokens[-1] == following
                one.sequence.commit(path)
                if len(one.tokens) >= N_TOKENS:
                    self.close(one)

    def heal(self, runner: Runner, rng: np.random.Generator) -> None:
        """Sees what has failed refuse to go on, and resets it, or closes it with the NaN in its slot and
        pages."""
        if runner.sequence.info.failed:
            with pytest.raises(StateError):
                runner.sequence.prefill([1])
        if rng.random() < 0.5:
            runner.sequence.reset()
            runner.tokens = []
        else:
            self.close(runner)


OPERATIONS = ["start"] * 4 + ["prefill"] * 4 + ["round"] * 7 + ["keep"] * 2 + ["fork"] * 3 + ["move"] * 2
OPERATIONS += ["stop", "restart", "cancel", "nan"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "kv_type"),
    [("F32", "f32"), ("Q4_K", "q8_0"), ("Q4_K", "f16"), ("F32 experts", "f32"), ("Q4_K experts", "f16"),
     ("F32 gemma4", "f32"), ("Q8_0 gemma4", "f16"), (f"F32{APART}", "f32")],
)
@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    schedule=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2**32 - 1)), min_size=40, max_size=120
    )
)
def test_same_tokens_in_company(
    kind: str, kv_type: str, bench_of: Callable[[str, str], Bench], schedule: list[tuple[str, int]]
) -> None:
    Company(bench_of(kind, kv_type)).run(schedule)
