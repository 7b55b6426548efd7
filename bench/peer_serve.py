#!/usr/bin/env python3
"""Takes `luce bench serve`'s measures of luce's server and of llama-server, on one file, in one run.

Each server is asked by the same client with the same prompts; llama-server has as many slots as luce has
sequences, its own prompt cache and checkpoints, and its own drafts with --draft N. One server is measured
after the other, or with --together all are up at once (those that are not asked sleep) and each measure goes
round them: what else the machine does then meets them alike. Outside the timing windows: loading, opening,
one request that warms up.

    python bench/peer_serve.py oracle-27b-0.8.gguf --bin peer/bin --modes off,auto --draft 2
    python bench/peer_serve.py luce/data/box.gguf --bin peer/bin --device cpu --threads 2 --draft 2 \\
        --context 40960 --together --repeat 3 --long "luce auto,llama-server"

--context N has both read a copy of the file that says it was trained for N positions: the box's 2048 are
fewer than an agent's prompts, and which tokens it says there does not matter to the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import llamacpp

from luce import native as _native
from luce.bench.origin import command_text, origin, print_row
from luce.bench.output import as_markdown
from luce.bench.serve import TIMING, Client, Row, conversation, first_tokens, luce_server, streams, table
from luce.errors import Error
from luce.planning.opened import Files

WARM_UP = 16
Rows = Sequence[dict[str, Any]]
PLAIN, DRAFTS = "llama-server", "llama-server drafts"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Part:
    """This is a part of a run. `long` says that it is of long prompts."""

    long: bool
    measure: Callable[..., Iterator[Row]]  # It takes the client, the mode, and then the arguments below.
    arguments: tuple[Any, ...]


def parts(args: argparse.Namespace) -> Iterator[Part]:
    """Returns those of one run, with the streams args.repeat times."""
    for _ in range(args.repeat):
        for count in args.counts:
            yield Part(False, streams, ([count], args.prompt_tokens, args.n_gen))
    for n in args.lengths:
        yield Part(True, first_tokens, ([n], [64]))
    if args.turns:
        yield Part(True, conversation, (args.turns, args.conversation, 64))


def servers(args: argparse.Namespace, model: Path, where: str) -> dict[str, AbstractContextManager[Any]]:
    """Returns them by name; each gives what has a url."""
    ctx, most = max(*args.lengths, args.conversation if args.turns else 0) + 256, max(args.counts)
    found: dict[str, AbstractContextManager[Any]] = {}
    for mode in args.modes:
        options = ["--spec", mode, "--ctx", str(ctx), "--parallel", str(most), "--device", args.device]
        if where == "cpu":  # Elsewhere luce refuses the option, since a GPU has no use for it.
            options += ["--threads", str(args.threads)]
        found[f"luce {mode}"] = luce_server(model, *options, *args.luce_option)
    drafts = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(args.draft)]
    for name, options in ((PLAIN, []), (DRAFTS, drafts)):
        if not args.no_server and (not options or args.draft):
            found[name] = llamacpp.LlamaServer(
                args.bin / "llama-server", model, args.threads, where, *options, n_ctx=ctx, slots=most
            )
    return found


def measure(args: argparse.Namespace, model: Path, where: str) -> Iterator[Row]:
    def opened(stack: ExitStack, server: AbstractContextManager[Any]) -> Client:
        client = Client(stack.enter_context(server).url, args.tokenizer)
        client.complete(client.tokens(32), WARM_UP)
        return client

    found = servers(args, model, where)
    if not set(args.long or ()) <= set(found):
        raise Error(f"--long {','.join(args.long)}: the servers are {', '.join(found)}")
    for group in [list(found)] if args.together else [[name] for name in found]:
        with ExitStack() as stack:
            clients = {name: opened(stack, found[name]) for name in group}
            for number, part in enumerate(parts(args)):
                for name in group[:: -1 if number % 2 else 1]:  # Who comes first changes from round to round.
                    if not part.long or args.long is None or name in args.long:
                        yield from part.measure(clients[name], name, *part.arguments)


def medians(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns one row for all that measure the same, in the order of their first ones."""
    same: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        same.setdefault((row.mode, row.measure, row.prompt, row.streams), []).append(row.as_json())
    found = []
    for several in same.values():
        middle = {
            key: median(row[key] for row in several)
            for key, value in several[0].items()
            if type(value) is float
        }
        found.append(several[0] | middle | ({"runs": len(several)} if len(several) > 1 else {}))
    return found


