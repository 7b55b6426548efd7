#!/usr/bin/env python3
"""Writes tests/goldens/llamacpp-reference.npz: what llama.cpp, of the archive that luce's ggml is of, makes of tiny
models, F32: logits of Gemma 4's models, drafts of its assistants and of Qwen's DFlash2 and DSpark drafters, and rows of
Qwen's vision tower. It needs a build of
it with its mtmd and common libraries, and a compiler:

    source=$(python tools/fetch_ggml.py --peer)
    cmake -G Ninja -S $source -B BUILD -DCMAKE_BUILD_TYPE=Release
    cmake --build BUILD --target llama mtmd llama-common
    python tools/make_llamacpp_reference.py --source $source --build BUILD

For each of PAIRS by its place i `prompts-i` has prompts (n, length), filled up with -1, and `drafts-i` (n, 4) what
llama.cpp's own driver drafts behind them, by greatest chance; `prompts-NAME` and `drafts-NAME` are the same of
tiny_dflash2.PEERS. For
each of MODELS `logits-NAME` has its logits at SOME
of the positions that the golden of transformers has, and `greedy-NAME` its choices where that text goes on. `rows-i`
are those of GRIDS[i], of the pixels that luce has: llama.cpp's own preparation would put black bars beside an image.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import numpy as np
import tiny_dflash2
import tiny_gemma4
import tiny_vision
from tiny_gemma4 import ASSISTANT_SEED, CASES, LONG_CASES, PAIRS

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "goldens" / "llamacpp-reference.npz"
GRIDS = [(64, 64), (96, 64), (32, 288), (160, 128)]  # sizes of images that need no stretching: width, height
LENGTHS = (2, 5, 11, 12, 13, 14, 20, 25, 33, 40, 52, 64)  # Windows are of 9 to 15.
N_DRAFTS = 4
SOME = slice(None, None, 7)
# It loads no others with embeddings of each layer: layers may share K and V with the last ones of their kind alone.
MODELS = [name for name in CASES | LONG_CASES if not name.startswith("per-layer")]
SEED = 5


def built(source: Path, build: Path, folder: Path) -> Path:
    """Returns the program of llamacpp_reference.cpp."""
    program, libraries = folder / "reference", build / "bin"
    include = [f"-I{source / part}" for part in ("include", "common", "ggml/include", "tools/mtmd", "vendor")]
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    linked += [f"-l{name}" for name in ("mtmd", "llama-common", "llama", "ggml", "ggml-base")]
    file = ROOT / "tools" / "llamacpp_reference.cpp"
    subprocess.run(["g++", "-std=c++17", "-O1", *include, str(file), "-o", str(program), *linked], check=True)
    return program


def drafted(command: list[str | Path], n: int, n_vocab: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts, and the n drafts that a command makes behind each."""
    words = np.random.PCG64(seed).random_raw(max(LENGTHS) * len(LENGTHS)) % np.uint64(n_vocab)
    prompts = words.astype(np.int32).reshape(len(LENGTHS), -1)
    prompts[np.arange(max(LENGTHS)) >= np.array(LENGTHS)[:, None]] = -1
    lines = "".join(" ".join(str(token) for token in prompt if token >= 0) + "\n" for prompt in prompts)
    done = subprocess.run(
        [*command, str(n)], input=lines.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    made = np.array([line.split() for line in done.stdout.splitlines()], np.int32)
    assert made.shape == (len(LENGTHS), n), made.shape
    return prompts, made


def drafts(program: Path, folder: Path, i: int) -> dict[str, np.ndarray]:
    case, assistant = PAIRS[i]
    config, seed = CASES[case]
    target = tiny_gemma4.write(folder / "target.gguf", config, tiny_gemma4.layout(config, seed))
    drafter = tiny_gemma4.write(folder / "assistant.gguf", assistant, tiny_gemma4.layout(assistant, ASSISTANT_SEED))
    prompts, made = drafted([program, "draft-mtp", target, drafter], N_DRAFTS, config.n_vocab, i)
    return {f"prompts-{i}": prompts, f"drafts-{i}": made}


def blocks(program: Path, folder: Path, name: str) -> dict[str, np.ndarray]:
    case = tiny_dflash2.PEERS[name]
    command = [program, "draft-dspark" if case.markov else "draft-dflash", *tiny_dflash2.files(folder, case)]
    prompts, made = drafted(command, case.n_draft, 256, case.base.seed)
    return {f"prompts-{name}": prompts, f"drafts-{name}": made}


def logits(program: Path, folder: Path, name: str) -> dict[str, np.ndarray]:
    config, seed = (CASES | LONG_CASES)[name]
    golden = np.load(OUT.with_name(f"gemma4-{name}.npz"))
    model = tiny_gemma4.write(folder / "target.gguf", config, tiny_gemma4.layout(config, seed))
    prompt = golden["prompt"]
    text = " ".join(str(token) for token in [*prompt, *golden["greedy"][:-1]])
    done = subprocess.run([program, "logits", model], input=text.encode(), capture_output=True, check=True)
    found = np.frombuffer(done.stdout, np.float32).reshape(-1, config.n_vocab)
    greedy = found[len(prompt) - 1 :].argmax(-1).astype(np.int32)
    return {f"logits-{name}": found[golden["at"][SOME]], f"greedy-{name}": greedy}


def rows(program: Path, folder: Path, i: int) -> np.ndarray:
    c, (width, height) = tiny_vision.TINY, GRIDS[i]
    mmproj = tiny_vision.write(folder / "mmproj.gguf", c, tiny_vision.layout(c, tiny_vision.weights(c, SEED)))
    pixels = (tiny_vision.image(width, height, i).astype(np.float32) / 255 - 0.5) / 0.5
    command = [program, "rows", mmproj, str(width), str(height)]
    done = subprocess.run(command, input=pixels.astype(np.float32).tobytes(), capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.float32).reshape(width * height // 1024, c.n_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="llama.cpp's source")
    parser.add_argument("--build", type=Path, required=True, help="the folder that it is built in")
    args = parser.parse_args()
    made: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as here:
        folder = Path(here)
        program = built(args.source.resolve(), args.build.resolve(), folder)
        for i in range(len(PAIRS)):
            made |= drafts(program, folder, i)
            print(f"{PAIRS[i][0]}: {len(set(made[f'drafts-{i}'].ravel().tolist()))} different drafts")
        for name in tiny_dflash2.PEERS:
            made |= blocks(program, folder, name)
            print(f"{name}: {len(set(made[f'drafts-{name}'].ravel().tolist()))} different drafts")
        for each in MODELS:
            made |= logits(program, folder, each)
        made |= {f"rows-{i}": rows(program, folder, i) for i in range(len(GRIDS))}
    np.savez_compressed(OUT, **made)
    print(f"{OUT}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
