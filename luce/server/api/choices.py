"""The form of several answers as the choices of one: chat completions and completions have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from luce.server.answer import Answer
from luce.server.api.openai import ChoiceForm, Told, usage_body
from luce.server.ask import Refused
from luce.server.several import Part, Several
from luce.text.pieces import Whole


def forms(
    kind: Callable[..., ChoiceForm], told: Told
) -> Callable[[Answer | Several], ChoiceForm | SeveralForm]:
    """Returns what gives an answer, or several, the form of this kind."""

    def form(answer: Answer | Several) -> ChoiceForm | SeveralForm:
        if isinstance(answer, Answer):
            return kind(answer, told)
        first = kind(answer.answers[0], told)
        others = (kind(each, told, first.id, at) for at, each in enumerate(answer.answers[1:], start=1))
        return SeveralForm(answer, [first, *others])

    return form


class SeveralForm:
    """The form of several answers: one body with all choices, or events in the order in which they come, each
    with the index of its choice."""

    def __init__(self, several: Several, choices: Sequence[ChoiceForm]):
        self._several, self._choices = several, choices
        self.media_type = choices[0].media_type

    def whole(self, all: Sequence[Whole]) -> dict[str, Any]:
        bodies = [form.whole(whole) for form, whole in zip(self._choices, all, strict=True)]
        del bodies[0]["timings"]  # They are those of the first.
        choices = [choice for body in bodies for choice in body["choices"]]
        return bodies[0] | {"choices": choices, "usage": usage_body(self._several.usage)}

    def begin(self) -> Iterator[bytes]:
        for form in self._choices:
            yield from form.begin()

    def piece(self, part: Part) -> Iterator[bytes]:
        form = self._choices[part.at]
        yield from form.finish() if part.piece is None else form.piece(part.piece)

    def silence(self) -> bytes:
        return self._choices[0].silence()

    def end(self) -> Iterator[bytes]:
        yield from self._choices[0].close(self._several.usage)

    def failed(self, refused: Refused) -> Iterator[bytes]:
        yield from self._choices[0].failed(refused)
