"""Several answers of one request: n to each of its prompts, which run together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from luce.server.answer import ENGINE_FIRST_S, Answer, Silence
from luce.server.ask import Ask, refuse
from luce.server.models import Served
from luce.server.watch import Usage, Watch
from luce.text.pieces import Piece, Whole

MAX_ANSWERS = 2048  # A request has at most so many answers.


class Part(NamedTuple):
    """A piece of the answer `at` this index; None where that has ended."""

    at: int
    piece: Piece | None


def each(ask: Ask) -> list[Ask]:
    """Returns the request of each answer, by index: the n answers to the first prompt, and so on. Answer i to
    a prompt has seed + i. Raises Refused where there would be too many."""
    prompts, seed = ask.prompts or (ask.prompt,), ask.sampling.get("seed")
    if len(prompts) * ask.n > MAX_ANSWERS:
        said = f"{len(prompts)} prompts with {ask.n} answers each: at most {MAX_ANSWERS} answers are given"
        raise refuse(said, "n")
    seeds = [{} if seed is None else {"seed": (seed + at) % 2**64} for at in range(ask.n)]
    return [
        replace(ask, prompt=prompt, prompts=(), n=1, sampling={**ask.sampling, **own})
        for prompt in prompts
        for own in seeds
    ]


def answer_to(model: Served, ask: Ask, watch: Watch) -> Answer | Several:
    """Returns the answer to a request, which may be several."""
    asks = each(ask)
    return Several(model, asks, ask.n, watch) if len(asks) > 1 else Answer(model, asks[0], watch)


class Several:
    """The answers to `asks`, each `n` in a row to the same prompt. It is driven as an Answer is: after
    begin(), pieces() gives what comes of any, and however it ends, end() has to be called."""

    def __init__(self, model: Served, asks: Sequence[Ask], n: int, watch: Watch):
        self.answers = [Answer(model, ask, watch) for ask in asks]
        self._n, self._width = n, model.n_sequences
        # Who reads slowly is waited for.
        self._parts = asyncio.Queue[Part | Silence | Exception](2 * self._width)
        self._waiting = list(enumerate(self.answers))[::-1]

    @property
    def usage(self) -> Usage:
        """Returns the tokens of all answers. A prompt counts once, however many answers it has."""
        all = [answer.usage for answer in self.answers]
        once = all[:: self._n]
        return Usage(
            sum(usage.prompt for usage in once),
            sum(usage.cached for usage in once),
            sum(usage.again for usage in once),
            sum(usage.completion for usage in all),
            sum(usage.reasoning for usage in all),
        )

    @property
    def values(self) -> int:
        """Returns about how many tokens and numbers their body has."""
        return sum(answer.values for answer in self.answers)

    async def begin(self) -> None:
        """Makes all prompts and hands the first one to the engine. Where it raises Refused, nothing runs."""
        for answer in self.answers:
            await answer.prepare()
        self.answers[0].start()
        await asyncio.sleep(ENGINE_FIRST_S)

    async def pieces(self) -> AsyncGenerator[Part | Silence, None]:
        """Yields what comes, to the end. As many answers run at once as the engine has sequences. Raises
        Refused where one failed."""
        workers = [asyncio.create_task(self._work()) for _ in range(min(self._width, len(self.answers)))]
        try:
            left = len(self.answers)
            while left:
                part = await self._parts.get()
                if isinstance(part, Exception):
                    raise part
                left -= isinstance(part, Part) and part.piece is None
                yield part
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self) -> None:
        """Runs one answer after the other, as long as some have not begun."""
        try:
            while self._waiting:
                index, answer = self._waiting.pop()
                if index:
                    answer.start(admitted=True)
                async with aclosing(answer.pieces()) as pieces:
                    async for piece in pieces:
                        await self._parts.put(piece if isinstance(piece, Silence) else Part(index, piece))
                answer.end()
                await self._parts.put(Part(index, None))
        except Exception as error:
            await self._parts.put(error)

    async def collect(self) -> list[Whole]:
        """Returns the whole answers."""
        found = [Whole() for _ in self.answers]
        async with aclosing(self.pieces()) as parts:
            async for part in parts:
                if isinstance(part, Part) and part.piece is not None:
                    found[part.at].add(part.piece)
        return found

    def end(self, error: str = "") -> None:
        """Cancels what still runs."""
        for answer in self.answers:
            answer.end(error)
