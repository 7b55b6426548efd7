#!/usr/bin/env python3
"""Measures images of luce and of llama-server, with one model and one tower, in one run.

Encode: from the patches of an image, which lie in host memory, to its rows there, each size args.repeat times, after
one that warms up. llama-server's is from the line of its log that an encode begins with to the one that its rows are
read with, by the log's own clock. First token: a chat of one image and a short question, by the clock of the client. A
cold one has an image that was never seen; a warm one says the same, an answer, and a second question. The first
one includes opening the image and stretching it. Outside the timing windows: loading, opening, and one chat with an
image that warms up.

    python tools/make_oracle.py --shape 27b --tower mmproj.gguf oracle-27b.gguf
    python bench/peer_images.py oracle-27b.gguf --mmproj mmproj.gguf --bin peer/bin

llama.cpp stretches images to other sizes than luce, so a row says how many tokens each side makes of one: it is let
have as many as luce takes (--image-max-tokens).
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import llamacpp
import numpy as np
from peer_serve import device_of, say

from luce.bench.origin import command_text, model_hash, origin, print_row
from luce.bench.output import as_markdown
from luce.bench.serve import ANSWER_S, luce_server
from luce.bench.summary import five_digits
from luce.errors import Error
from luce.images.opening import pillow
from luce.images.sight import MOST_TOKENS, Sight

TIMING = " ".join(__doc__.split("\n\n")[1].split())
QUESTIONS = ("What is wrong here?", "And what should be done?")
LUCE, PEER = "luce", "llama-server"
WARM_UP = (256, 256)
# [minutes.seconds.milliseconds.microseconds], as --log-timestamps writes it.
_STAMP = re.compile(r"^(?:\x1b\[\d*m)?(\d+)\.(\d\d)\.(\d\d\d)\.(\d\d\d)")
BEGUN, ENCODED = "encoding mtmd batch", "decoding image batch 1/"
Size = tuple[int, int]


def png(size: Size, seed: int) -> bytes:
    """Returns an image that no other seed has: edges, like a screenshot's, and noise."""
    Image, _ = pillow()
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(seed).integers(0, 16, (height, width), np.uint8)
    edges = ((x // 40 + y // 24) % 2 * 200).astype(np.uint8)
    held = io.BytesIO()
    Image.fromarray(edges + noise).convert("RGB").save(held, "PNG", compress_level=1)
    return held.getvalue()


def stamp(line: str) -> float | None:
    """Returns the seconds that a line of llama-server's log begins with."""
    found = _STAMP.match(line)
    if found is None:
        return None
    minutes, seconds, thousandths, millionths = map(int, found.groups())
    return minutes * 60 + seconds + thousandths / 1e3 + millionths / 1e6


def encodes(log: str) -> list[float]:
    """Returns the seconds of each encode that llama-server's log tells of, in order."""
    found, begun = [], None
    for line in log.splitlines():
        if BEGUN in line:
            begun = stamp(line)
        elif ENCODED in line and begun is not None and (end := stamp(line)) is not None:
            found.append(end - begun)
            begun = None
    return found


def chat(url: str, data: bytes, turns: int) -> tuple[float, int]:
    """Returns the seconds to the first token of a chat that shows an image and has so many questions, and how many
    tokens its prompt has."""
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [shown, {"type": "text", "text": QUESTIONS[0]}]},
        {"role": "assistant", "content": "Nothing."},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    body = {"messages": messages[: 2 * turns - 1], "max_tokens": 8, "temperature": 0, "stream": True,
            "ignore_eos": True, "cache_prompt": True, "stream_options": {"include_usage": True}}  # fmt: skip
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=ANSWER_S)
    said, first, tokens = json.dumps(body), 0.0, 0
    asked = time.perf_counter()
    try:
        connection.request("POST", "/v1/chat/completions", said, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise Error(f"the server says {response.status}: {response.read(2000).decode()}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise Error(f"the server says {event['error']}")
            delta = (event.get("choices") or [{}])[0].get("delta") or {}
            if not first and (delta.get("content") or delta.get("reasoning_content")):
                first = time.perf_counter()
            tokens = (event.get("usage") or {}).get("prompt_tokens", tokens)
    except (OSError, http.client.HTTPException) as error:
        raise Error(f"the server does not answer: {error}") from error
    finally:
        connection.close()
    if not first:
        raise Error("the server ended a chat without a token")
    return first - asked, tokens


def encoded(args: argparse.Namespace, where: str) -> Iterator[dict[str, Any]]:
    """Encodes images by luce, in this process."""
    with Sight(args.mmproj, args.threads if where == "cpu" else 0, where, args.image_tokens) as sight:
        def run(data: bytes) -> tuple[float, float, Any]:
            begun = time.perf_counter()
            picture = sight.processor.picture(data)
            patches = picture.patches()
            opened = time.perf_counter()
            sight.tower.encode(patches, picture.grid, args.threads if where == "cpu" else 0)
            return opened - begun, time.perf_counter() - opened, picture

        for size in args.sizes:
            run(png(size, 0))
            found = [run(png(size, 1 + i)) for i in range(args.repeat)]
            yield {
                "mode": LUCE, "measure": "encode", "image": "x".join(map(str, size)), "tokens": found[0][2].rows,
                "seconds": median(each[1] for each in found), "opening_s": median(each[0] for each in found),
                "runs": args.repeat,
            }  # fmt: skip


def first_tokens(
    url: str, mode: str, args: argparse.Namespace, log: Callable[[], str] | None = None
) -> Iterator[dict[str, Any]]:
    """Measures the first token of chats with one image, cold and warm, and with a log the encodes of them."""
    chat(url, png(WARM_UP, 0), 1)
    for number, size in enumerate(args.sizes):
        cold, warm, told = [], [], []
        for i in range(args.repeat):
            data, before = png(size, 1000 * (number + 1) + i), len(encodes(log())) if log else 0
            cold.append(chat(url, data, 1))
            warm.append(chat(url, data, 2)[0])
            told.append(encodes(log())[before:] if log else [])
        image = {"mode": mode, "image": "x".join(map(str, size)), "runs": args.repeat}
        if log and not all(told):
            print("llama-server's log tells of no encode: its first tokens alone are measured", file=sys.stderr)
        elif log:
            encode = {"seconds": median(each[0] for each in told), "encodes_of_two_turns": max(map(len, told))}
            yield image | {"measure": "encode"} | encode
        first = {"cold_s": median(each[0] for each in cold), "warm_s": median(warm), "prompt": cold[0][1]}
        yield image | {"measure": "first token"} | first


def measure(args: argparse.Namespace, where: str) -> Iterator[dict[str, Any]]:
    yield from encoded(args, where)
    options = ["--mmproj", str(args.mmproj), "--ctx", str(args.ctx), "--parallel", "1", "--device", args.device]
    if where == "cpu":  # Elsewhere luce refuses the option, since a GPU has no use for it.
        options += ["--threads", str(args.threads)]
    if args.image_tokens is not None:
        options += ["--image-tokens", str(args.image_tokens)]
    with luce_server(args.model, *options) as running:
        yield from first_tokens(running.url, LUCE, args)
    if args.bin is None:
        return
    peer = llamacpp.LlamaServer(
        args.bin / "llama-server", args.model, args.threads, where, "--mmproj", str(args.mmproj), "--jinja",
        "--image-max-tokens", str(args.image_tokens or MOST_TOKENS), "--log-prefix", "--log-timestamps", "-lv", "4",
        *([] if where != "cpu" else ["--no-mmproj-offload"]), n_ctx=args.ctx,
    )  # fmt: skip
    with peer:
        yield from first_tokens(peer.url, PEER, args, peer.log_text)


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    def ms(row: dict[str, Any], key: str) -> str:
        return f"{row[key] * 1000:.1f}" if key in row else ""

    header = ["mode", "measure", "image", "tokens", "encode ms", "opening ms", "cold ms", "warm ms"]
    keys = ("seconds", "opening_s", "cold_s", "warm_s")
    return header, [
        [row["mode"], row["measure"], row["image"], str(row.get("tokens", row.get("prompt", "")))]
        + [ms(row, key) for key in keys]
        for row in rows
    ]


def sizes(text: str) -> list[Size]:
    found = [re.fullmatch(r"(\d+)x(\d+)", each) for each in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text}: expected sizes as 1920x1080,3840x2160")
    return [(int(each[1]), int(each[2])) for each in found if each]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--mmproj", type=Path, required=True, help="the tower")
    parser.add_argument("--bin", type=Path, metavar="DIR", help="folder of llama.cpp's programs; none: luce alone")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--sizes", default="1920x1080,3840x2160", type=sizes)
    parser.add_argument("--image-tokens", type=int, metavar="N", help="both reduce images to so many tokens")
    parser.add_argument("--repeat", type=int, default=3, help="images of each size; medians are kept")
    parser.add_argument("--ctx", type=int, default=16384)
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    return parser.parse_args()


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: five_digits(value) if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    args = arguments()
    load = [round(each, 1) for each in os.getloadavg()]
    rows: list[dict[str, Any]] = []
    try:
        where = device_of(args.device)
        for row in measure(args, where):
            rows.append(rounded(row))
            say(json.dumps(rows[-1]))
    except (Error, llamacpp.PeerError, OSError) as error:
        raise SystemExit(f"peer_images: error: {error}") from None
    command = command_text(["bench/peer_images.py", args.model.name, *sys.argv[2:]])
    head = origin("peer images", where, args.model, command, args.threads, args.commit)
    tower = {"file": args.mmproj.name, "bytes": args.mmproj.stat().st_size, "sha256": model_hash(args.mmproj)}
    say(f"\n{as_markdown(table(rows))}")
    result = head | {"tower": tower, "timing": TIMING, "load_at_start": load, "rows": rows}
    print_row(result, args.save, f"images-{args.model.stem}-{'cpu' if where == 'cpu' else 'gpu'}")


if __name__ == "__main__":
    main()
