#!/usr/bin/env python3
"""Sends many clients to one server: random cancels, killed clients, bad requests, long prompts.

Each answer has to be the one that the engine gives alone, each request has an end, and nothing is left over.
The suite runs a short form. This runs five minutes of it, and records the memory of the server at each
minute, which may not grow once the caches are full:

python tests/support/serve_load.py --minutes 5 --save bench/results
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from luce.bench.origin import command_text, origin, write_row
from luce.bench.serve import luce_server
from luce.data import BOX
from luce.decode.engine import Engine
from luce.decode.request import Request
from luce.native.structs import Sampling
from luce.planning.opened import Files
from luce.planning.plan import Options

CODE = Path(__file__).read_text()


def cases(count: int, chunk: int, threads: int = 1, longest: int = 3000) -> list[tuple[dict, str]]:
    """Returns requests with what the engine says to each alone: greedy and sampled, short prompts and long
    ones that begin alike."""
    rng, found = random.Random(1), []
    with (
        Files(BOX, device="cpu") as files,
        Engine.open(files, Options(threads=threads, chunk=chunk)) as engine,
    ):
        for n in range(count):
            prompt = CODE[: rng.choice([40, 300, 900, longest])] + f"\n# {rng.randrange(4)}\n"
            sampling = {
                "temperature": rng.choice([0.0, 0.8]),
                "top_k": 30,
                "top_p": 0.9,
                "min_p": 0.0,
                "seed": n,
            }
            new = rng.choice([1, 8, 40])
            ids = files.tokenizer.encode(prompt, special=False, add_bos=True)
            *_, last = engine.generate(Request(tuple(ids), new, Sampling(**sampling)))
            found.append(({"prompt": prompt, "max_tokens": new, **sampling}, last.text))
    return found


STREAM = """
import sys, time, urllib.error
from urllib.request import Request, urlopen
try:
    urlopen(Request(sys.argv[1] + "/v1/completions", sys.argv[2].encode())).read(1)
except urllib.error.HTTPError as error:
    assert error.code == 503
print(".", end="", flush=True)
time.sleep(60)
"""
GROWTH = 1.1  # Memory may grow so much after the second minute, since the caches are full by then.
BAD = ({"prompt": 3}, {"prompt": "a", "n": 0}, {"prompt": CODE * 3}, {"prompt": "a", "top_p": 7})


class Load:
    """These are clients of one server. `counts` is what happened, and `wrong` what must not have."""

    def __init__(self, url: str, known: list[tuple[dict, str]]):
        self._url, self._known = url, known
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, clients: int, going: Callable[[int], bool]) -> None:
        """Lets each client ask as long as going(requests that it has made)."""
        threads = [threading.Thread(target=self._client, args=(n, going)) for n in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, seed: int, going: Callable[[int], bool]) -> None:
        rng, done = random.Random(seed), 0
        with httpx.Client(base_url=self._url, timeout=300) as http:
            while going(done) and not self.wrong:
                try:
                    self._ask(http, rng)
                except Exception as error:  # No request may end without an answer.
                    self.wrong.append(f"{type(error).__name__}: {error}")
                done += 1

    def _ask(self, http: httpx.Client, rng: random.Random) -> None:
        body, text = rng.choice(self._known)
        act = rng.random()
        if act < 0.01:
            self._killed(body)
        elif act < 0.1:
            status = http.post("/v1/completions", json=rng.choice(BAD)).status_code
            self._note("bad", status in (400, 413), f"a bad request got {status}")
        elif act < 0.35:
            more = {**body, "max_tokens": 100, "stream": True}
            with http.stream("POST", "/v1/completions", json=more) as response:
                for _, _ in zip(range(rng.randrange(4)), response.iter_raw(), strict=False):
                    pass
            self._note("gone", response.status_code in (200, 503), f"a stream got {response.status_code}")
        else:
            response = http.post("/v1/completions", json=body)
            if response.status_code == 503:
                self._note("busy", "retry-after" in response.headers, "503 without Retry-After")
                time.sleep(0.2)
                return
            said = response.json()["choices"][0]["text"] if response.status_code == 200 else response.text
            self._note("right", said == text, f"{body} gave {said!r}, alone it gives {text!r}")

    def _killed(self, body: dict) -> None:
        """Lets a client of its own process be killed in the middle of its answer."""
        asked = json.dumps({**body, "max_tokens": 100, "stream": True})
        with subprocess.Popen([sys.executable, "-c", STREAM, self._url, asked], stdout=subprocess.PIPE) as it:
            assert it.stdout is not None
            first = it.stdout.read(1)
            it.kill()
        self._note("killed", first == b".", f"the client to be killed got no answer: {first!r}")

    def _note(self, what: str, right: bool, wrong: str) -> None:
        self.counts[what] += 1
        if not right:
            self.wrong.append(wrong)


def _memory(pid: int) -> float:
    """Returns the MiB that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def _left(url: str) -> dict[str, float]:
    """Returns what a server holds that nobody asks any more, by its metrics."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    named = {each.name: each.value for family in families for each in family.samples if not each.labels}
    return {name: named[f"luce:{name}"] for name in ("num_requests_running", "num_requests_waiting")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", type=Path, metavar="DIR", help="a folder for the result row")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    known = cases(24, 256, args.threads)
    options = ["--parallel", args.slots, "--threads", args.threads, "--chunk", 256, "--device", "cpu"]
    options += ["--queue", 52, "--cache-ram", 0.25]
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        options += ["--cache-dir", folder, "--cache-disk", 0.25]
        with luce_server(BOX, *map(str, options)) as server:
            load, until = Load(server.url, known), time.monotonic() + 60 * args.minutes
            working = threading.Thread(
                target=load.run, args=(args.clients, lambda _: time.monotonic() < until)
            )
            working.start()
            while working.is_alive():
                working.join(60)
                memory.append(round(_memory(server.pid)))
                print(f"{memory[-1]} MiB, {dict(load.counts)}", flush=True)
            time.sleep(1)
            left = _left(server.url)
    if any(left.values()):
        load.wrong.append(f"left over: {left}")
    if len(memory) > 2 and memory[-1] > GROWTH * memory[1]:
        load.wrong.append(f"memory grew: {memory} MiB")
    if args.save is not None:
        head = origin("serve load", "cpu", BOX, command_text(sys.argv), args.threads, None)
        row = head | {"clients": args.clients, "slots": args.slots, "minutes": args.minutes,
                      "counts": dict(load.counts), "wrong": len(load.wrong), "left": left,
                      "memory_mib": memory}  # fmt: skip
        print(f"wrote {write_row(args.save, 'serve-load-box-cpu', row)}")
    if load.wrong:
        raise SystemExit("\n".join(load.wrong[:5]))


if __name__ == "__main__":
    main()
