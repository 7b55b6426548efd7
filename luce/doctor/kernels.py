"""The kernels against what others computed: the small model's logits against transformers', also of it as a mixture;
products against what the blocks of a type say by gguf-py; and of a GPU each type's logits against the CPU's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as QType
from gguf.quants import dequantize

from luce.convert.gguf_output import tensor_bytes
from luce.convert.requantize import requantize
from luce.data import BOX
from luce.doctor.checks import REPORT, Check, judged
from luce.doctor.mixture import write_mixture
from luce.errors import ArgumentError, UnsupportedError
from luce.native import Drafts, Engine, File, Library, Model, OpArray, Rows
from luce.native import Sequence as Timeline
from luce.native.structs import EngineParams

ANSWERS = Path(__file__).with_name("answers.npz")  # tools/make_doctor_answers.py
# The small model's logits, of standard deviation 4, may be off from transformers' by so much with F32 weights. A CPU
# was off by 1.5e-5. A GPU's products round activations to F16: an H200 was off by 0.09 (tests/support/drive.py).
CPU_BOUND, GPU_BOUND = 1e-4, 0.17
# With quantised weights a product's input is rounded to 8 bits: the logits moved by 0.36 (tests/data/test_box.py).
QUANTISED_BOUND = 0.6
SUM_BOUND = 2e-6  # A sum of F32 products, by what its terms would give without their signs.
WIDTHS = (1, 7, 25)
# Types whose products the CPU computes with kernels of luce's own, which are all checked.
FLOATS = ("F32", "F16", "BF16")
TYPES = (
    *FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "NVFP4", "TQ1_0", "TQ2_0",
)  # fmt: skip
MIXES = ("F16", "Q8_0", "Q4_K_M")  # A GPU's kernels are compared with the CPU's in these.
DENSE_FILE, MIXTURE_FILE = "small-f32.gguf", "small-mixture-f32.gguf"
# A packed row of rows_matmul: blocks of 32 values, block by block of all rows (cpu/matmul.h).
PACKED = np.dtype([("q", "i1", 32), ("d", "<f4"), ("rest", "<i4", 7)])
I8 = 24


@dataclass(frozen=True)
class Form:
    """A form of the small model: what its checks' names begin with, and what people call it."""

    prefix: str
    words: str


DENSE, MIXTURE = Form("", "the small model's"), Form("mixture ", "its mixture's")


def known_answers(device: str, folder: Path, threads: int, text: Sequence[int]) -> Iterator[Check]:
    """Yields how the small model's logits, choices and drafts compare with transformers', and its logits after `text`,
    a longer prompt, with those of steps; and the same of it as a mixture. F32 copies of both go to `folder`."""
    dense, mixture = folder / DENSE_FILE, folder / MIXTURE_FILE
    requantize(BOX, dense, "F32", threads)
    yield from _answers(DENSE, dense, device, threads, text)
    write_mixture(mixture, threads)
    try:
        yield from _answers(MIXTURE, mixture, device, threads, text)
    except UnsupportedError as error:
        yield Check("kernels", "mixture", "skipped", str(error))


def _answers(form: Form, path: Path, device: str, threads: int, text: Sequence[int]) -> Iterator[Check]:
    known = dict(np.load(ANSWERS))
    bound = CPU_BOUND if device == "cpu" else GPU_BOUND
    with _engine(path, device, threads, n_draft=known["drafts"].shape[1]) as engine, engine.sequence() as line:
        prompt = known["prompt"].tolist()
        found = {f"{width} rows": _by_steps(line, prompt, width)[:, known["ids"]] for width in WIDTHS}
        line.reset()
        line.prefill(prompt)
        worst = {name: _furthest(logits, known["logits"]) for name, logits in found.items()}
        worst["a prompt"] = _furthest(line.logits(0)[known["ids"]], known["logits"][-1])
        most = max(worst, key=lambda name: worst[name])
        holds = worst[most] <= bound
        said = f"{form.words} logits are within {worst[most]:.1g} of transformers'"
        if not holds:
            said = f"{form.words} logits are off from transformers' by {worst[most]:.3g} in steps of {most}"
        expected = f"at most {bound:g}"
        yield judged("kernels", f"{form.prefix}logits", holds, said, expected, REPORT, errors=worst)
        yield from _known_tokens(form, line, known, bound)
        yield _by_prompt(form, line, text, bound)


