"""One generation: the round of luce.h as a state machine that yields typed events.

  IDLE     begin    check the request, empty the timeline
  PREFILL  prefill  commit a chunk of the prompt; after the last one its choice is the first anchor
  DRAFT    propose  ask the draft source for candidates that may follow the anchor
  VERIFY   verify   one forward over [anchor, candidates], which may never have left the device
  COMMIT   commit   walk along the target's own choices, append what was accepted, emit it
  DONE, FAILED      one terminal event, Finished or Failed, and nothing after it

Between rounds: `committed` tokens are the prompt and all emitted tokens but the last, which is the
anchor. So nothing is committed that was not emitted, also where a round is cut by an end of text, a
stop string or the budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from luce.drafting import Draft, DraftSource, Round
from luce.errors import ArgumentError, ContextFull, StateError
from luce.plan import Request
from luce.stats import Stats, Tally
from luce.structs import Sampling, SessionInfo
from luce.tokenizer import Detokenizer, StopStrings, Tokenizer


class Core(Protocol):
    """What the state machine needs of a session (_native.Session)."""

    @property
    def info(self) -> SessionInfo: ...
    def reset(self) -> None: ...
    def set_sampling(self, sampling: Sampling) -> None: ...
    def prefill(self, tokens: Sequence[int]) -> int: ...
    def verify(self, tokens: Sequence[int], parents: Sequence[int] | None) -> list[int]: ...
    def verify_draft(self, n: int) -> list[int]: ...
    def accept(
        self, tokens: Sequence[int], parents: Sequence[int] | None, choices: Sequence[int]
    ) -> tuple[list[int], int]: ...
    def commit(self, path: Sequence[int]) -> None: ...


class State(Enum):
    IDLE = "idle"
    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"
    COMMIT = "commit"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Started:
    """The request is accepted; the prefill begins."""

    prompt_tokens: int


@dataclass(frozen=True)
class Prefilled:
    """`done` of `total` prompt tokens are committed."""

    done: int
    total: int


@dataclass(frozen=True)
class Tokens:
    """New ids, and the text that is now certain: it may lag behind the ids, and ids may be empty."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Warned:
    """Something was lost that does not change the tokens."""

    message: str


@dataclass(frozen=True)
class Finished:
    """reason: "stop" (end of text or stop string), "length" (budget or context), "cancelled".
    tokens end with the end-of-text token or the one that completed the stop string; text does not."""

    reason: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    stats: Stats


@dataclass(frozen=True)
class Failed:
    """`error` ended the generation in `state`; what was emitted before is right."""

    error: Exception
    state: State


Event = Started | Prefilled | Round | Tokens | Warned | Finished | Failed
Verb = Generator[Event, None, State]  # yields events, returns the next state


