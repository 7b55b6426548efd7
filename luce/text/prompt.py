"""Turns messages into a prompt by the file's own chat template. Only the template spells control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from luce.errors import FileError, LuceError, UnsupportedError
from luce.files.probe import fact
from luce.files.template_process import Renderer
from luce.files.tokenizer import Tokenizer

KEY = "tokenizer.chat_template"


class Template(Protocol):
    """Renders messages as a prompt: ChatTemplate does, and so does BoundedTemplate within bounds."""

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str: ...


class BoundedTemplate:
    """This is a ChatTemplate (template.py) whose time and memory are bounded, since it runs in a process of
    its own."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self._renderer = Renderer(source, dict(special_tokens or {}))

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Renders as ChatTemplate.render does, with its arguments. A malformed template is an error here
        too."""
        try:
            return self._renderer.render(messages=messages, **how)
        except LuceError as error:
            said = str(error)
            raise LuceError(said if said.startswith(KEY) else f"{KEY} failed: {said}") from None

    def close(self) -> None:
        """Ends the process; a later render starts another one."""
        self._renderer.close()


def prompt_ids(
    template: Template,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    most: int | None = None,
    /,
    **how: Any,
) -> list[int]:
    """Returns the prompt's tokens. Control tokens are those that the template spells: what messages, tools
    and `how` (the template's variables) spell stays text. Of many more tokens than `most`, only the first
    are returned, which are more than `most`."""
    guard = Guard(tokenizer.control, [messages, tools, how])
    variables = {name: guard.marked(value) for name, value in how.items()}
    text = template.render(guard.marked(messages), tools=guard.marked(tools), **variables)
    ids: list[int] = []
    for piece in guard.pieces(text):
        if most is not None and len(ids) > most:
            break
        token = tokenizer.control.get(piece)
        if token is None:
            left = None if most is None else most - len(ids)
            ids += tokenizer.encode(guard.unmarked(piece), special=False, most=left)
        else:
            ids.append(token)
    return ids


class Guard:
    """Tells what users write from what a template does. In every spelling of a control token, and in what
    may become one beside other text, one character has a stand-in, which no text has."""

    def __init__(self, control: Iterable[str], texts: Any):
        found = {text for text in control if text}
        if max(map(len, found), default=0) > 256 or sum(map(len, found)) > 1 << 17:
            raise FileError("tokenizer.ggml.tokens has control tokens of more letters than a chat can guard")
        longest_first = "|".join(re.escape(text) for text in sorted(found, key=len, reverse=True))
        self._control = re.compile(f"({longest_first or '(?!)'})")
        self._spelled = re.compile(f"(?={longest_first or '(?!)'}).", re.S)
        self._ends = {text[:at] for text in found for at in range(1, len(text))}
        self._begins = {text[at:] for text in found for at in range(1, len(text))}
        self._most = max(map(len, found), default=0)
        used = set("".join(_strings(texts)))
        # These are Unicode's areas for private use.
        private = chain(range(0xE000, 0xF900), range(0xF0000, 0x10FFFE))
        free = (chr(code) for code in private if chr(code) not in used)
        self._stand_in = {char: next(free) for char in sorted(set("".join(found)))}

    def marked(self, value: Any) -> Any:
        """Returns `value` with stand-ins in all of its strings."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(each) for key, each in value.items()}
        return [self.marked(each) for each in value] if isinstance(value, list | tuple) else value

    def _marked(self, text: str) -> str:
        at = {match.start() for match in self._spelled.finditer(text)}
        near = range(1, min(self._most, len(text) + 1))
        at |= {len(text) - length for length in near if text[len(text) - length :] in self._ends}
        at |= {0 for length in near if text[:length] in self._begins}
        letters = list(text)
        for place in at:
            letters[place] = self._stand_in.get(letters[place], letters[place])
        return "".join(letters)

    def unmarked(self, text: str) -> str:
        """Returns `text` as it was written."""
        for char, stand_in in self._stand_in.items():  # JSON may have escaped it.
            text = text.replace(stand_in, char).replace(json.dumps(stand_in)[1:-1], char)
        return text

    def pieces(self, text: str) -> list[str]:
        """Returns `text` cut around each control token that it spells."""
        return [piece for piece in self._control.split(text) if piece]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def thinks(template: Template, think: bool | None) -> bool | None:
    """Says whether a model is to think with this value of enable_thinking. None leaves the choice to the
    template. Returns None where the template does not read it. Raises what rendering raises."""
    said = [{"role": "user", "content": "Hello"}]
    on, off = (template.render(said, enable_thinking=each) for each in (True, False))
    if on == off:
        return None
    return template.render(said) == on if think is None else think


def chat_template(metadata: Mapping[str, Any]) -> BoundedTemplate:
    """Returns the template of a file's metadata. Raises UnsupportedError where it has none."""
    if KEY not in metadata:
        raise UnsupportedError("the file has no chat template", concerns="chat_template")
    tokens = fact(metadata, "tokenizer.ggml.tokens", list, [])
    special = {}
    for name in ("bos", "eos"):
        token = fact(metadata, f"tokenizer.ggml.{name}_token_id", int, None)
        if token is not None and 0 <= token < len(tokens):
            special[f"{name}_token"] = tokens[token]
    return BoundedTemplate(fact(metadata, KEY, str), special)
