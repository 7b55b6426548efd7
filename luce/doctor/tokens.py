"""The same tokens, on a model: a row's bits at any width, in a tree and beside others; and a request's tokens with
every source of drafts, with requests together, from checkpoints and behind kept prompts.

Where bits can be had they are compared, else tokens. Each check has so many seconds and does what it can in them; what
was compared is in its line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from luce import native as _native
from luce.bench.run import Case, Mode, Settings, mode_plan
from luce.decode.engine import Engine
from luce.decode.events import Event, Failed, Finished
from luce.decode.request import Request
from luce.doctor.checks import REPORT, Check, judged
from luce.errors import Cancelled
from luce.native import Model, Rows
from luce.native import Sequence as Timeline
from luce.native.structs import PAGE, EngineParams, Sampling
from luce.planning.opened import Files
from luce.planning.plan import Options
from luce.prompts.cache import PrefixCache
from luce.speculate.prices import MAX_ROWS

SAMPLED = Sampling(0.8, 0, 0.95, 0.0, 7)  # Half of the runs are sampled so, the others are greedy.
LEAST_TOKENS = 8  # A run that is compared has at least so many.
APART = 0.5  # By so much of their spread logits of one prompt may differ: roundings differ, and experts may change.
HOST_BYTES = 1 << 30  # For kept prompts.


@dataclass
class Pace:
    """How long a check may take, on a clock. `cancelled` ends it sooner."""

    seconds: float
    cancelled: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.perf_counter
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def fits(self, seconds: float = 0.0) -> bool:
        """Says whether so much more fits. Raises Cancelled where all is to end."""
        if self.cancelled():
            raise Cancelled("interrupted")
        return self.clock() - self.began + seconds < self.seconds


@dataclass
class Compared:
    """Pairs of runs, and the first of them that differ, in words. A run's tokens count up to its first difference."""

    runs: int = 0
    tokens: int = 0
    differ: list[str] = field(default_factory=list)
    drafts: dict[str, list[int]] = field(default_factory=dict)  # By mode: how many were drafted, and accepted.

    def compare(self, what: str, found: Sequence[int], expected: Sequence[int]) -> None:
        at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
        if at is None and len(found) != len(expected):
            at = min(len(found), len(expected))
        self.runs += 1
        self.tokens += len(expected) if at is None else at + 1
        if at is not None:
            own, other = ([*side, None][at] if at <= len(side) else None for side in (found, expected))
            self.differ.append(f"{what}: token {at} is {own}, not {other}")

    def count(self, mode: Mode, done: Finished) -> None:
        """Counts the drafts of a run of a mode that drafts."""
        if mode.spec != "off":
            drafted, accepted = self.drafts.get(mode.name, (0, 0))
            self.drafts[mode.name] = [drafted + done.stats.drafted, accepted + done.stats.accepted]

    def check(self, group: str, name: str, of: str) -> Check:
        """Returns the check of all pairs; skipped where there were none. A mode that drafted nothing showed nothing, so
        it is named."""
        figures: dict[str, object] = {
            "runs": self.runs, "differ": len(self.differ), "tokens": self.tokens, "differing": self.differ,
            "drafts": self.drafts,
        }  # fmt: skip
        if not self.runs:
            return Check(group, name, "skipped", f"{of}: no time for it", figures=figures)
        said = f"{len(self.differ)} of {self.runs} runs {of} differ"
        said += f": {self.differ[0]}" if self.differ else f" ({self.tokens} tokens)"
        idle = [mode for mode, (drafted, _) in self.drafts.items() if not drafted]
        said += f", nothing drafted by {', '.join(idle)}" if idle else ""
        return judged(group, name, not self.differ, said, "the tokens of plain decoding", REPORT, **figures)


# ---- bits of rows


def text_of(line: Timeline, prompt: Sequence[int], n: int, pace: Pace) -> tuple[list[int], list[np.ndarray]]:
    """Decodes plainly for half of the time at most. Returns the n + 1 tokens after the prompt, and the logits after
    each but the last: (V,) each."""
    line.reset()
    tokens, logits = [_choice(line, prompt)], list[np.ndarray]()
    while len(logits) < n and (len(logits) < LEAST_TOKENS or pace.fits(pace.seconds / 2)):
        choices = verify(line, Rows(line, tokens[-1:]))
        logits.append(line.logits(0))
        line.commit([0])
        tokens += choices
    return tokens, logits