class Orchestrator:
    """One generation of one request on one session. `cancelled` is asked between rounds and chunks.
    `clock` gives seconds."""

    def __init__(
        self,
        core: Core,
        tokenizer: Tokenizer,
        request: Request,
        source: DraftSource | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.state = State.IDLE
        self._clock = clock
        self._core, self._request, self._cancelled = core, request, cancelled
        self._source, self._mode = source, source.name if source else "plain"
        self._eos = tokenizer.eos_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(request.stops)
        self._prefilled = 0  # prompt tokens that are committed
        self._tokens: list[int] = []  # emitted; the last one is the anchor
        self._text: list[str] = []
        self._draft = Draft()
        self._rows: list[int] = []  # of this round: [anchor, *candidates]
        self._choices: list[int] = []  # the target's, after each row
        self._reason: str | None = None
        self._tally = Tally()
        self._draft_s = self._verify_s = 0.0  # of this round
        self._began, self._first_token = 0.0, math.nan  # by the clock

    def run(self) -> Iterator[Event]:
        """Events up to exactly one Finished or Failed."""
        try:
            while self.state is not State.DONE:
                match self.state:
                    case State.IDLE:
                        self.state = yield from self._begin()
                    case State.PREFILL:
                        self.state = yield from self._prefill()
                    case State.DRAFT:
                        self.state = yield from self._propose()
                    case State.VERIFY:
                        self.state = yield from self._verify()
                    case State.COMMIT:
                        self.state = yield from self._commit()
            finished = self._finished()
        except Exception as error:
            failed_in, self.state = self.state, State.FAILED
            yield Failed(error, failed_in)
        else:
            yield finished

    def _begin(self) -> Verb:
        prompt, self._info = self._request.prompt, self._core.info
        if not prompt:
            raise ArgumentError("the prompt is empty: at least one token is needed")
        if len(prompt) > self._info.n_ctx:
            raise ContextFull(f"a prompt of {len(prompt)} tokens, a context of {self._info.n_ctx}")
        self._core.reset()
        self._core.set_sampling(self._request.sampling)
        if self._source:
            self._source.begin(self._request.max_tokens)
        self._began = self._clock()
        yield Started(len(prompt))
        return State.PREFILL

    def _prefill(self) -> Verb:
        if self._cancelled():
            return (yield from self._end("cancelled"))
        prompt = self._request.prompt
        chunk = prompt[self._prefilled : self._prefilled + self._info.n_chunk]
        choice = self._core.prefill(chunk)
        self._prefilled += len(chunk)
        yield Prefilled(self._prefilled, len(prompt))
        if self._prefilled < len(prompt):
            return State.PREFILL
        self._first_token = self._clock()
        if self._request.max_tokens == 0:
            return (yield from self._end("length"))
        kept, text = self._take([choice])
        return (yield from self._emit(kept, text))

    def _propose(self) -> Verb:
        room = self._info.n_ctx - len(self._request.prompt) - len(self._tokens)  # after the anchor
        if self._cancelled():
            return (yield from self._end("cancelled"))
        if room < 0:
            return (yield from self._end("length"))
        depth = min(room, self._request.max_tokens - len(self._tokens) - 1)
        self._draft, began = Draft(), self._clock()
        if self._source and min(self._info.n_rows - 1, depth) > 0:
            try:
                self._draft = self._source.draft(self._tokens[-1], self._info.n_rows - 1, depth)
            except Exception as error:
                yield self._drop_source(error)
        self._draft_s = self._clock() - began
        return State.VERIFY

    def _verify(self) -> Verb:
        anchor, draft, began = self._tokens[-1], self._draft, self._clock()
        try:
            if draft.on_device:
                self._choices = self._core.verify_draft(draft.on_device)
            else:
                self._choices = self._core.verify([anchor, *draft.tokens], draft.parents)
        except (ArgumentError, ContextFull, StateError) as error:  # nothing was done: plain is still right
            if not draft.size:
                raise
            yield self._drop_source(error)
            return State.DRAFT
        self._verify_s = self._clock() - began
        try:
            on_device = self._source.drafted(draft.on_device) if self._source and draft.on_device else ()
        except Exception as error:  # the anchor's row is right whatever the others are
            yield self._drop_source(error)
            self._draft, self._choices, on_device = Draft(), self._choices[:1], ()
        self._rows = [anchor, *self._draft.tokens, *on_device]
        return State.COMMIT

    def _commit(self) -> Verb:
        path, anchor = self._core.accept(self._rows, self._draft.parents, self._choices)
        kept, text = self._take([*(self._rows[row] for row in path[1:]), anchor])
        began = self._clock()
        self._core.commit(path[: len(kept)])
        done = Round(
            drafted=self._draft.size,
            accepted=min(len(path) - 1, len(kept)),
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            commit_s=self._clock() - began,
        )
        self._tally.add(self._draft, done)
        if self._source:
            self._source.learn(done)
        yield done
        return (yield from self._emit(kept, text))

    def _take(self, tokens: list[int]) -> tuple[list[int], str]:
        """The tokens up to the first that ends the text, and the text that is certain with them."""
        text = ""
        for count, token in enumerate(tokens, start=1):
            if token in self._eos:
                self._reason = "stop"
            else:
                piece, met = self._stops.push(self._detokenizer.push(token))
                text += piece
                if met:
                    self._reason = "stop"
                    return tokens[:count], text
                if len(self._tokens) + count == self._request.max_tokens:
                    self._reason = "length"
            if self._reason:
                return tokens[:count], text + self._held()
        return tokens, text

    def _held(self) -> str:
        """Text held back that turned out to be neither half a character nor a stop string."""
        text, met = self._stops.push(self._detokenizer.flush())
        return text if met else text + self._stops.flush()

    def _emit(self, ids: list[int], text: str) -> Verb:
        self._tokens += ids
        self._text.append(text)
        yield Tokens(tuple(ids), text)
        return State.DONE if self._reason else State.DRAFT

    def _end(self, reason: str) -> Verb:
        """Ends between rounds, with the text that is still held back."""
        self._reason = reason
        if text := self._held():
            self._text.append(text)
            yield Tokens((), text)
        return State.DONE

    def _drop_source(self, error: Exception) -> Warned:
        """Goes on plain; raises `error` where it took the session along."""
        if self._core.info.failed:
            raise error
        self._source = None
        return Warned(f"{self._mode} drafting failed and is off: {error}")

    def _finished(self) -> Finished:
        now = self._clock()
        first = now if math.isnan(self._first_token) else self._first_token
        decoded = max(len(self._tokens) - 1, 0)
        stats = self._tally.stats(self._mode, first - self._began, now - first, decoded)
        text, prompt = "".join(self._text), len(self._request.prompt)
        return Finished(self._reason or "", text, tuple(self._tokens), prompt, stats)
