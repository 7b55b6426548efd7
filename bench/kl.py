#!/usr/bin/env python3
"""Says how far logits on a device are from those of the same weights in F32, beside llama.cpp's on the same
file.

The reference dequantises a file's weights (by the gguf package) and computes in F32 throughout, KV too, on
luce's CPU; the row says how far it is from transformers' logits on the box. luce and llama.cpp run the file
as it is, with KV in F16. Each window of the text begins in an empty context: --prompt tokens are read as a
prompt, the others one by one, and the logits after the prompt and after each other token are compared.
ggml-cuda runs without programmatic dependent launches, with which its attention is wrong on Hopper.
Figures are of KL(reference || other) in nats over the whole vocabulary, and of the share of positions with
the reference's likeliest token.

    python bench/kl.py luce/data/box.gguf --random Q4_K_M,Q8_0 --bin peer/bin --save results
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import box_model
import drive
import gguf
import llamacpp
import numpy as np
import tiny

from luce import native as _native
from luce.bench.origin import command_text, device_text, origin, print_row
from luce.bench.output import as_markdown
from luce.bench.summary import five_digits
from luce.convert.gguf_output import Encoder, Planned, slabs, tensor_bytes, write
from luce.convert.gguf_tokenizer import copy_keys
from luce.convert.weight_types import MIXES, choose
from luce.errors import Error
from luce.files.tokenizer import Tokenizer
from luce.native import File, Model

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "luce" / "bench" / "jail.py"  # It is newer than what the box was trained on.
GOLDEN = ROOT / "tests" / "goldens" / "box.npz"
WIDTH = 64  # A step of the reference has so many rows.
SMALLEST = -104.0  # llama-server's log-probabilities are logarithms of F32, which has none below this.
METHOD = " ".join(__doc__.split("\n\n")[1].split())

# These models are random. The tiny one has every kind of layer, the middle one matrices of a 2b's size in
# three layers.
SHAPES = {
    "tiny": tiny.Config(n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_v_head=4, state_size=64,
                        n_vocab=2048),
    "mid": tiny.Config(n_layer=3, interval=3, n_embd=2048, n_ff=6144, n_head=8, n_head_kv=2, head_dim=256,
                       rope_dim=64, n_k_head=16, n_v_head=32, state_size=128, n_vocab=4096),
}  # fmt: skip


# ---- files


def write_f32(source: Path, out: Path, threads: int) -> None:
    """Writes a file with the same keys and the same weights, dequantised."""
    with File(source) as file:
        writer = gguf.GGUFWriter(None, file.kv["general.architecture"])
        left_out = ("general.architecture", "general.file_type", "general.alignment")
        copy_keys(writer, file, lambda key: key not in left_out and not key.startswith("split."))
        writer.add_file_type(MIXES["F32"].file_type)
        plan = [_dequantised(file, index) for index in range(len(file.tensors))]
        write(out, writer, plan, {t.name: "F32" for t in plan}, file.library, threads=threads)


def _dequantised(file: File, index: int) -> Planned:
    tensor = file.tensors[index]
    shape = tuple(reversed(tensor.shape))
    kind = gguf.GGMLQuantizationType(tensor.type)
    data = tensor_bytes(file, index).reshape(int(np.prod(shape[:-1])), -1)

    def rows() -> Iterator[np.ndarray]:
        return slabs(data, lambda part: gguf.quants.dequantize(part, kind))

    return Planned(tensor.name, shape, (tensor.name,), rows)


def write_random(folder: Path, shape: str, kinds: Sequence[str], threads: int) -> Iterator[Path]:
    """Yields files of one random model, each with its matrices in another type or mix of types."""
    config = SHAPES[shape]
    weights = tiny.layout(config, seed=10)
    encode = Encoder(_native.default(), threads)
    try:
        for kind in kinds:
            if kind in MIXES:
                types, _ = choose(MIXES[kind], ((name, x.shape) for name, x in weights.items()), config.tied)
            else:
                types = {name: kind if tiny.quantizable(name) else "F32" for name in weights}
            yield tiny.write(
                folder / f"random-{shape}-{kind.lower()}.gguf", config, weights, types.__getitem__,
                quantize=lambda type_id, rows: encode("", tiny.QType(type_id).name, rows),
            )  # fmt: skip
    finally:
        encode.close()


# ---- logits

Windows = list[list[int]]  # Each window holds its tokens.
Logits = list[np.ndarray]  # Each window has (positions, n_vocab).


def windows_of(path: Path, text: str, args: argparse.Namespace) -> Windows:
    """Returns the first --windows pieces of the text, of --tokens each."""
    with File(path) as file:
        tokens = Tokenizer(file.kv).encode(text)
    if len(tokens) < args.windows * args.tokens:
        raise Error(f"{args.windows} windows of {args.tokens} tokens: the text has {len(tokens)}")
    return [tokens[i * args.tokens : (i + 1) * args.tokens] for i in range(args.windows)]


def reference_logits(path: Path, tokens: Sequence[int], threads: int) -> np.ndarray:
    """Returns the logits after each token of an F32 file, in F32 on the CPU, by verify steps."""
    with File(path) as file, Model(file, "cpu") as model:
        sequence = drive.open_sequence(model, n_ctx=len(tokens) + 1, n_rows=WIDTH, n_threads=threads)
        logits = drive.chain_logits(sequence, tokens, WIDTH)
        sequence.engine.close()
    return logits


def luce_logits(path: Path, windows: Windows, n_prompt: int, device: str, threads: int) -> Logits:
    """Returns what luce computes on the device, with KV in F16."""
    found = []
    with File(path) as file, Model(file, device) as model:
        sequence = drive.open_sequence(
            model, n_ctx=max(map(len, windows)) + 1, n_rows=1, n_threads=threads, kv_type="f16"
        )
        for tokens in windows:
            sequence.reset()
            drive.prefill(sequence, tokens[:n_prompt])
            rows = [sequence.logits(0)]
            rows += [drive.step(sequence, token) for token in tokens[n_prompt:]]
            found.append(np.stack(rows))
        sequence.engine.close()
    return found


def llamacpp_logprobs(
    path: Path, windows: Windows, n_prompt: int, device: str, threads: int, folder: Path, n_vocab: int
) -> Logits:
    """Returns what llama-server computes on the device. A request has one token more than the one before it,
    and its answer the log-probabilities of all tokens after it. Raises PeerError where more than that token
    was read."""
    with File(path) as file:
        letter = Tokenizer(file.kv).encode("a")[0]
    # What is chosen changes no probability, but a choice that ends in half a character would be kept back.
    fields: dict[str, Any] = {"n_probs": n_vocab, "logit_bias": [[letter, 1e6]]}
    found = []
    n_ctx = max(map(len, windows)) + 8
    no_pdl = {"GGML_CUDA_PDL": "0"}
    with llamacpp.LlamaServer(
        folder / "llama-server", path, threads, device, n_ctx=n_ctx, variables=no_pdl
    ) as server:
        for tokens in windows:
            rows = []
            for end in range(n_prompt, len(tokens) + 1):
                answer = server.complete(tokens[:end], 1, cache_prompt=end > n_prompt, **fields)
                read = answer["timings"]["prompt_n"]
                if end > n_prompt and read != 1:
                    raise llamacpp.PeerError(f"llama-server read {read} tokens, not 1")
                rows.append(_all_logprobs(answer, n_vocab))
            found.append(np.stack(rows))
    return found


def _all_logprobs(answer: dict[str, Any], n_vocab: int) -> np.ndarray:
    listed = answer["completion_probabilities"][0]["top_logprobs"]
    ids = np.array([entry["id"] for entry in listed])
    if len(ids) != n_vocab or not np.array_equal(np.sort(ids), np.arange(n_vocab)):
        raise llamacpp.PeerError(f"llama-server gave {len(ids)} probabilities of {n_vocab} tokens")
    row = np.empty(n_vocab)
    row[ids] = [entry["logprob"] for entry in listed]
    return np.maximum(row, SMALLEST)


# ---- figures


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns log-probabilities of the last axis, in F64. Of log-probabilities it returns these, normalised
    anew."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns KL(reference || other) in nats of each row of logits."""
    p, q = log_softmax(reference), log_softmax(other)
    return np.sum(np.exp(p) * (p - q), -1)


