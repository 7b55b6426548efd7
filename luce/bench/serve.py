"""Loads a server and measures it: its first tokens, streams beside each other, a conversation that grows.

Prompts are random tokens. A cold first token follows a prompt that was never read; a warm one follows the
same prompt and some tokens more, as a turn's new message is. Both count from when a request that is written is
sent. Streams are so many requests at once, each with a
prompt of its own: what counts are all new tokens over the time from the first request to the last token. What is
named decoding are those after each one's first, over the time from the first of these to the last token: one server
still reads prompts in that time and another has read all of them. What is named together are those that came while all
streams decoded: from the last one's first token to the end of the first one that ended, as `luce bench batch`
counts. A conversation is like an agent's: each turn sends the
whole of it again and as much more, as tools answer, and ends where an answer begins, as a template has it.
What is reused is the part of each turn's prompt that the one before had. A client measures over HTTP any
server that answers /v1/completions as OpenAI's does and says `timings`.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from luce.bench.output import Table
from luce.bench.summary import five_digits
from luce.errors import Error
from luce.files.tokenizer import Tokenizer
from luce.text.dialects import dialect_of_turns

ANSWER_S = 1800.0  # A server that says nothing for so long is given up.
TIMING = " ".join(__doc__.split("\n\n")[1].split())


@dataclass(frozen=True)
class Answered:
    """This is one request, by the client's clock. `cached` counts the prompt's tokens that were not read
    again."""

    asked: float
    first: float
    last: float
    tokens: int
    cached: int
    drafted: int
    accepted: int
    arrivals: tuple[tuple[float, int], ...] = ()  # Times of events, and how many tokens had come by then.

    def tokens_at(self, time: float) -> int:
        """Returns how many tokens had come at a time."""
        return max((tokens for at, tokens in self.arrivals if at <= time), default=0)


@dataclass(frozen=True)
class Row:
    """This is what was measured, in seconds, tokens and tokens a second. A field is None where it is not of
    this measure."""

    mode: str
    measure: str
    prompt: int
    streams: int = 1
    first_s: float | None = None
    tok_per_s: float | None = None
    tok_per_s_decoding: float | None = None
    tok_per_s_each: float | None = None
    tok_per_s_together: float | None = None
    reused: float | None = None
    seconds: float | None = None
    accepted: float | None = None
    more: int | None = None  # A warm prompt has so many tokens that were not read before.

    def as_json(self) -> dict[str, Any]:
        return {k: five_digits(v) if isinstance(v, float) else v for k, v in asdict(self).items()}


def turn_of(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that end a message and begin the model's own, none where the vocabulary has no such marks."""
    dialect = dialect_of_turns(tokenizer.control)
    begin, end = dialect.turn
    marked = {begin, end} <= set(tokenizer.control)
    return tokenizer.encode(f"{end}\n{begin}{dialect.assistant}\n") if marked else []


