"""Has one request under way: its prompt, its job, and the pieces that come of it, in a form that serves every
API."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cache
from time import monotonic
from typing import Annotated, Any

import msgspec

from luce.decode.events import Embedded, Event, Failed, Finished, Scored, Started, Tokens
from luce.decode.request import Compressed, Request
from luce.decode.scheduler import Job
from luce.errors import ArgumentError, Busy, Cancelled, ContextFull, Error
from luce.images.sight import Placed
from luce.model.answer import stop_of
from luce.native.structs import Logprobs, Penalties, Sampling
from luce.server.ask import Ask, Refused, TooLong, refuse
from luce.server.models import Served
from luce.server.replicas import Replica
from luce.server.watch import Usage, Watch
from luce.text.dialects import QWEN, Opening
from luce.text.grammar import Matcher
from luce.text.held import Held
from luce.text.infill import Gap
from luce.text.pieces import (
    CallEnd,
    Piece,
    Shown,
    Text,
    Whole,
    in_parts,
    joined,
)
from luce.text.prompt import opening_of
from luce.text.thinking import said_of

KEEP_ALIVE = 15.0  # After so many seconds without a piece, a stream says that it lives.
# Python runs one thread at a time: the loop waits so long that the engine's thread has its turn and its device begins,
# and then does what the answer's beginning takes. Else the engine began half a millisecond later.
ENGINE_FIRST_S = 0.001


@dataclass(frozen=True)
class Silence:
    """Says that nothing has come for KEEP_ALIVE seconds."""


class Answer:
    """This is a model's answer to `ask`. After begin(), pieces() gives what comes; then `reason` is "stop",
    "stop_string", "length" or "calls". However it ends, end() has to be called: it cancels a job that still
    runs."""

    def __init__(self, model: Served, ask: Ask, watch: Watch):
        self.model, self.ask = model, ask
        model.users += 1
        self._holds = True
        self._held = Held(ask.tools, ask.choice, ask.parallel_calls, ask.constraint, ask.open_objects)
        self.usage, self.reason = Usage(), ""
        self.stop_string: str | None = None
        self.created = int(time.time())
        self.finished: Finished | None = None
        self._compressed: Compressed | None = None
        self._watch = watch
        self._began = time.perf_counter()
        self._first = self._last = 0.0  # Its first and its last tokens came at these times.
        self._events: list[Event] = []  # Nobody has read them yet.
        self._awaited: asyncio.Future[None] | None = None  # Who waits for events awaits it.
        self._requests: list[Request] = []  # They run one after the other.
        self._job: Job | None = None
        self.replica: Replica | None = None  # It runs the job, or the last one did.
        self._opening, self._shown = Opening(QWEN), Shown(ask.thoughts)
        self._parser = self._held.parser(self._opening)
        self._done = False
        self._logprobs: list[tuple[int, Logprobs]] = []
        self.prompt: list[int] = []  # Its tokens.
        self._placed = Placed([], [])  # Of a conversation they, and its images.
        self.vector: tuple[float, ...] = ()
        self.prompt_logprobs: list[Logprobs] = []  # Those of its tokens from the second on.
        self._last_bytes = b""  # They are the thoughts' last ones.

    async def begin(self) -> None:
        """Makes the prompt and hands it to the engine. Where it raises Refused, nothing runs."""
        await self.prepare()
        self.start()
        await asyncio.sleep(ENGINE_FIRST_S)

    async def prepare(self) -> None:
        """Makes the prompt. Raises Refused where it cannot be."""
        prompt = self.prompt = await self._prompt()
        n_ctx, new = self.model.info.n_ctx, self.ask.max_tokens
        if not prompt:
            raise Refused(400, "the prompt is empty", param=self._param)
        if self.ask.keep is not None:
            prompt = await self._compress(prompt)
        if len(prompt) > n_ctx:
            raise TooLong(len(prompt), n_ctx)
        self.usage.prompt = len(prompt)
        images = await self.model.encoded(self._placed)
        self._placed = Placed([], [])  # Its pixels have served.
        self.usage.images, self.usage.encoded = len(images), sum(image.fresh for image in images)
        grammar = None
        if not self._held.is_free:
            grammar = await self.model.compiled(self._grammar, self.ask.size)
        if self.ask.budget is not None and self.ask.prompt is None:
            grammar = self._held.bounded(self.model.tokenizer, self.ask.budget, self._opening, grammar)
        sampling = {"seed": secrets.randbits(64)} | self.model.defaults | dict(self.ask.sampling)
        try:
            if self.ask.embeds:
                self._requests.append(Request(tuple(prompt), 0, reads="vector"))
            if self.ask.scored is not None:
                self._requests.append(Request(tuple(prompt), 0, logprobs=self.ask.scored, reads="scores"))
            if new != 0 or not self._requests:
                request = Request(
                    tuple(prompt),
                    new,
                    Sampling(**sampling),
                    self.ask.stops,
                    self.ask.ignore_eos,
                    penalties=Penalties(**self.model.penalties | dict(self.ask.penalties)),
                    grammar=grammar,
                    logprobs=self.ask.logprobs,
                    images=images,
                    compressed=self._compressed,
                )
                self._requests.append(request)
        except Error as error:
            raise Refused(400, str(error)) from error

    def start(self, admitted: bool = False) -> None:
        """Hands the prompt to the engine. An answer of a request that was `admitted` waits however many do.
        Raises Refused where too many wait."""
        job = Job(self._requests.pop(0), self._put)
        try:
            self.replica = self.model.replicas.submit(job, admitted)
        except Busy as busy:
            self._watch.refused()
            raise Refused(503, str(busy), "busy", retry_after=busy.retry_after) from busy
        self._job = job
        if not self._requests:
            self._let_go()  # The scheduler holds the model as long as a job runs, whether or not it is read.

    def _let_go(self) -> None:
        if self._holds:
            self._holds = False
            self.model.users -= 1

    async def _compress(self, prompt: list[int]) -> list[int]:
        """Returns what is read of the prompt. Raises Refused where nothing can choose it."""
        ask = self.ask
        if ask.embeds or ask.scored is not None or ask.echo:
            raise refuse("prefill: what is said of the whole prompt is said of a prompt that is read whole", "prefill")
        kept = self._compressed = await self.model.compressed(prompt, ask.keep or 1.0, ask.scorer)
        self.usage.left_out = kept.total - kept.read
        return list(kept.of(prompt))

    def prefill(self) -> dict[str, Any]:
        """Returns {"prefill": what of the prompt was read}, or nothing where that is all of it."""
        return {"prefill": self._compressed.as_json()} if self._compressed else {}

    @property
    def _param(self) -> str:
        """Returns the field that has the prompt."""
        return "input" if self.ask.embeds else "prompt"

    async def _prompt(self) -> list[int]:
        ask = self.ask
        if isinstance(ask.prompt, Gap):
            return await self.model.infill_prompt(ask.prompt)
        if ask.prompt is not None:
            if isinstance(ask.prompt, str):
                return await self.model.raw_prompt(ask.prompt, ask.special, ask.add_bos)
            n_vocab = self.model.tokenizer.n_vocab
            if len(ask.prompt) > self.model.info.n_ctx and ask.keep is None:
                raise TooLong(len(ask.prompt), self.model.info.n_ctx)
            try:
                return msgspec.convert(ask.prompt, _tokens_of(n_vocab))
            except msgspec.ValidationError as error:
                raise Refused(400, f"a token is none of {n_vocab}", param=self._param) from error
        self._placed = await self.model.seen(ask)
        ids = self._placed.tokens
        self._opening = opening_of(self.model.tokenizer, ids)
        if ask.continues:  # A thought goes on that may end in any letter.
            self._opening = replace(self._opening, within=said_of(ask.messages[-1])[1] is None, may_think=False)
        self._parser = self._held.parser(self._opening)
        return ids

    def _grammar(self) -> Callable[[], Matcher] | None:
        lark = self._held.lark(self._opening)
        return self.model.grammars.lark(lark) if lark else None

    @property
    def values(self) -> int:
        """Returns about how many tokens and numbers its body has."""
        written = self.usage.completion * (1 + (self.ask.logprobs or 0))
        return written + len(self.prompt_logprobs) * (1 + (self.ask.scored or 0)) + len(self.vector)

    @property
    def echoed(self) -> str:
        """Returns the text of the prompt where it comes before the answer."""
        prompt = self.ask.prompt if self.ask.echo else ""
        if isinstance(prompt, Gap):
            prompt = prompt.prefix
        return prompt if isinstance(prompt, str) else self.model.tokenizer.decode(prompt or (), special=True)

    def take_logprobs(self) -> list[tuple[int, Logprobs]]:
        """Returns the tokens that came since the last call, with their log-probabilities."""
        taken, self._logprobs = self._logprobs, []
        return taken

    async def pieces(self) -> AsyncGenerator[Piece | Silence, None]:
        """Yields what comes, to the end, each call in parts. Raises Refused where the generation failed."""
        calls, said = 0, monotonic()
        while True:
            events = await self._next_events(KEEP_ALIVE - (monotonic() - said))
            pieces, last = self._read(events)
            if isinstance(last, Failed):
                raise _refused(last)
            if not pieces and monotonic() - said >= KEEP_ALIVE:
                # A long call that is held back has none either.
                yield Silence()
                said = monotonic()
            for piece in in_parts(joined(pieces)):
                yield piece
                said = monotonic()
                calls += isinstance(piece, CallEnd) and piece.whole
                if calls and not self.ask.parallel_calls:
                    self.reason = "calls"
                    return
            if isinstance(last, Finished):
                self.reason = self._reason(last, calls)
                return

    async def collect(self) -> Whole:
        """Returns all pieces together."""
        whole = Whole()
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if not isinstance(piece, Silence):
                    whole.add(piece)
        return whole

    async def _next_events(self, patience: float) -> list[Event]:
        """Returns what happened since the last call; nothing where nothing did for so many seconds."""
        if not self._events:
            loop = asyncio.get_running_loop()
            self._awaited = loop.create_future()
            timer = loop.call_later(max(patience, 0), self._wake)
            try:
                await self._awaited
            finally:
                timer.cancel()
                self._awaited = None
        events, self._events = self._events, []
        return events

    def _put(self, events: list[Event]) -> None:
        self._events += events
        assert self._job is not None
        self.replica = self.model.replicas.note(self._job, events[-1]) or self.replica
        self._wake()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def _read(self, events: list[Event]) -> tuple[list[Piece], Event | None]:
        """Returns the pieces that events add, and the last event of all where it is among them."""
        pieces: list[Piece] = []
        last: Event | None = None
        for event in events:
            if isinstance(event, Scored):
                self.prompt_logprobs += event.logprobs
            elif isinstance(event, Embedded):
                self.vector = event.vector
            elif isinstance(event, Started):
                self.usage.cached, self.usage.again = event.cached, event.again
                waited = time.perf_counter() - self._began
                self._watch.started(waited, event.prompt_tokens, event.cached)
            elif isinstance(event, Tokens):
                self._count(event)
                thought = self._parser.reasoning
                pieces += self._cut(event.text)
                if thought:
                    self.usage.reasoning += self._thought(event.ids)
            elif isinstance(event, (Finished, Failed)):
                last = event
        if isinstance(last, Finished) and self._requests and last.reason != "cancelled":
            self.start(admitted=True)  # The prompt was scored.
            last = None
        if isinstance(last, Finished):
            self.finished = last
            self.stop_string = stop_of(last, self.ask.stops, self.model.tokenizer)
            if self.ask.keeps_stop:
                pieces += self._cut(self.stop_string or "")
            pieces += self._parser.flush(cut=last.reason == "length" or self.stop_string is not None)
        return self._shown.pieces(pieces), last

    def _count(self, event: Tokens) -> None:
        now = time.perf_counter()
        if event.ids and not self.usage.completion:
            self._first = now
            self._watch.first_token(now - self._began)
        elif event.ids:
            self._watch.tokens(len(event.ids), now - self._last)
        self._last = now
        self._logprobs += zip(event.ids, event.logprobs, strict=False)
        self.usage.completion += len(event.ids)

    def _thought(self, ids: tuple[int, ...]) -> int:
        """Returns how many of these tokens are of the thoughts, which they may have ended. It is the same
        however many come at once."""
        ends = [each[1].encode() for each in (self._opening.dialect.think, self._opening.dialect.call)]
        for n, token in enumerate(ids, start=1):
            said = self._last_bytes + self.model.tokenizer.bytes_of(token, special=True)
            if not self._parser.reasoning and any(mark in said for mark in ends):
                return n
            self._last_bytes = said[1 - max(map(len, ends)) :]
        return len(ids)

    def _cut(self, text: str) -> list[Piece]:
        if self.ask.prompt is not None:  # A raw prompt has a raw answer.
            return [Text(text)] if text else []
        return self._parser.push(text)

    def _reason(self, last: Finished, calls: int) -> str:
        """Returns why the answer has ended. Calls that are whole are no reason where its length is: there may
        have been more to it."""
        if last.reason == "cancelled":
            raise Refused(503, "the request was cancelled", "failed")
        if calls and last.reason == "stop" and not self._parser.cut:
            self.stop_string = None
            return "calls"
        return "stop_string" if self.stop_string is not None else last.reason

    def end(self, error: str = "") -> None:
        """Cancels what still runs, and notes how it went."""
        if self._done:
            return
        self._done = True
        self._let_go()
        if self._job is not None and self.finished is None:
            self.model.replicas.cancel(self._job)
        seconds = time.perf_counter() - self._began
        reason = error or self.reason or "gone"
        first = self._first - self._began if self._first else None
        stats = self.finished.stats if self.finished else None
        replica = self.replica.name if self.replica and self.model.n_replicas > 1 else None
        self._watch.ended(self.usage, stats, reason, seconds, first, self.ask.model, replica)

    def timings(self) -> dict[str, Any]:
        """Returns the timings as llama.cpp's server gives them."""
        if self.finished is None:
            return {}
        stats, usage = self.finished.stats, self.usage
        read, decoded = usage.prompt - usage.cached, max(usage.completion - 1, 0)
        return {
            "cache_n": usage.cached,
            "prompt_n": read,
            "prompt_ms": 1000 * stats.prefill_s,
            "prompt_per_token_ms": 1000 * stats.prefill_s / max(read, 1),
            "prompt_per_second": read / stats.prefill_s if stats.prefill_s else 0.0,
            "predicted_n": usage.completion,
            "predicted_ms": 1000 * stats.decode_s,
            "predicted_per_token_ms": 1000 * stats.decode_s / max(decoded, 1),
            "predicted_per_second": stats.tok_per_s or 0.0,
            "draft_n": stats.drafted,
            "draft_n_accepted": stats.accepted,
        }


@cache
def _tokens_of(n_vocab: int) -> Any:
    """Returns the type of a list of tokens."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=n_vocab)]]


def _refused(last: Failed) -> Refused:
    error = last.error
    if isinstance(error, ContextFull):
        return Refused(400, str(error), "too_long")
    if isinstance(error, ArgumentError):
        return Refused(400, str(error))
    if isinstance(error, Cancelled):
        return Refused(503, str(error), "busy", retry_after=5)
    return Refused(500, str(error), "failed")