def figures(reference: Logits, other: Logits) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns the divergence of every position, and what a row keeps of it."""
    kl = np.concatenate([divergence(r, o) for r, o in zip(reference, other, strict=True)])
    same = np.concatenate([r.argmax(-1) == o.argmax(-1) for r, o in zip(reference, other, strict=True)])
    return kl, {
        "mean_kl": five_digits(float(kl.mean())),
        "largest_kl": five_digits(float(kl.max())),
        "top_1_agreement": five_digits(float(same.mean())),
    }


def compared(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Returns whether luce is no worse, and the mean difference in units of its standard error: below 0 luce
    is nearer to the reference, and within 2 of 0 the two are not told apart."""
    difference = ours - theirs
    error = float(difference.std(ddof=1)) / np.sqrt(len(difference))
    return {
        "mean_no_worse": bool(ours.mean() <= theirs.mean()),
        "largest_no_worse": bool(ours.max() <= theirs.max()),
        "mean_difference_in_standard_errors": five_digits(float(difference.mean()) / error) if error else 0.0,
    }


def reference_error(folder: Path, threads: int) -> dict[str, Any]:
    """Compares the reference with transformers' F32 logits of the box's weights."""
    golden = dict(np.load(GOLDEN))
    copy = folder / "box-f32.gguf"
    write_f32(box_model.GGUF, copy, threads)
    found = reference_logits(copy, golden["prompt"].tolist(), threads)
    expected = golden["stored_logits"]
    return {
        "positions": len(expected),
        "max_abs_logit_error": float(f"{np.abs(found - expected).max():.2e}"),
        "largest_kl": float(f"{divergence(expected, found).max():.2e}"),
    }


