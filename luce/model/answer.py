"""What a model answers: its pieces as they come, and the whole of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from luce.decode.events import Event, Failed, Finished, Tokens, Warned
from luce.decode.request import Compressed, Request
from luce.decode.stats import Stats, Tally
from luce.errors import Cancelled
from luce.files.tokenizer import Tokenizer
from luce.native.structs import Logprobs
from luce.text import pieces as parts
from luce.text.conversation import call_of
from luce.text.speech import Speech


@dataclass(frozen=True)
class Call:
    """A call of a tool, with its arguments by name."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """What came at once of an answer: the text that is certain now, which may lag behind the tokens, the
    reasoning before it, and the calls that ended. `tokens` are ids; `logprobs` has one entry for each of them
    where they were asked for."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A whole answer. `reason` says why it ended: "stop" (the model ended it, or a stop string did, which
    `stop` has then), "length" (max_tokens, or the context is full), "calls" or "cancelled".

    `tokens` are ids, up to the one that ended the text, which `text` does not show. `logprobs` has one entry
    for each of them where they were asked for. `prompt_tokens` counts the prompt's, and `cached_tokens` those
    of them that were not read again; `prefill` says what of the whole prompt they are, where `prefill_keep` left some
    out: its `read`, `gaps` and `spans`. `stats` say what it took: stats.drafted, stats.accepted, stats.tok_per_s
    and others. `warnings` name what was lost meanwhile that changes no token, as a drafter that failed."""

    text: str
    reasoning: str
    calls: tuple[Call, ...]
    reason: str
    stop: str | None
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    prompt_tokens: int
    cached_tokens: int
    stats: Stats = field(repr=False)
    warnings: tuple[str, ...] = ()
    prefill: Compressed | None = None

    @property
    def message(self) -> dict[str, Any]:
        """Returns the answer as a message, for the conversation to go on with."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [call_of(call.name, call.arguments) for call in self.calls]
        return found


class Reader:
    """Makes pieces of the events of one request, and at its end an `answer`, or an `error`. Without a `parser`,
    text is text. `left` says whether who asked has cancelled it: else what cancelled it is the model's end."""

    def __init__(self, tokenizer: Tokenizer, request: Request, parser: Speech | None = None):
        self._tokenizer, self._request, self._parser = tokenizer, request, parser
        self._whole = parts.Whole()
        self._calls, self._logprobs, self._warnings = list[Call](), list[Logprobs](), list[str]()
        self.left = False
        self.answer: Answer | None = None
        self.error: Exception | None = None

    @property
    def ended(self) -> bool:
        return self.answer is not None or self.error is not None

    def read(self, events: Sequence[Event]) -> list[Piece]:
        """Returns the pieces that events add. What failed is kept as `error`, behind them."""
        found = list[Piece]()
        for event in events:
            if isinstance(event, Tokens):
                found += self._piece(event.text, event.ids, event.logprobs)
            elif isinstance(event, Warned):
                self._warnings.append(event.message)
            elif isinstance(event, Finished):
                found += self._end(event)
            elif isinstance(event, Failed):
                self._fail(event.error)
        return found

    def _piece(self, text: str, ids: tuple[int, ...], logprobs: tuple[Logprobs, ...]) -> list[Piece]:
        self._logprobs += logprobs
        if self._parser is None:
            self._whole.add(parts.Text(text))
            return [Piece(text, tokens=ids, logprobs=logprobs)]
        return self._cut(self._parser.push(text), ids, logprobs)

    def _cut(
        self, cut: Sequence[parts.Piece], ids: tuple[int, ...] = (), logprobs: tuple[Logprobs, ...] = ()
    ) -> list[Piece]:
        text = "".join(each.text for each in cut if isinstance(each, parts.Text))
        reasoning = "".join(each.text for each in cut if isinstance(each, parts.Reasoning))
        before = len(self._calls)
        for each in cut:
            self._whole.add(each)
        ended = self._whole.calls[before:]
        self._calls += [Call(call.name, json.loads(call.arguments)) for call in ended]
        if not (text or reasoning or ended or ids):
            return []
        return [Piece(text, reasoning, tuple(self._calls[before:]), ids, logprobs)]

    def _end(self, last: Finished) -> list[Piece]:
        if last.reason == "cancelled" and not self.left:
            self._fail(Cancelled())
            return []
        stop = stop_of(last, self._request.stops, self._tokenizer)
        found, reason = list[Piece](), last.reason
        if self._parser is not None:
            found = self._cut(self._parser.flush(cut=last.reason == "length" or stop is not None))
            if self._calls and reason == "stop" and not self._parser.cut:
                reason, stop = "calls", None
        self._answer(last, reason, stop)
        return found

    def _fail(self, error: Exception) -> None:
        if self.left and isinstance(error, Cancelled):  # It still waited: nothing was done for it.
            nothing = Finished("cancelled", "", (), len(self._request.prompt), Tally().stats(0.0, 0))
            self._answer(nothing, "cancelled", None)
        else:
            self.error = Cancelled("the model was closed") if isinstance(error, Cancelled) else error

    def _answer(self, last: Finished, reason: str, stop: str | None) -> None:
        self.answer = Answer(
            text=self._whole.text,
            reasoning=self._whole.reasoning,
            calls=tuple(self._calls),
            reason=reason,
            stop=stop,
            tokens=last.tokens,
            logprobs=tuple(self._logprobs),
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached,
            stats=last.stats,
            warnings=tuple(self._warnings),
            prefill=last.compressed,
        )


def stop_of(last: Finished, stops: Sequence[str], tokenizer: Tokenizer) -> str | None:
    """Returns the stop string that ended a text, if one did."""
    if last.reason != "stop" or not stops or last.tokens[-1] in tokenizer.eos_ids:
        return None
    text = tokenizer.decode(last.tokens)
    found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    return min(found)[1] if found else None