def _known_tokens(form: Form, line: Timeline, known: dict[str, Any], bound: float) -> Iterator[Check]:
    """Yields how choices and drafts compare, step by step behind the known tokens. What errors within `bound` could
    turn is left out."""
    greedy, drafts = known["greedy"].tolist(), known["drafts"]
    clear = known["gap"] > 2 * bound
    drafted_clear = np.minimum.accumulate(known["draft_gap"], 1) > 2 * bound
    line.reset()
    choice = line.prefill(known["prompt"].tolist())
    wrong, wrong_drafts, n_drafts = 0, 0, 0
    for at, token in enumerate(greedy):
        wrong += bool(clear[at]) and choice != token
        if at < len(drafts):
            line.engine.draft([Drafts(line, token, drafts.shape[1])])
            own = np.array(line.drafted(drafts.shape[1]))
            wrong_drafts += int((own != drafts[at])[drafted_clear[at]].sum())
            n_drafts += int(drafted_clear[at].sum())
        choice = _verify(line, [token])[0]
        line.commit([0])
    n = int(clear.sum())
    for name, count, of in (("choices", wrong, n), ("drafts", wrong_drafts, n_drafts)):
        said = f"{count} of {of} of {form.words} {name} differ"
        check = judged("kernels", form.prefix + name, count == 0, said, "those that torch computed", REPORT)
        yield replace(check, minor=True)


def _by_prompt(form: Form, line: Timeline, text: Sequence[int], bound: float) -> Check:
    """A prompt is read by other kernels than a step's rows are, over several chunks of attention."""
    steps = _by_steps(line, text, max(WIDTHS))[-1]
    line.reset()
    chunk = line.engine.info.n_chunk
    for begin in range(0, len(text), chunk):
        line.prefill(text[begin : begin + chunk])
    error = _furthest(line.logits(0), steps)
    said = f"a prompt of {len(text)} is read as by steps, to {error:.1g}"
    if not error <= 2 * bound:  # Each may be off by the bound.
        said = f"a prompt of {len(text)} tokens gives logits that are {error:.3g} off from those of steps"
    expected = f"at most {2 * bound:g}"
    check = judged("kernels", f"{form.prefix}prompts", error <= 2 * bound, said, expected, REPORT, error=error)
    return replace(check, minor=True)


def products(core: Library, own: File) -> Check:
    """Multiplies with each type on the CPU, random weights and the first rows of the model's own, and compares with
    what gguf-py reads of the same blocks."""
    rng = np.random.default_rng(1)
    cases = [(kind, core.quantize(int(QType[kind]), rng.standard_normal((19, 768)).astype(np.float32) + 0.2), 768)
             for kind in TYPES]  # fmt: skip
    cases += list(_first_rows(own))
    wrong: dict[str, float] = {}
    done: list[str] = []
    for kind, rows, k in cases:
        try:
            error = _product_error(core, kind, rows, k, rng)
        except (ArgumentError, UnsupportedError):
            continue  # ggml multiplies with it.
        done.append(kind)
        if not error <= SUM_BOUND:
            wrong[kind] = max(error, wrong.get(kind, 0.0))
    named = ", ".join(f"{kind} (off by {error:.2g} of the terms)" for kind, error in wrong.items())
    types = sorted(set(done))
    said = f"products of {named} are not what the blocks say" if wrong else f"products of {len(types)} types are right"
    expected = f"{SUM_BOUND:g} of the terms at most"
    return judged("kernels", "products", bool(types) and not wrong, said, expected, REPORT, types=types, wrong=wrong)


def _first_rows(own: File) -> Iterator[tuple[str, np.ndarray, int]]:
    """Yields of each type of the file's matrices the blocks (n, bytes) of some rows, and their length."""
    seen = set[str]()
    for index, tensor in enumerate(own.tensors):
        if tensor.type_name in seen or len(tensor.shape) != 2 or tensor.shape[0] < 64 or tensor.type_name not in TYPES:
            continue
        seen.add(tensor.type_name)
        yield tensor.type_name, tensor_bytes(own, index).reshape(tensor.shape[1], -1)[:32], tensor.shape[0]