def measure_file(path: Path, text: str, args: argparse.Namespace, folder: Path, where: str) -> dict[str, Any]:
    """Returns the figures of one file."""
    windows, threads = windows_of(path, text, args), args.threads
    copy = folder / f"{path.stem}-f32.gguf"
    write_f32(path, copy, threads)
    reference = [reference_logits(copy, tokens, threads)[args.prompt - 1 :] for tokens in windows]
    copy.unlink()
    n_vocab = reference[0].shape[1]
    ours = luce_logits(path, windows, args.prompt, where, threads)
    theirs = llamacpp_logprobs(path, windows, args.prompt, where, threads, args.bin, n_vocab)
    our_kl, our_figures = figures(reference, ours)
    their_kl, their_figures = figures(reference, theirs)
    row = {"positions": len(our_kl), "luce": our_figures, "llama.cpp": their_figures}
    return row | compared(our_kl, their_kl)


def measure(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Returns the device, as the core names it, and the result row."""
    devices = [d.name for d in _native.default().devices()]
    where = devices[0] if args.device == "auto" else {"cuda": "cuda:0"}.get(args.device, args.device)
    text = args.text.read_text(encoding="utf-8")
    words = ["bench/kl.py", *(path.name for path in args.models), "--device", args.device]
    for name in ("threads", "windows", "tokens", "prompt", "shape"):
        words += [f"--{name}", str(getattr(args, name))]
    command = command_text([*words, *(["--random", ",".join(args.random)] if args.random else [])])
    files = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        error = reference_error(folder, args.threads)

        def add(path: Path) -> None:
            head.update(origin("kl", where, path, command, args.threads, args.commit))
            files.append({"model": head.pop("model")} | measure_file(path, text, args, folder, where))

        head: dict[str, Any] = {}
        for path in args.models:
            add(path)
        for path in write_random(folder, args.shape, args.random, args.threads) if args.random else ():
            add(path)
            path.unlink()
    return where, head | {
        "method": METHOD,
        "reference_device": device_text("cpu", args.threads),
        "reference_against_transformers": error,
        "text": {"file": args.text.name, "sha256": hashlib.sha256(text.encode()).hexdigest()},
        "files": files,
    }


def markdown(result: dict[str, Any]) -> str:
    """Makes a table with two lines for each file."""
    lines = []
    for row in result["files"]:
        for name in ("luce", "llama.cpp"):
            f = row[name]
            verdict = f"{row['mean_difference_in_standard_errors']:+.1f}" if name == "luce" else ""
            lines.append([row["model"]["file"], name, f"{f['mean_kl']:.3e}", f"{f['largest_kl']:.3e}",
                          f"{f['top_1_agreement']:.2%}", verdict])  # fmt: skip
    title = ["file", "by", "mean KL", "largest KL", "same first token", "difference in standard errors"]
    return as_markdown((title, lines))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="*", metavar="GGUF")
    parser.add_argument("--random", default=[], type=lambda t: t.split(","), metavar="TYPES",
                        help="also random models with matrices of these types or mixes")  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of the random models")
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--build", type=Path, metavar="DIR", help="build llama.cpp in this folder")
    peer.add_argument("--bin", type=Path, metavar="DIR", help="folder of llama.cpp's programs")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--windows", type=int, default=2, help="so many pieces of the text")
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--prompt", type=int, default=256, help="so many of them are read as a prompt")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    args = parser.parse_args()
    if not (args.models or args.random):
        parser.error("name a GGUF, or --random TYPES")
    if not 0 < args.prompt < args.tokens or args.windows < 1:
        parser.error("--prompt is less than --tokens, and all are above 0")
    return args


def main() -> None:
    args = arguments()
    try:
        if args.build:
            args.bin = llamacpp.build(args.build, args.device != "cpu")
        where, result = measure(args)
        print(f"on {result['device']}. {METHOD}\n\n{markdown(result)}", file=sys.stderr, flush=True)
        print_row(result, args.save, f"kl-{'cpu' if where == 'cpu' else 'gpu'}")
    except (Error, llamacpp.PeerError, OSError) as error:
        raise SystemExit(f"kl: error: {error}") from None


if __name__ == "__main__":
    main()