def by_width(engine: _native.Engine, prompt: Sequence[int], pace: Pace) -> Iterator[Check]:
    """Yields whether rows have the bits of plain decoding in steps of 1 to 64 rows, in a tree, beside other
    sequences, and behind steps of which a part was accepted; and whether samples are those of the sampling rule."""
    most = min(MAX_ROWS, engine.info.n_rows)
    with ExitStack() as opened:
        plain, line = (opened.enter_context(engine.sequence()) for _ in range(2))
        tokens, logits = text_of(plain, prompt, most, pace)
        filled = [*tokens, *(list(prompt) * most)][:most]  # Rows behind those that are known hold anything.
        line.prefill(prompt)
        tried, differ = 0, list[str]()
        # Powers of two begin, but for one row.
        for width in sorted(range(1, most + 1), key=lambda n: (n & (n - 1) != 0, n == 1, n)):
            if tried and not pace.fits():
                break
            choices = verify(line, Rows(line, filled[:width]))
            rows = range(min(width, len(logits)))
            differ += _differing(f"{width} rows", line, rows, choices, logits, tokens)
            tried += 1
        widths = f"widths 1 to {most}" if tried == most else f"{tried} of the widths 1 to {most}"
        yield _of_steps("widths", f"bits are equal at {widths}", tried, differ, len(logits))
        yield _in_a_tree(line, filled, tokens, logits)
        yield _beside_others(engine, line, opened, prompt, filled, tokens, logits)
        yield _sampled(line, filled, prompt)
        yield _behind_accepted(line, prompt, filled, tokens, logits)


def _differing(
    what: str, line: Timeline, rows: Sequence[int], choices: Sequence[int], logits: Sequence[np.ndarray],
    tokens: Sequence[int],
) -> list[str]:
    """Returns the first difference of a step whose row rows[i] holds tokens[i], of which the logits are known."""
    for at, row in enumerate(rows):
        found = line.logits(row)
        if found.tobytes() != logits[at].tobytes():
            return [f"{what}: the logits of row {row} differ by {np.abs(found - logits[at]).max():.3g}"]
        if choices[row] != tokens[at + 1]:
            return [f"{what}: row {row} chooses {choices[row]}, not {tokens[at + 1]}"]
    return []


def _of_steps(name: str, what: str, n: int, differ: list[str], rows: int) -> Check:
    said = f"{len(differ)} of {n} steps differ from plain decoding: {differ[0]}" if differ else what
    figures = {"steps": n, "differ": len(differ), "rows": rows, "differing": differ}
    return judged("rows", name, not differ, said, "the bits of plain decoding", REPORT, **figures)


