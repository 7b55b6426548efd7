#!/usr/bin/env python3
"""luce's server beside llama-server, on one file, in one run: `luce bench serve`'s measures of both.

Each server is asked by the same client with the same prompts, one after the other; llama-server has as many
slots as luce has sequences, its own prompt cache and checkpoints, and its own drafts with --draft N. Outside
the timing windows: loading, opening, one request that warms up.

    python bench/peer_serve.py oracle-27b-0.8.gguf --bin peer/bin --modes off,auto --draft 2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import llamacpp

from luce import _native
from luce.bench.origin import command_text, origin, write_row
from luce.bench.output import as_markdown
from luce.bench.serve import TIMING, Client, Row, conversation, first_tokens, luce_server, streams, table
from luce.engine import Files
from luce.errors import LuceError

WARM_UP = 16


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measured(args: argparse.Namespace, name: str, url: str) -> Iterator[Row]:
    client = Client(url, args.n_vocab)
    client.complete(client.tokens(32), WARM_UP)
    yield from first_tokens(client, name, args.lengths)
    yield from streams(client, name, args.counts, args.prompt_tokens, args.n_gen)
    if args.turns:
        yield from conversation(client, name, args.turns, args.conversation, 64)


def measure(args: argparse.Namespace, where: str) -> Iterator[Row]:
    ctx, most = max(*args.lengths, args.conversation if args.turns else 0) + 256, max(args.counts)
    for mode in args.modes:
        options = ["--spec", mode, "--ctx", str(ctx), "--parallel", str(most), "--device", args.device,
                   "--threads", str(args.threads)]  # fmt: skip
        with luce_server(args.model, *options, *args.luce_option) as server:
            yield from measured(args, f"luce {mode}", server.url)
    drafts = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(args.draft)]
    for name, options in (("llama-server", []), ("llama-server drafts", drafts)):
        if args.no_server or (options and not args.draft):
            continue
        with llamacpp.LlamaServer(
            args.bin / "llama-server", args.model, args.threads, where, *options, n_ctx=ctx, slots=most
        ) as peer:
            yield from measured(args, name, peer.url)


def numbers(text: str) -> list[int]:
    return [int(n.removesuffix("k")) * (1024 if n.endswith("k") else 1) for n in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--bin", type=Path, metavar="DIR", help="folder of llama.cpp's programs")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument(
        "--modes", default="off,auto", type=lambda t: t.split(","), help="of --spec, for luce"
    )
    parser.add_argument("--draft", type=int, default=0, help="drafts of llama-server's second run; 0: none")
    parser.add_argument("--lengths", default="1k,8k,32k", type=numbers)
    parser.add_argument("--counts", default="1,2,4,8,16", type=numbers)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--n-gen", type=int, default=128, help="new tokens of each stream")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--conversation", type=int, default=30000, help="tokens of the last prompt")
    parser.add_argument("--luce-option", action="append", default=[], help="for luce serve; may be repeated")
    parser.add_argument("--no-server", action="store_true", help="leave llama-server out")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not args.no_server and args.bin is None:
        raise SystemExit("peer_serve: error: --bin DIR holds llama-server, or say --no-server")
    try:
        with Files(args.model) as files:
            args.n_vocab = files.tokenizer.n_vocab
        where = _native.default().devices()[0].name if args.device == "auto" else args.device
        rows = []
        for row in measure(args, where):
            rows.append(row.as_json())
            say(json.dumps(rows[-1]))
    except (LuceError, llamacpp.PeerError, OSError) as error:
        raise SystemExit(f"peer_serve: error: {error}") from None
    command = command_text(["bench/peer_serve.py", args.model.name, *sys.argv[2:]])
    head = origin("peer serve", where, args.model, command, args.threads, args.commit)
    result = head | {"timing": TIMING, "rows": rows}
    say(f"\n{as_markdown(table(rows))}")
    print(json.dumps(result, indent=1))
    if args.save is not None:
        kind = "cpu" if where == "cpu" else "gpu"
        say(f"wrote {write_row(args.save, f'serve-{args.model.stem}-{kind}', result)}")


if __name__ == "__main__":
    main()