def ratios(rows: Rows) -> dict[str, Any]:
    """Says what luce is measured against, by its mode: "reused", the share of the conversation;
    "reused_least", that of the turn with the least; "warm_of_cold", the first token of the last turn over
    llama-server's cold one of the longest prompt; "streams" and "decoding", by count, luce's tokens a second
    over the peer's. The peer of modes that draft is llama-server with drafts, if it was asked."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    found: dict[str, Any] = {}
    for mode in (each for each in modes if each.startswith("luce")):
        peer = DRAFTS if mode != "luce off" and DRAFTS in modes else PLAIN
        own, other = ([row for row in rows if row["mode"] == name] for name in (mode, peer))
        turns = [row for row in own if row["measure"].startswith("turn")]
        cold = [row for row in rows if row["mode"] == PLAIN and row["measure"] == "cold"]

        def over(key: str, own: Rows = own, other: Rows = other) -> dict[str, float]:
            speed = {row["streams"]: row[key] for row in other if row["measure"] == "streams"}
            pairs = [(row["streams"], row[key]) for row in own if row["measure"] == "streams"]
            return {str(n): round(mine / speed[n], 3) for n, mine in pairs if n in speed}

        found[mode] = {
            "peer": peer,
            "reused": next((row["reused"] for row in own if row["measure"] == "conversation"), None),
            "reused_least": min((row["reused"] for row in turns if row["reused"] is not None), default=None),
            "warm_of_cold": turns[-1]["first_s"] / cold[-1]["first_s"] if turns and cold else None,
            "streams": over("tok_per_s"),
            "decoding": over("tok_per_s_decoding"),
        }
    return found


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
    parser.add_argument("--together", action="store_true", help="all servers are up at once")
    parser.add_argument("--repeat", type=int, default=1, help="of the streams; medians are kept")
    parser.add_argument(
        "--long", type=lambda t: t.split(","), help="servers whose first tokens and conversation are measured"
    )
    parser.add_argument("--context", type=int, metavar="N", help="read a copy that is for N positions")
    parser.add_argument("--no-server", action="store_true", help="leave llama-server out")
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    return parser.parse_args()


def with_context(model: Path, context: int | None, folder: Path) -> Path:
    """Returns a copy of the file that says it was trained for so many positions, or the file itself."""
    if context is None:
        return model
    copy = Path(shutil.copy(model, folder / model.name))
    reader = gguf.GGUFReader(copy, "r+")
    arch = str(reader.fields["general.architecture"].contents())
    field = reader.fields[f"{arch}.context_length"]
    field.parts[field.data[0]][0] = context
    return copy


def device_of(name: str) -> str:
    """Returns the core's name of a device: auto is the first, and cuda the first GPU."""
    names = [device.name for device in _native.default().devices()]
    found = names[0] if name == "auto" else next((each for each in names if each.startswith(name)), None)
    if found is None:
        raise llamacpp.PeerError(f"there is no device {name}: there are {', '.join(names)}")
    return found


def main() -> None:
    args = arguments()
    if not args.no_server and args.bin is None:
        raise SystemExit("peer_serve: error: --bin DIR holds llama-server, or say --no-server")
    load = [round(each, 1) for each in os.getloadavg()]
    try:
        with Files(args.model) as files:
            args.tokenizer = files.tokenizer
        where = device_of(args.device)
        rows: list[Row] = []
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(args, with_context(args.model, args.context, Path(folder)), where):
                rows.append(row)
                say(json.dumps(row.as_json()))
    except (Error, llamacpp.PeerError, OSError) as error:
        raise SystemExit(f"peer_serve: error: {error}") from None
    command = command_text(["bench/peer_serve.py", args.model.name, *sys.argv[2:]])
    head = origin("peer serve", where, args.model, command, args.threads, args.commit)
    middle = medians(rows)
    result = head | {"timing": TIMING, "load_at_start": load, "ratios": ratios(middle), "rows": middle}
    say(f"\n{as_markdown(table(middle))}\n{json.dumps(result['ratios'], indent=1)}")
    print_row(result, args.save, f"serve-{args.model.stem}-{'cpu' if where == 'cpu' else 'gpu'}")


if __name__ == "__main__":
    main()