class Client:
    """Asks one server. `turn` has the tokens that end a message and begin the model's own."""

    def __init__(self, url: str, tokenizer: Tokenizer, seed: int = 1):
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port
        self._rng, self._n_vocab = np.random.default_rng(seed), tokenizer.n_vocab
        self.turn = turn_of(tokenizer)

    def tokens(self, n: int) -> list[int]:
        """Returns random tokens, none of the last 16, which are control tokens."""
        return [int(token) for token in self._rng.integers(0, self._n_vocab - 16, n)]

    def complete(self, prompt: Sequence[int], n: int) -> Answered:
        """Returns what came of n greedy tokens after a prompt."""
        body = {"prompt": list(prompt), "max_tokens": n, "temperature": 0, "stream": True, "ignore_eos": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                "timings_per_token": True, "cache_prompt": True}  # fmt: skip
        written = json.dumps(body)  # That is a client's own time: 3 ms of 30,000 tokens.
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_S)
        asked, first, tokens, timings = time.perf_counter(), 0.0, 0, dict[str, Any]()
        arrivals = list[tuple[float, int]]()
        try:
            connection.request("POST", "/v1/completions", written, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise Error(f"the server says {response.status}: {response.read(2000).decode()}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise Error(f"the server says {event['error']}")
                now = time.perf_counter()
                first = first or now
                timings = event.get("timings") or timings
                came = (event.get("usage") or {}).get("completion_tokens", timings.get("predicted_n", tokens))
                if came != tokens:
                    arrivals.append((now, came))
                tokens = came
        except (OSError, http.client.HTTPException) as error:
            raise Error(f"the server does not answer: {error}") from error
        finally:
            connection.close()
        return Answered(asked, first, time.perf_counter(), tokens, timings.get("cache_n", 0),
                        timings.get("draft_n", 0), timings.get("draft_n_accepted", 0), tuple(arrivals))  # fmt: skip


def first_tokens(client: Client, mode: str, lengths: Sequence[int], more: Sequence[int]) -> Iterator[Row]:
    """Measures the first token of a cold prompt of each length, then of the same prompt with more tokens behind it."""
    for n in lengths:
        prompt = client.tokens(n)
        cold = client.complete(prompt, 4)
        yield Row(mode, "cold", n, first_s=cold.first - cold.asked)
        for new in more:
            warm = client.complete(prompt + client.tokens(new), 4)
            yield Row(mode, "warm", n + new, more=new, first_s=warm.first - warm.asked, reused=warm.cached / n)


def streams(client: Client, mode: str, counts: Sequence[int], prompt: int, new: int) -> Iterator[Row]:
    """Requests beside each other."""
    for count in counts:
        prompts = [client.tokens(prompt) for _ in range(count)]
        with ThreadPoolExecutor(count, "luce-client") as pool:
            found = list(pool.map(lambda tokens: client.complete(tokens, new), prompts))
        last = max(each.last for each in found)
        seconds, decoding = (last - min(getattr(each, at) for each in found) for at in ("asked", "first"))
        drafted = sum(each.drafted for each in found)
        yield Row(
            mode,
            "streams",
            prompt,
            count,
            first_s=median(each.first - each.asked for each in found),
            tok_per_s=sum(each.tokens for each in found) / seconds,
            tok_per_s_decoding=sum(each.tokens - 1 for each in found) / decoding,
            tok_per_s_together=together(found),
            tok_per_s_each=median((each.tokens - 1) / (each.last - each.first) for each in found),
            seconds=seconds,
            accepted=sum(each.accepted for each in found) / drafted if drafted else None,
        )


def together(found: Sequence[Answered]) -> float | None:
    """Returns the tokens a second of all streams while all of them decoded; None where they never did, or a server
    tells only at the end how many tokens came."""
    begin, end = max(each.first for each in found), min(each.last for each in found)
    if end <= begin or any(len(each.arrivals) < 2 for each in found):
        return None
    return sum(each.tokens_at(end) - each.tokens_at(begin) for each in found) / (end - begin)


def turn_lengths(turns: int, length: int) -> tuple[int, int]:
    """Returns how many tokens a conversation's first prompt has, and how many more each one after it."""
    return length // 5, (length - length // 5) // max(turns - 1, 1)


def conversation(client: Client, mode: str, turns: int, length: int, new: int) -> Iterator[Row]:
    """Turns up to a prompt of `length`: the first is a fifth of it, as system prompts and tools are; the last
    row is of all."""
    begin, step = turn_lengths(turns, length)
    first = client.tokens(begin - len(client.turn)) + client.turn
    prompt, before, reused, firsts = first, 0, 0, list[float]()
    began = time.perf_counter()
    for turn in range(turns):
        found = client.complete(prompt, new)
        firsts.append(found.first - found.asked)
        share = found.cached / before if before else None
        yield Row(mode, f"turn {turn + 1}", len(prompt), first_s=firsts[-1], reused=share)
        reused, before = reused + found.cached, len(prompt)
        prompt = prompt + client.tokens(step - len(client.turn)) + client.turn
    seconds = time.perf_counter() - began
    lengths = [begin + turn * step for turn in range(turns)]
    share = reused / max(sum(lengths[:-1]), 1)
    yield Row(mode, "conversation", lengths[-1], first_s=median(firsts), reused=share, seconds=seconds)


@dataclass(frozen=True)
class Running:
    """This is a server as a process of its own."""

    url: str
    pid: int


@contextmanager
def luce_server(model: Path, *options: str) -> Iterator[Running]:
    """Runs `luce serve` on a free port."""
    # A folder named luce in the working folder is none of its modules.
    own = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", "luce"]
    command = [*own, "serve", "--gguf", str(model), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("luce serves "):
                break
        else:
            raise Error(f"luce serve ended: {' '.join(lines)[-2000:]}")
        stderr = process.stderr
        Thread(target=lambda: [None for _ in stderr], name="luce-stderr", daemon=True).start()
        yield Running(line.split()[-1], process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Makes a table of Row.as_json() of each row, without the single turns."""
    header = ["mode", "measure", "prompt", "streams", "first token ms", "tok/s", "decoding", "together", "each",
              "reused", "s"]  # fmt: skip

    def cell(value: float | None, digits: int = 1, scale: float = 1.0) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    return header, [
        [r["mode"], r["measure"] + (f" +{r['more']}" if r["more"] else ""), str(r["prompt"]), str(r["streams"]),
         cell(r["first_s"], 1, 1000), cell(r["tok_per_s"]), cell(r["tok_per_s_decoding"]),
         cell(r["tok_per_s_together"]), cell(r["tok_per_s_each"]), cell(r["reused"], 3), cell(r["seconds"], 2)]
        for r in rows if not r["measure"].startswith("turn")
    ]  # fmt: skip
