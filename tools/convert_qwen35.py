#!/usr/bin/env python3
"""Converts a Qwen3.5/3.6 checkpoint (safetensors; dense or MoE) to GGUF."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import gguf

sys.path.insert(0, str(Path(__file__).resolve().parent))

import hf_qwen35  # noqa: E402
from gguf_output import Planned, Written, thread_count, write  # noqa: E402
from gguf_tokenizer import add_hf_tokenizer, check_tokenizer  # noqa: E402
from hf_config import read_config  # noqa: E402
from safetensors_reader import Checkpoint  # noqa: E402
from weight_types import DEFAULT, MIXES, choose  # noqa: E402

from luce import _native  # noqa: E402
from luce.errors import FileError, LuceError, UnsupportedError  # noqa: E402
from luce.qwen35_gguf import Config, add_keys  # noqa: E402

EXAMPLES = """
examples:
  convert_qwen35.py Qwen3.5-9B qwen3.5-9b-q4_k_m.gguf --type Q4_K_M
  convert_qwen35.py Qwen3.5-9B trunk.gguf --type BF16 --no-mtp
  convert_qwen35.py Qwen3.5-9B mtp.gguf --type Q8_0 --mtp-only
  convert_qwen35.py checkpoints/step-9000 box.gguf --type F32 --tokenizer tokenizer/

The folder holds config.json, model.safetensors (or its shards and model.safetensors.index.json) and the
tokenizer. The file is written whole, read back and compared, or not at all.
"""


def note(text: str) -> None:
    print(text, file=sys.stderr)


def convert(
    folder: Path,
    out: Path,
    kind: str = DEFAULT,
    part: str = "all",
    tokenizer: Path | None = None,
    name: str | None = None,
    threads: int = 0,
    say: Callable[[str], None] = note,
) -> Written:
    """The checkpoint in `folder` as `out`. kind: a key of MIXES. part: "all" (trunk, and NextN head
    where there is one), "trunk" or "mtp". LuceError names the key or tensor at fault."""
    checkpoint = Checkpoint(folder)
    names = hf_qwen35.plain_names(checkpoint, part)
    c = hf_qwen35.read_hparams(read_config(folder), names)
    if part == "mtp" and not c.n_nextn:
        raise FileError(f"{folder} has no mtp.* tensors: there is no NextN head to write")
    if part == "all" and not c.n_nextn:
        say("no mtp.* tensors: the file will have no NextN head")
    if c.tied and "lm_head.weight" in names:
        say(f"{names['lm_head.weight']} is left out: config.json ties it to the embedding")
    plan = hf_qwen35.plan(c, part, checkpoint, names)
    mix = MIXES[kind]
    types, fallbacks = choose(mix, ((t.name, t.shape) for t in plan), c.tied)
    for fallback in fallbacks:
        say(str(fallback))
    writer = gguf.GGUFWriter(None, c.arch)
    add_keys(writer, c, name or folder.resolve().name, mix.file_type)
    writer.add_type("model")
    source = tokenizer or (folder.parent if folder.is_file() else folder)
    add_hf_tokenizer(writer, source, c.n_vocab, say)

    def check(file: _native.File) -> None:
        check_tokenizer(file, source)
        say(_can_run(file, c, plan))

    return write(out, writer, plan, types, _native.default(), check, threads)


def _can_run(file: _native.File, c: Config, plan: list[Planned]) -> str:
    """A line about what luce does with the file; FileError where the core finds fault with it."""
    if not any(t.name.startswith("blk.0.") for t in plan):
        return "a NextN head alone: it drafts for the trunk that it was made with"
    try:
        file.plan_memory("cpu")
    except UnsupportedError as error:
        return "luce does not run this file yet: " + str(error).removeprefix(f"{file.path}: ")
    return f"luce runs this file: {c.n_layer} blocks" + (", NextN head" if c.n_nextn else "")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("checkpoint", type=Path, help="folder with config.json and *.safetensors")
    made.add_argument("out", type=Path, help="GGUF to write; replaced if it exists")
    made.add_argument("--type", choices=MIXES, default=DEFAULT, help="of the matrices (default: %(default)s)")
    parts = made.add_mutually_exclusive_group()
    parts.add_argument("--no-mtp", action="store_true", help="the trunk alone")
    parts.add_argument("--mtp-only", action="store_true", help="the NextN head alone, for --mtp-gguf")
    made.add_argument("--tokenizer", type=Path, metavar="DIR", help="where tokenizer.json is, if elsewhere")
    made.add_argument("--name", help="general.name (default: the folder's name)")
    made.add_argument(
        "--threads", type=thread_count, default=0, metavar="N", help="quantiser threads (default: all)"
    )
    return made


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    part = "trunk" if args.no_mtp else "mtp" if args.mtp_only else "all"
    try:
        written = convert(args.checkpoint, args.out, args.type, part, args.tokenizer, args.name, args.threads)
    except (LuceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
