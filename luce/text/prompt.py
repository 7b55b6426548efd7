"""Turns messages into a prompt by the file's own chat template. Only the template spells control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from luce.errors import ArgumentError, Error, FileError, TemplateFailed, UnsupportedError
from luce.files.probe import fact
from luce.files.template_process import Renderer
from luce.files.tokenizer import Tokenizer
from luce.text import thinking
from luce.text.conversation import shows, ways
from luce.text.dialects import GEMMA, THINKS, Dialect, Opening, dialect_of

KEY = "tokenizer.chat_template"
PROBE = "\ue000"  # No template has this character.
SHORT, KNOWN = 32, 4096  # Strings of so few letters come often (keys, roles): so many are marked once.


class Template(Protocol):
    """Renders messages as a prompt: ChatTemplate does, and so does BoundedTemplate within bounds. `source` is
    its Jinja text."""

    source: str

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str: ...

    def mentions(self) -> frozenset[str]: ...


class BoundedTemplate:
    """ChatTemplate (template.py) whose time and memory are bounded, since it runs in a process of its own."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self._renderer = Renderer(source, dict(special_tokens or {}))
        self._mentions: frozenset[str] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Renders as ChatTemplate.render does, with its arguments. A malformed template is an error here
        too."""
        with _named():
            return self._renderer.render(messages=messages, **how)

    def mentions(self) -> frozenset[str]:
        """Returns what ChatTemplate.mentions does. Raises as render does."""
        if self._mentions is None:
            with _named():
                self._mentions = self._renderer.mentions()
        return self._mentions

    def close(self) -> None:
        """Ends the process; a later render starts another one."""
        self._renderer.close()


@contextmanager
def _named() -> Iterator[None]:
    """An error that is raised within names the key of the template."""
    try:
        yield
    except Error as error:
        said = str(error)
        raise type(error)(said if said.startswith(KEY) else f"{KEY} failed: {said}") from None


def prompt_ids(
    template: Template,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    most: int | None = None,
    continues: bool = False,
    outright: bool = True,
    image: Sequence[int] = (),
    /,
    **how: Any,
) -> list[int]:
    """Returns the prompt's tokens. Control tokens are those that the template spells: what messages, tools
    and `how` (the template's variables) spell stays text. A message's content may be parts, {"type": "text", "text"}
    and {"type": "image"}: in the place of each image are the tokens `image`. Of many more tokens than `most`, only the
    first are returned, which are more than `most`.

    Messages that the template refuses are told in simpler ways (conversation.py); TemplateFailed has its
    words about the messages as they are where it refuses them all. With `continues`, the prompt ends behind
    the last message, which is the assistant's: its text, or its thoughts where it has no text.

    enable_thinking and reasoning_effort in `how` are put into the words that the template reads
    (thinking.py); `outright`, the prompt's end does what it reads no word for."""
    dialect = dialect_of(tokenizer)
    marks = {mark: token for mark in dialect.guarded if (token := tokenizer.added(mark)) is not None}
    guard = Guard(tokenizer.control.keys() | marks.keys(), [messages, tools, how])
    messages = [_with_images(message, guard.image, dialect is GEMMA) for message in messages]
    prompting = _Prompting(template, tokenizer, dialect, guard, tools, how, outright)
    text = prompting.continued(messages) if continues else prompting.begun(messages)
    ids: list[int] = []
    if dialect is GEMMA and tokenizer.bos_id is not None and not text.startswith(tokenizer.text_of(tokenizer.bos_id)):
        ids.append(tokenizer.bos_id)  # Without it Gemma writes nonsense, and some templates leave it out.
    for piece in guard.pieces(text):
        if most is not None and len(ids) > most:
            break
        token = tokenizer.control.get(piece, marks.get(piece))
        if token is not None:
            ids.append(token)
            continue
        for n, between in enumerate(piece.split(guard.image)):
            ids += image if n else ()
            for part in _within(guard.unmarked(between), marks) if between else ():
                left = None if most is None else most - len(ids)
                ids += tokenizer.encode(part, special=False, most=left)
    return ids


def _with_images(message: Mapping[str, Any], image: str, trimmed: bool) -> Mapping[str, Any]:
    """Returns a message in which `image` stands for each image: where it has one, a text in the place of its parts.
    Gemma's template trims each text of others than the model."""
    content = message.get("content")
    if not isinstance(content, list | tuple) or all(part.get("type") != "image" for part in content):
        return message
    trimmed = trimmed and message.get("role") != "assistant"
    texts = (part["text"].strip() if trimmed else part["text"] for part in content if part.get("type") != "image")
    parts = (image if part.get("type") == "image" else next(texts) for part in content)
    return {**message, "content": "".join(parts)}


def _within(text: str, marks: Iterable[str]) -> list[str]:
    """Returns a text cut within each of the marks that it spells, so that none of them becomes a token."""
    places = "|".join(f"(?<={re.escape(mark[0])})(?={re.escape(mark[1:])})" for mark in marks)
    return re.split(places, text) if places else [text]


class _Prompting:
    """Renders prompts of one request, with what `guard` marks in all that users wrote."""

    def __init__(
        self,
        template: Template,
        tokenizer: Tokenizer,
        dialect: Dialect,
        guard: Guard,
        tools: Sequence[Mapping[str, Any]] | None,
        how: Mapping[str, Any],
        outright: bool,
    ):
        self._template, self._guard, self._tools = template, guard, guard.marked(tools)
        self._dialect, self._attached = dialect, takes_attached(template)
        self._think = how.get("enable_thinking") if outright else None
        self._ends = how.get("add_generation_prompt") is False
        spoken = how.get("enable_thinking") is not None or "reasoning_effort" in how
        variables = thinking.variables(how, template.mentions()) if spoken else how
        self._variables = {name: guard.marked(value) for name, value in variables.items()}
        # Some of Gemma's models are confused by an empty block of thoughts: the template alone knows which.
        begin = dialect.think[0]
        self._knows_thoughts = dialect is not GEMMA and (begin in template.source or _is_token(tokenizer, begin))

    def begun(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the prompt that ends where an answer begins."""
        text = self._rendered(messages)
        if self._ends:
            return text
        (begin, end), assistant = self._dialect.turn, self._dialect.assistant
        if self._dialect is GEMMA and text.rstrip().endswith(end):
            # Its templates take the answer of a tool for the last of a prompt, although text follows it in the turn.
            return f"{text}{begin}{assistant}\n"
        return self._switched(text, self._think)

    def continued(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the prompt that ends behind the last message. A mark stands for its text in the template,
        which may strip what it is given, and all that the template has behind it is cut."""
        *before, last = messages
        thought, said = thinking.said_of(last)
        mark, thinks = self._guard.unused, said is None
        field = "reasoning_content" if thinks else "content"
        probe = {**last, "reasoning_content": thought, "content": "", field: mark}
        if not thought and not thinks:
            del probe["reasoning_content"]
        written = self._guard.marked(thought if thinks else said)
        with suppress(TemplateFailed):
            head, found, _ = self._rendered(
                [*before, probe], add_generation_prompt=False, continue_final_message=True
            ).rpartition(mark)
            if found:
                return head.replace(mark, written) + written
        # The template does not show this text: it goes behind the beginning of an answer.
        opens = thinks or bool(thought and (self._knows_thoughts or self._dialect is GEMMA))
        switches = dict.fromkeys(thinking.SWITCHES, opens)
        text = self._rendered(before, add_generation_prompt=True, **switches)
        if not opens:
            return self._switched(text, think=False) + written
        closed = "" if thinks else self._guard.marked(thought) + self._dialect.thought[1]
        return thinking.opened(text, self._dialect) + closed + written

    def _switched(self, text: str, think: bool | None) -> str:
        switches = think is not None and thinking.switches(self._template.mentions())
        return thinking.switched(text, think, self._knows_thoughts, switches, self._dialect)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """Renders the messages in the first way in which the template takes them and leaves nothing out: as
        they are, then without an effort that it may not know, and with a list of no tools."""
        refused: TemplateFailed | None = None
        lossy: str | None = None
        full = {"tools": self._tools} | self._variables | more
        calm = {name: value for name, value in full.items() if name not in thinking.EFFORTS}
        calm["tools"] = self._tools or []
        for way in ways(messages, self._attached):
            marked = self._guard.marked(way)
            for variables in [full] if refused or lossy is not None else [full, calm]:
                try:
                    text = self._template.render(marked, **variables)
                except TemplateFailed as error:
                    refused = refused or error
                    continue
                if shows(text, marked):
                    return text
                lossy = text if lossy is None else lossy
                break
        if lossy is not None:
            return lossy
        assert refused is not None
        raise refused


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    return text in tokenizer.control or len(tokenizer.encode(text, special=False)) == 1


class Guard:
    """Tells what users write from what a template does. In every spelling of a control token, and in what
    may become one beside other text, one character has a stand-in, which no text has."""

    def __init__(self, control: Iterable[str], texts: Any):
        self._spells = spells = _spells(frozenset(control))
        used = set[str]()  # Characters that are not ASCII.
        for text in _strings(texts):
            used.update(() if text.isascii() else text)
            if "\\u" in text:
                # Where a template spells JSON, a stand-in's escape becomes what it stands for: nobody else writes it.
                used.update(chr(int(code, 16)) for code in re.findall(r"\\u([0-9a-fA-F]{4})", text))
        # These are Unicode's areas for private use.
        private = chain(range(0xE000, 0xF900), range(0xF0000, 0x10FFFE))
        n = len(spells.letters) + 2
        free = list(islice((chr(code) for code in private if chr(code) not in used), n))
        if len(free) < n:
            raise ArgumentError("the messages have nearly all of Unicode's characters for private use")
        self._stand_in = dict(zip(spells.letters, free[2:], strict=True))
        self._stands = re.compile(f"[{''.join(free[2:])}]" if free[2:] else "(?!)")
        self._known: dict[str, str] = {}  # Short strings, and what they became.
        self.unused, self.image = free[:2]  # No text has these characters, nor are they stand-ins.

    def marked(self, value: Any) -> Any:
        """Returns `value` with stand-ins in all of its strings."""
        if isinstance(value, str):
            if len(value) > SHORT:
                return self._marked(value)
            if value not in self._known:
                if len(self._known) == KNOWN:
                    self._known.clear()
                self._known[value] = self._marked(value)
            return self._known[value]
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(each) for key, each in value.items()}
        return [self.marked(each) for each in value] if isinstance(value, list | tuple) else value

    def _marked(self, text: str) -> str:
        spells, at = self._spells, set[int]()
        if any(first in text for first in spells.firsts):
            at = {match.start() for match in spells.spelled.finditer(text)}
        near = range(1, min(spells.most, len(text) + 1))
        at |= {len(text) - length for length in near if text[len(text) - length :] in spells.ends}
        at |= {0 for length in near if text[:length] in spells.begins}
        if not at:
            return text
        letters = list(text)
        for place in at:
            letters[place] = self._stand_in.get(letters[place], letters[place])
        return "".join(letters)

    def unmarked(self, text: str) -> str:
        """Returns `text` as it was written."""
        written = "\\u" in text  # JSON may have escaped a stand-in.
        if not written and (text.isascii() or not self._stands.search(text)):
            return text
        for char, stand_in in self._stand_in.items():
            text = text.replace(stand_in, char).replace(json.dumps(stand_in)[1:-1], char)
        return text

    def pieces(self, text: str) -> list[str]:
        """Returns `text` cut around each control token that it spells."""
        return [piece for piece in self._spells.control.split(text) if piece]


class _Spells(NamedTuple):
    """How texts are looked through for some control tokens: `spelled` finds the first letter of each, `ends` and
    `begins` are what may become one beside other text, and no text without one of `firsts` spells one."""

    control: re.Pattern[str]
    spelled: re.Pattern[str]
    ends: frozenset[str]
    begins: frozenset[str]
    firsts: frozenset[str]
    letters: tuple[str, ...]
    most: int  # So many letters has the longest one.


@lru_cache(8)
def _spells(control: frozenset[str]) -> _Spells:
    """Raises FileError where there are too many."""
    found = control - {""}
    if max(map(len, found), default=0) > 256 or sum(map(len, found)) > 1 << 17:
        raise FileError("tokenizer.ggml.tokens has control tokens of more letters than a chat can guard")
    longest_first = "|".join(re.escape(text) for text in sorted(found, key=len, reverse=True))
    return _Spells(
        re.compile(f"({longest_first or '(?!)'})"),
        re.compile(f"(?={longest_first or '(?!)'}).", re.S),
        frozenset(text[:at] for text in found for at in range(1, len(text))),
        frozenset(text[at:] for text in found for at in range(1, len(text))),
        frozenset(text[0] for text in found),
        tuple(sorted(set("".join(found)))),
        max(map(len, found), default=0),
    )


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings of a value, in no order."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += each
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each


def thinks(template: Template, think: bool | None) -> bool | None:
    """Says whether a model is to think with this value of enable_thinking. None leaves the choice to the
    template. Returns None where the template does not read it. Raises what rendering raises."""
    said = [{"role": "user", "content": "Hello"}]
    on, off = (template.render(said, enable_thinking=each) for each in (True, False))
    if on == off:
        return None
    return template.render(said) == on if think is None else think


def takes_attached(template: Template) -> bool:
    """Says whether a template takes what tools answered from the message that called them alone, as Gemma 4's first
    ones do, which would show a message of a tool as somebody's turn."""
    if "tool_responses" not in template.source:
        return False
    if template not in _ATTACHED:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
        told = {"role": "tool", "tool_call_id": "c", "name": "f", "content": PROBE}
        calls = {"role": "assistant", "content": "", "tool_calls": [call]}
        _ATTACHED[template] = True  # Also where it refuses this.
        with suppress(TemplateFailed):
            head, _, _ = template.render([{"role": "user", "content": ""}, calls, told]).partition(PROBE)
            begin, _ = GEMMA.turn
            _ATTACHED[template] = "response" not in head.rpartition(begin)[2]
    return _ATTACHED[template]


_ATTACHED = WeakKeyDictionary[Template, bool]()


def opening_of(tokenizer: Tokenizer, ids: Sequence[int]) -> Opening:
    """Returns how an answer to a prompt begins: within thoughts where the prompt ends with an open block of them."""
    dialect = dialect_of(tokenizer)
    last = [token for token in ids[-24:] if token >= 0]  # The others are rows of images.
    within = tokenizer.decode(last, special=True).rstrip().endswith(dialect.thought[0])
    return Opening(dialect, within, dialect is GEMMA and tokenizer.added(THINKS) in ids)


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
