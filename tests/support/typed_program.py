"""A user's program, which mypy --strict checks against an installed wheel (.ci/run). The gate runs it too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import luce


def pieces(stream: luce.Stream) -> Iterator[str]:
    for piece in stream:
        yield piece.text


def whole(model: luce.Model, prompts: list[str]) -> list[str]:
    answers: list[luce.Answer] = model.generate(prompts, max_tokens=4, temperature=0.5, stop=["a", "b"])
    one: luce.Answer = model.generate("def f(", max_tokens=4, logit_bias={3: -1.0})
    ids: luce.Answer = model.generate(model.encode("def f("), max_tokens=4)
    assert one.stats.drafted >= one.stats.accepted and ids.calls == ()
    return [answer.text for answer in answers]


async def many() -> list[str]:
    async with luce.AsyncModel(device="cpu", parallel=2) as model:
        answers: list[luce.Answer] = await model.generate(["a", "b"], max_tokens=2)
        async for piece in model.chat_stream([{"role": "user", "content": "Hi"}], max_tokens=2):
            answers[0].text.removesuffix(piece.text)
        return [answer.text for answer in answers]


def main() -> None:
    how: luce.How = {"max_tokens": 3}
    reply: luce.HowReply = {"max_tokens": 2, "think": None, "tool_choice": "auto"}
    chat: luce.HowChat = {"schema": {"type": "string"}, "tools": [], **reply}
    hi = [{"role": "user", "content": "Hi"}]
    with luce.load(device="cpu", draft="auto") as model:
        print("".join(pieces(model.stream("def f(", **how))), whole(model, ["a"]), model.info.ctx)
        with model.prefix("import os") as prefix:
            print(prefix.generate("\n", **how).text, prefix.generate(["\n"], **how)[0].text)
        print(model.chat(hi, **chat).text, model.chat(hi, **reply).reason)
        with model.prefix(hi) as begun:
            print(begun.chat(hi, **reply).text)
            try:
                begun.chat(hi, tools=[])  # type: ignore[call-arg] # They are those of the prefix.
            except TypeError as error:
                print(error)
            try:
                model.chat(hi, thinks=True)  # type: ignore[call-arg] # mypy has to find it.
            except TypeError as error:
                print(error)
        try:
            model.generate("a", temprature=1)  # type: ignore[call-overload] # mypy has to find it.
        except (TypeError, luce.Error) as error:
            print(error)
    print(asyncio.run(many()), luce.__version__)


if __name__ == "__main__":
    main()
