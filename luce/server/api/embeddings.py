"""Embeddings of the loaded model: /v1/embeddings, and Ollama's /api/embed and /api/embeddings.

A vector is the mean of the model's hidden states over all tokens of the text, after the output norm, scaled
to the Euclidean norm 1. Models that were trained to write are no embedding models: texts that say alike lie
nearer to each other, but less clearly so than with a model for it.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from luce.server.answer import Answer
from luce.server.api import ollama, openai
from luce.server.api.body import Body, asked
from luce.server.api.fields import EMBEDDINGS, OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from luce.server.api.openai import Form, prompts_of
from luce.server.ask import Ask, Refused
from luce.server.response import Server, reply
from luce.server.several import Several


class EmbeddingsBody(Body, kw_only=True):
    API: ClassVar = EMBEDDINGS

    input: str | list[Any]
    model: str = ""
    encoding_format: str | None = None


class EmbedBody(Body, kw_only=True):
    API: ClassVar = OLLAMA_EMBED

    input: str | list[str] = ""
    model: str = ""


class EmbeddingBody(Body, kw_only=True):
    API: ClassVar = OLLAMA_EMBEDDINGS

    prompt: str = ""
    model: str = ""


Vectors = Sequence[Sequence[float]]
Spelled = Callable[
    [str, Vectors, int], dict[str, Any]
]  # Of the model's name, vectors, and the number of tokens.


class VectorsForm(Form):
    """The form of the vectors of one or several texts, which are no stream."""

    def __init__(self, answer: Answer | Several, spelled: Spelled):
        self._answers = answer.answers if isinstance(answer, Several) else [answer]
        self._usage, self._spelled = answer.usage, spelled

    def whole(self, all: Any) -> dict[str, Any]:
        vectors = [answer.vector for answer in self._answers]
        return self._spelled(self._answers[0].ask.model, vectors, self._usage.prompt)

    def piece(self, piece: Any) -> Iterator[bytes]:
        return iter(())

    def failed(self, refused: Refused) -> Iterator[bytes]:
        return iter(())


def vectors_ask(body: EmbeddingsBody | EmbedBody | EmbeddingBody) -> Ask:
    """Returns the request for the vectors of texts, which spell no control tokens, or of lists of tokens."""
    texts = body.prompt if isinstance(body, EmbeddingBody) else body.input
    if not texts and not isinstance(body, EmbeddingsBody):
        texts = ""  # Ollama's clients load a model so.
    prompts = prompts_of(texts, "input")
    return Ask(model=body.model, prompt=prompts[0], prompts=prompts, max_tokens=0, embeds=True)


def listed(encoded: bool) -> Spelled:
    """Returns what lists vectors as OpenAI does: as numbers, or as base64 of little-endian F32."""

    def spelled(model: str, vectors: Vectors, tokens: int) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": at, "embedding": packed(vector) if encoded else vector}
            for at, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": model, "usage": usage}

    return spelled


def packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


# ---- routes


async def embeddings(server: Server, request: Request) -> Response:
    body, ask = await asked(request, EmbeddingsBody, vectors_ask)
    spelled = listed(body.encoding_format == "base64")
    return await server.answer(request, ask, lambda a: VectorsForm(a, spelled), openai.error_body)


async def embed(server: Server, request: Request) -> Response:
    _, ask = await asked(request, EmbedBody, vectors_ask)
    if not any(ask.prompts):
        await server.models.get(ask.model)
        return reply({"model": ask.model, "embeddings": []})

    def spelled(model: str, vectors: Vectors, tokens: int) -> dict[str, Any]:
        return {"model": model, "embeddings": vectors, "total_duration": 0, "load_duration": 0,
                "prompt_eval_count": tokens}  # fmt: skip

    return await server.answer(request, ask, lambda a: VectorsForm(a, spelled), ollama.error_body)


async def embedding(server: Server, request: Request) -> Response:
    _, ask = await asked(request, EmbeddingBody, vectors_ask)
    if not any(ask.prompts):
        await server.models.get(ask.model)
        return reply({"embedding": []})

    def spelled(model: str, vectors: Vectors, tokens: int) -> dict[str, Any]:
        return {"embedding": vectors[0]}

    return await server.answer(request, ask, lambda a: VectorsForm(a, spelled), ollama.error_body)