def _in_a_tree(
    line: Timeline, filled: Sequence[int], tokens: Sequence[int], logits: Sequence[np.ndarray]
) -> Check:
    """The known rows are the spine of a tree, each with a leaf that is wrong."""
    n = min(len(filled) // 2, len(logits))
    rows, parents = list[int](), list[int]()
    for at in range(n):
        rows += [tokens[at], tokens[(at + 3) % n]]
        parents += [2 * at - 2 if at else -1, 2 * at]
    # Depth first: a leaf comes behind its parent, and the spine goes on behind the leaf.
    choices = verify(line, Rows(line, rows, parents))
    differ = _differing(f"a tree of {2 * n} rows", line, range(0, 2 * n, 2), choices, logits, tokens)
    return _of_steps("tree", f"in a tree of {2 * n} rows", 1, differ, n)


def _beside_others(
    engine: _native.Engine, line: Timeline, opened: ExitStack, prompt: Sequence[int], filled: Sequence[int],
    tokens: Sequence[int], logits: Sequence[np.ndarray],
) -> Check:
    """The known rows share a step with those of other sequences, which stand elsewhere."""
    others = [opened.enter_context(engine.sequence()) for _ in range(engine.info.sequences_free)]
    if not others:
        return Check("rows", "together", "skipped", "the engine has room for no other sequence")
    share = len(filled) // (len(others) + 1)
    for at, other in enumerate(others):
        other.prefill(list(prompt[: len(prompt) - at - 1] or prompt))
    items = [Rows(each, filled[:share]) for each in (others[0], line, *others[1:])]
    found = engine.verify(items)
    choices = found[1]
    if isinstance(choices, Exception):
        raise choices
    n = min(share, len(logits))
    differ = _differing(f"a step with {len(others)} other sequences", line, range(n), choices, logits, tokens)
    return _of_steps("together", f"beside {len(others)} sequences", 1, differ, n)


def _behind_accepted(
    line: Timeline, prompt: Sequence[int], filled: Sequence[int], tokens: Sequence[int], logits: Sequence[np.ndarray]
) -> Check:
    """Each step has rows that are accepted and one or two that are not, so that the next one begins amid its rows."""
    line.reset()
    line.prefill(prompt)
    at, steps, differ = 0, 0, list[str]()
    while at < len(logits) and not differ:
        width = min(2 + 2 * steps, len(filled) - at)
        choices = verify(line, Rows(line, filled[at : at + width]))
        known = range(min(width, len(logits) - at))
        behind = f"{width} rows behind {at} that steps of several rows left"
        differ = _differing(behind, line, known, choices, logits[at:], tokens[at:])
        accepted = max(width - 1 - steps % 2, 1)
        line.commit(range(accepted))
        at, steps = at + accepted, steps + 1
    what = f"in {steps} steps, each behind one of which a part was accepted"
    return _of_steps("accepted", what, steps, differ, len(logits))


def _sampled(line: Timeline, filled: Sequence[int], prompt: Sequence[int]) -> Check:
    """Samples of a step are those that luce_sample takes of the same logits on the host."""
    line.set_sampling(SAMPLED)
    choices = verify(line, Rows(line, filled))
    line.set_sampling(Sampling())
    sample = line.library.sample
    rule = [sample(line.logits(row), SAMPLED, len(prompt) + row + 1) for row in range(len(filled))]
    wrong = [row for row, token in enumerate(choices) if token != rule[row]]
    said = f"{len(rule)} samples are the rule's"
    if wrong:
        said = f"{len(wrong)} of {len(rule)} samples are not the rule's: row {wrong[0]} takes {choices[wrong[0]]}, "
        said += f"not {rule[wrong[0]]}"
    expected = "those of the sampling rule on the host"
    return judged("rows", "samples", not wrong, said, expected, REPORT, differ=len(wrong))


# ---- tokens of requests


@dataclass(frozen=True)
class Runs:
    """What is run of a model: each of `cases` greedily and sampled, with `n` new tokens. `expected` are the tokens of
    plain decoding. A run took `seconds`, and reading a token of a prompt `reading`."""

    cases: Sequence[Case]
    n: int
    expected: dict[tuple[str, bool], tuple[int, ...]]
    seconds: float
    reading: float

    def requests(self) -> list[tuple[str, bool, Request]]:
        return [(case.id, sampled, _request(case, self.n, sampled)) for case in self.cases for sampled in (False, True)]


def _request(case: Case, n: int, sampled: bool) -> Request:
    return Request(case.prompt, n, SAMPLED if sampled else Sampling(), ignore_eos=True)


def plain_runs(files: Files, model: Model, cases: Sequence[Case], n: int, pace: Pace) -> Runs:
    """Decodes all cases plainly, of which as many tokens as should fit."""
    chosen = mode_plan(files, Mode("plain", "off"), cases, Settings(n))
    expected, done = dict[tuple[str, bool], tuple[int, ...]](), list[Case]()
    with Engine.open(files, chosen, model=model) as engine:
        began = pace.clock()
        first = _finished(engine, _request(cases[0], LEAST_TOKENS, False), pace)
        took, reading = pace.clock() - began, first.stats.prefill_s / len(cases[0].prompt)
        n = max(min(n, int(LEAST_TOKENS * pace.seconds / 8 / max(took, 1e-9))), LEAST_TOKENS)
        for case in cases:
            if done and not pace.fits(pace.seconds / 4):
                break
            for sampled in (False, True):
                expected[case.id, sampled] = tokens_of(engine, _request(case, n, sampled), pace)
            done.append(case)
        seconds = (pace.clock() - began) / max(len(expected), 1)
    return Runs(done, n, expected, seconds, reading)


def by_drafts(files: Files, model: Model, modes: Sequence[Mode], runs: Runs, pace: Pace) -> Check:
    """Runs every mode beside plain decoding."""
    compared, tried = Compared(), list[str]()
    for mode in modes:
        if tried and not pace.fits(runs.seconds * len(runs.expected)):
            break
        tried.append(mode.name)
        chosen = mode_plan(files, mode, runs.cases, Settings(runs.n))
        with Engine.open(files, chosen, model=model) as engine:
            for id, sampled, request in runs.requests():
                what = f"{mode.name} on {id}{', sampled' if sampled else ''}"
                done = _finished(engine, request, pace)
                compared.count(mode, done)
                compared.compare(what, done.tokens, runs.expected[id, sampled])
    check = compared.check("drafts", "tokens", f"with {', '.join(tried)}")
    left = [mode.name for mode in modes if mode.name not in tried]
    return replace(check, figures=check.figures | {"modes": tried, "no time for": left})


def together(files: Files, model: Model, modes: Sequence[Mode], runs: Runs, pace: Pace) -> Check:
    """Runs all requests together, which alone were decoded plainly."""
    compared, requests = Compared(), runs.requests()
    for mode in modes:
        if compared.runs and not pace.fits(runs.seconds * len(requests)):
            break
        chosen = mode_plan(files, mode, runs.cases, Settings(runs.n), sequences=len(requests))
        with Engine.open(files, chosen, model=model) as engine:
            finished = dict[int, Finished]()
            for at, event in engine.run([request for *_, request in requests], pace.cancelled):
                if isinstance(event, Failed | Finished):
                    finished[at] = _ended(event)
        for at, (id, sampled, _) in enumerate(requests):
            what = f"{mode.name} on {id}{', sampled' if sampled else ''}"
            compared.count(mode, finished[at])
            compared.compare(what, finished[at].tokens, runs.expected[id, sampled])
    return compared.check("together", "tokens", f"of {len(requests)} requests together")


def tokens_of(engine: Engine, request: Request, pace: Pace, kept: PrefixCache | None = None) -> tuple[int, ...]:
    """Returns the tokens of one generation. Raises what made it fail."""
    return _finished(engine, request, pace, kept).tokens


def _finished(engine: Engine, request: Request, pace: Pace, kept: PrefixCache | None = None) -> Finished:
    *_, last = engine.generate(request, pace.cancelled, kept)
    return _ended(last)


def _ended(last: Event) -> Finished:
    """Returns how a generation ended. Raises what made it fail, and Cancelled."""
    if isinstance(last, Failed):
        raise last.error
    assert isinstance(last, Finished)
    if last.reason == "cancelled":
        raise Cancelled("interrupted")
    return last


# ---- where prompts begin


def read_both_ways(model: Model, prompt: Sequence[int], threads: int) -> Check:
    """Reads a prompt at once and by steps: two sets of kernels multiply with all of the model's weights, and round
    otherwise. So their logits are near each other, and far apart where one of them is wrong."""
    params = EngineParams(n_ctx=_room_for(model, prompt), n_rows=MAX_ROWS, n_threads=threads)
    with _native.Engine(model, params) as engine, engine.sequence() as line:
        _read(line, prompt, 0, engine.info.n_chunk)
        at_once = line.logits(0).astype(np.float64)
        line.reset()
        for begin in range(0, len(prompt), MAX_ROWS):
            rows = prompt[begin : begin + MAX_ROWS]
            verify(line, Rows(line, rows))
            by_steps = line.logits(len(rows) - 1).astype(np.float64)
            line.commit(range(len(rows)))
    apart = float(np.linalg.norm(at_once - by_steps) / np.linalg.norm(by_steps - by_steps.mean()))
    said = f"a prompt of {len(prompt)} tokens at once and by steps: logits {apart:.1%} apart"
    expected = f"less than {APART:.0%}, which is rounding"
    return judged("prompts", "two ways", apart < APART, said, expected, REPORT, apart=apart)


def from_checkpoints(model: Model, prompt: Sequence[int], threads: int) -> Check:
    """Reads a prompt at once, and from a checkpoint within it that lies on the device, in host memory and as bytes."""
    params = EngineParams(
        n_ctx=_room_for(model, prompt), n_sequences=2, n_checkpoints=2, n_rows=4, n_threads=threads
    )
    with _native.Engine(model, params) as engine, engine.sequence() as cold, engine.sequence() as line:
        n_cut, n_chunk = engine.info.n_cut, engine.info.n_chunk
        unit = n_cut if PAGE % n_cut else PAGE
        cut = (min(len(prompt) - 1, n_chunk)) // unit * unit
        if not cut:
            return Check("prompts", "checkpoints", "skipped", f"a prompt of {len(prompt)} tokens is too short to keep")
        _read(cold, prompt, 0, n_chunk)
        expected = cold.logits(0)
        line.prefill(prompt[:cut], last=False)
        differ = list[str]()
        with line.checkpoint() as made:
            places = [("the device", made)]
            data = bytes(made.save())
            for where, checkpoint in [*places, ("host memory", made), ("bytes", engine.load_checkpoint(data))]:
                if where == "host memory":
                    checkpoint.to_host()
                line.resume(checkpoint)
                _read(line, prompt, cut, n_chunk)
                found = line.logits(0)
                if found.tobytes() != expected.tobytes():
                    differ.append(f"from {where} the logits differ by {np.abs(found - expected).max():.3g}")
    said = f"{len(differ)} of 3 ways to resume a prompt at {cut} differ" + (f": {differ[0]}" if differ else "")
    return judged("prompts", "checkpoints", not differ, said, "the bits of a prompt that is read at once", REPORT,
                  differing=differ)  # fmt: skip


def _room_for(model: Model, prompt: Sequence[int]) -> int:
    """Returns the positions of an engine that reads the prompt: a page more, where the model was trained for that."""
    room, trained = len(prompt) + PAGE, model.info.n_ctx_train
    return min(room, trained) if trained else room


def _read(line: Timeline, prompt: Sequence[int], at: int, n_chunk: int) -> None:
    while at < len(prompt):
        end = min(at + n_chunk - at % n_chunk, len(prompt))
        line.prefill(prompt[at:end], last=end == len(prompt))
        at = end


def behind_kept_prompts(
    files: Files, model: Model, prompt: Sequence[int], n: int, specs: Sequence[str], pace: Pace
) -> Check:
    """Samples after prompts with a common beginning, cold and with what was kept of the ones before, by each of
    `specs`."""
    part, compared, cached, tried = len(prompt) * 3 // 4, Compared(), 0, list[str]()
    whole = tuple(prompt)
    prompts = [whole[:part], whole, (*whole[:part], *whole[: len(whole) - part]), whole]
    for spec in specs:
        if tried and not pace.fits():
            break
        tried.append(spec)
        mode = Mode(spec, spec)
        chosen = files.plan(Options(sequences=1, checkpoints=8, spec=spec), len(prompt), n)
        with Engine.open(files, chosen, model=model, keep_drafters=True) as engine, ExitStack() as opened:
            kept = PrefixCache(engine.native, files.tokenizer, HOST_BYTES)
            opened.callback(kept.close)
            requests = {each: Request(each, n, SAMPLED, ignore_eos=True) for each in prompts}
            cold = {each: tokens_of(engine, request, pace) for each, request in requests.items()}
            for at, each in enumerate(prompts):
                done = _finished(engine, requests[each], pace, kept)
                cached += done.cached
                compared.count(mode, done)
                what = f"{spec} on prompt {at} with {done.cached} kept tokens"
                compared.compare(what, done.tokens, cold[each])
    check = compared.check("prompts", "kept", "behind kept prompts")
    left = [spec for spec in specs if spec not in tried]
    figures = check.figures | {"cached": cached, "no time for": left}
    if check.verdict == "ok" and not cached:
        return Check("prompts", "kept", "skipped", "nothing of these prompts was kept", figures=figures)
    found = f"{check.found}, {cached} tokens of their prompts kept" if check.verdict == "ok" else check.found
    return replace(check, found=found, figures=figures)


def verify(line: Timeline, rows: Rows) -> list[int]:
    """Returns the choices after a sequence's rows. Raises NumericError where logits were not finite."""
    (choices,) = line.engine.verify([rows])
    if isinstance(choices, Exception):
        raise choices
    return choices


def _choice(line: Timeline, prompt: Sequence[int]) -> int:
    choice = line.prefill(prompt)
    assert choice is not None
    return choice