def _product_error(core: Library, kind: str, rows: np.ndarray, k: int, rng: np.random.Generator) -> float:
    """Returns how far products of random inputs are off, by what their terms would give without signs."""
    t, n, type_id = 5, len(rows), int(QType[kind])
    x = rng.standard_normal((t, k)).astype(np.float32)
    taken, given = x.astype(np.float64), OpArray(x, (k, t), 0)
    if kind not in FLOATS:
        packed = np.zeros((t, 2 * k), np.int8)
        core.op_run("cpu", "pack_rows", [given], (), OpArray(packed, (2 * k, t), I8))
        blocks = packed.reshape(-1).view(PACKED).reshape(k // 32, t).T
        taken = (blocks["q"] * blocks["d"][..., None].astype(np.float64)).reshape(t, k)
        rounded = np.abs(taken - x).reshape(t, -1, 32).max(-1) / np.abs(x).reshape(t, -1, 32).max(-1)
        if not rounded.max() <= 1.0001 / 254:
            return float(rounded.max())
        given = OpArray(packed, (2 * k, t), I8)
    weights = np.ascontiguousarray(rows)
    out = np.full((t, n), np.nan, np.float32)
    core.op_run("cpu", "rows_matmul", [given, OpArray(weights, (k, n), type_id)], (), OpArray(out, (n, t), 0))
    w = dequantize(weights.view(np.uint8).reshape(n, -1), QType[kind]).reshape(n, k).astype(np.float64)
    terms = np.abs(taken) @ np.abs(w).T
    return float((np.abs(out - taken @ w.T) / np.maximum(terms, 1e-30)).max())


def against_the_cpu(device: str, folder: Path, threads: int) -> Iterator[Check]:
    """Yields for each of MIXES how a GPU's logits of the small model, in both forms, compare with the CPU's of these
    weights in F32. The GPU has its KV in F16, as users have: known_answers() has F32's, and has made the mixture."""
    prompt = np.load(ANSWERS)["prompt"].tolist()
    forms = [(DENSE, BOX, mix) for mix in MIXES] + [(MIXTURE, folder / MIXTURE_FILE, mix) for mix in MIXES]
    for form, source, mix in forms:
        own, exact = folder / "own.gguf", folder / "exact.gguf"
        requantize(source, own, mix, threads)
        requantize(own, exact, "F32", threads)
        found = []
        for path, where, kv in ((own, device, "f16"), (exact, "cpu", "f32")):
            with _engine(path, where, threads, kv=kv) as engine, engine.sequence() as line:
                found.append([_by_steps(line, prompt, width) for width in WIDTHS])
        error = max(_furthest(a, b) for a, b in zip(*found, strict=True))
        bound = GPU_BOUND if mix in FLOATS else QUANTISED_BOUND
        said, name = f"{form.prefix}{mix} is off from the CPU by {error:.2g}", f"{form.prefix}{mix} against the CPU"
        yield judged("kernels", name, error <= bound, said, f"at most {bound:g}", REPORT, error=error)
        own.unlink()
        exact.unlink()


def _engine(path: Path, device: str, threads: int, n_draft: int = 0, kv: str = "f32") -> Engine:
    """Opens an engine, which keeps its model and file open."""
    file = File(path)
    model = Model(file, device, head=file if n_draft else None)
    params = EngineParams(n_ctx=1280, n_rows=64, n_draft=n_draft, n_threads=threads, kv_type=kv)
    return Engine(model, params)


def _by_steps(line: Timeline, tokens: Sequence[int], width: int) -> np.ndarray:
    """Returns the logits (n, V) after each of the tokens, committed `width` at a time."""
    line.reset()
    found = []
    for begin in range(0, len(tokens), width):
        rows = tokens[begin : begin + width]
        _verify(line, rows)
        found += [line.logits(row) for row in range(len(rows))]
        line.commit(range(len(rows)))
    return np.stack(found)


def _verify(line: Timeline, tokens: Sequence[int]) -> list[int]:
    (choices,) = line.engine.verify([Rows(line, tokens)])
    if isinstance(choices, Exception):
        raise choices
    return choices


def _furthest(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference; infinite where one is no number."""
    furthest = float(np.abs(found - expected).max())
    return furthest if np.isfinite(furthest) else float("inf")
