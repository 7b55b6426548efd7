"""llama.cpp's /infill, which editors ask for the code between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from luce.server.api.body import asked
from luce.server.api.fields import INFILL
from luce.server.api.openai import Form, Sampled, error_body, length_of, sampled
from luce.server.ask import Ask, Refused
from luce.server.response import Server
from luce.text.infill import Gap
from luce.text.pieces import Piece, Text, Whole

STOPS = {"stop": "eos", "stop_string": "word", "length": "limit"}


class Extra(msgspec.Struct):
    """Another file of the repository."""

    text: str
    filename: str = "tmp"


class InfillBody(Sampled, kw_only=True):
    API: ClassVar = INFILL

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[Extra] | None = None


def infill_ask(body: InfillBody) -> Ask:
    """Returns the request of a body."""
    files = tuple((each.filename, each.text) for each in body.input_extra or ())
    gap = Gap(body.input_prefix, body.input_suffix, body.prompt, files)
    return Ask(prompt=gap, max_tokens=length_of(body.max_tokens), **sampled(body))


class InfillForm(Form):
    """The form of llama.cpp's own completions."""

    def _ended(self, text: str) -> dict[str, Any]:
        answer, usage = self.answer, self.answer.usage
        finished = answer.finished
        return {
            "content": text,
            "stop": True,
            "model": answer.ask.model,
            "stop_type": STOPS[answer.reason],
            "stopping_word": answer.stop_string or "",
            "tokens_predicted": usage.completion,
            "tokens_evaluated": usage.prompt,
            "tokens_cached": usage.cached,
            "truncated": finished is not None and finished.truncated_by == "context",
            "timings": answer.timings(),
        }

    def whole(self, all: Whole) -> dict[str, Any]:
        return self._ended(all.text)

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Text):
            yield self.sse({"content": piece.text, "stop": False})

    def end(self) -> Iterator[bytes]:
        yield self.sse(self._ended(""))

    def failed(self, refused: Refused) -> Iterator[bytes]:
        yield self.sse(error_body(refused))


async def infill(server: Server, request: Request) -> Response:
    _, ask = await asked(request, InfillBody, infill_ask)
    return await server.answer(request, ask, InfillForm, error_body)
