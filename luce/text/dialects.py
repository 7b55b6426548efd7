"""The dialects in which models write thoughts and calls of tools, as data: the marks of each, how its calls are
spelled between them, and what of them is still a mark where it is misspelt.

A model speaks the dialect whose marks are tokens of its vocabulary (dialect_of). Qwen's models write

    <think>\\nTHOUGHTS\\n</think>\\n\\nTEXT\\n\\n<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n
    </function>\\n</tool_call>

with values as raw text, and older ones a JSON object with "name" and "arguments" in <tool_call>. A further
dialect with such tags is a further row of Tagged; one without functions and parameters has objects alone.
parser.py reads it. Gemma 4 writes

    <|channel>thought\\nTHOUGHTS\\n<channel|>TEXT<|tool_call>call:NAME{key:<|"|>text<|"|>,list:[1,true]}<tool_call|>

with strings between <|"|>, in which nothing is escaped. gemma.py reads that.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from enum import Enum

from luce.files.gemma4_vocabulary import SAID
from luce.files.tokenizer import Tokenizer

BLANK = " \t\r\n"
SIGN = "<"  # Each mark of each dialect begins so.
MAX_NAME = 256
KNOWN_TAGS = 1024


class Kind(Enum):
    """What a mark does. WORD closes something that the dialect does not know."""

    CALL = "call"
    FUNCTION = "function"
    PARAMETER = "parameter"
    END_CALL = "end of call"
    END_FUNCTION = "end of function"
    END_PARAMETER = "end of parameter"
    END_THOUGHT = "end of thought"
    WORD = "word"


@dataclass(frozen=True)
class Mark:
    """A mark at `begin`:`end` of a text. `name` is the function's or the parameter's, or a closer's word; `near`
    says that a closer is misspelt."""

    kind: Kind
    begin: int
    end: int
    name: str = ""
    near: bool = False


# What looks like a tag, be it misspelt: `</parameter>`, `</parameter`, `<parameter>`, `</ parameter/>`.
_TAG = r"< ?[/\\]{0,2} ?[A-Za-z][\w.:=-]{0,60} ?[/\\]?>?"
_BEGUN_TAG = re.compile(r"< ?(?:[/\\]{0,2} ?(?:[A-Za-z][\w.:=-]{0,60} ?[/\\]?)?)?")


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The marks that open and close thoughts and calls. `thought` is what templates write before and behind
    thoughts, without the line break that follows the first, and `empty` a block without any. `turn` has the
    control tokens around a message, and `assistant` is the name of the model's role behind the first. Templates alone
    may write the tokens that are `guarded`, although they are no control tokens."""

    name: str
    think: tuple[str, str]
    thought: tuple[str, str]
    empty: str
    call: tuple[str, str]
    turn: tuple[str, str]
    assistant: str
    guarded: tuple[str, ...] = ()

    @property
    def within_call(self) -> tuple[str, tuple[str, ...]]:
        """Returns the mark from which on a text is of a call, and those that end it."""
        return self.call[0], self.call[1:]


@dataclass(frozen=True)
class Opening:
    """How an answer begins behind its prompt: in which dialect, whether `within` thoughts that the prompt has begun,
    and whether it `may_think` by beginning them itself."""

    dialect: Dialect
    within: bool = False
    may_think: bool = False


@dataclass(frozen=True, kw_only=True)
class Tagged(Dialect):
    """A dialect whose calls have functions and parameters in tags: a name and `>` follow the openings of these.
    `objects` says that a call may be a JSON object."""

    function: tuple[str, str]
    parameter: tuple[str, str]
    objects: bool = True
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _begun: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _tags: dict[str, tuple[Kind, bool] | None] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = rf"([^<>\n]{{1,{MAX_NAME}}})>"
        call, function, parameter = map(re.escape, (self.call[0], self.function[0], self.parameter[0]))
        openings = rf"(?P<call>{call})|{function}{name}|{parameter}{name}|(?P<think>{re.escape(self.think[1])})"
        begun = rf"(?:{function}|{parameter})[^<>\n]{{0,{MAX_NAME}}}"
        object.__setattr__(self, "_pattern", re.compile(rf"{openings}|(?P<tag>{_TAG})"))
        object.__setattr__(self, "_begun", re.compile(begun))

    @property
    def within_call(self) -> tuple[str, tuple[str, ...]]:
        return self.function[0], (self.function[1], self.call[1])

    @property
    def closers(self) -> dict[Kind, str]:
        return {
            Kind.END_PARAMETER: self.parameter[1],
            Kind.END_FUNCTION: self.function[1],
            Kind.END_CALL: self.call[1],
        }

    def marks(self, text: str, at: int, end: int) -> Iterator[Mark]:
        """Yields the marks in text[at:end]."""
        for found in self._pattern.finditer(text, at, end):
            where = found.start(), found.end()
            if found["tag"]:
                known = self._known_tag(found["tag"])
                if known is not None:
                    yield Mark(known[0], *where, name=found["tag"].strip("</> "), near=known[1])
            elif found["call"]:
                yield Mark(Kind.CALL, *where)
            elif found["think"]:
                yield Mark(Kind.END_THOUGHT, *where)
            else:
                kind = Kind.FUNCTION if found[2] else Kind.PARAMETER
                yield Mark(kind, *where, name=(found[2] or found[3]).strip())

    def undecided(self, text: str) -> int:
        """Returns the length of the text's end that may become a mark, or another one."""
        at = text.rfind(SIGN)
        if at < 0:
            return 0
        end = text[at:]
        whole = self._pattern.fullmatch(end)
        if whole and (not whole["tag"] or end in self.closers.values()):
            return 0
        return len(end) if self._begun.fullmatch(end) or _BEGUN_TAG.fullmatch(end) else 0

    def opens(self, begun: str, line: bool, called: bool = False) -> bool:
        """Says whether a text's end is of an opening: at least half of a call's mark, or any part of it where the
        text before it was a call, or, at the beginning of a `line`, a function's."""
        long = len(begun) > (0 if called else len(self.call[0]) // 2)
        return (long and self.call[0].startswith(begun)) or (line and begun.startswith(self.function[0]))

    def _known_tag(self, written: str) -> tuple[Kind, bool] | None:
        """Returns what _tag() does. What is read once is often read again."""
        if written not in self._tags:
            if len(self._tags) >= KNOWN_TAGS:
                self._tags.clear()
            self._tags[written] = self._tag(written)
        return self._tags[written]

    def _tag(self, written: str) -> tuple[Kind, bool] | None:
        """Returns what a tag closes, and whether it is misspelt: by one letter, or as another word that begins
        like the right one. None is no closer."""
        for kind, closer in self.closers.items():
            if written == closer:
                return kind, False
        if written.startswith((self.function[0], self.parameter[0])):
            return None
        lower = written.lower()
        word = lower.strip("<>/\\ ")
        for kind, closer in self.closers.items():
            right = closer.strip("<>/")
            alike = word.startswith(right) or (len(word) >= 4 and right.startswith(word))
            if within_one(lower, closer) or (alike and written.startswith("</")):
                return kind, True
        return (Kind.WORD, False) if written.startswith("</") and written.endswith(">") else None


def within_one(a: str, b: str) -> bool:
    """Returns whether one letter is inserted, deleted or replaced between two texts, or two are swapped, at
    most."""
    at = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[at:], b[at:]
    return a[1:] == b[1:] or a == b[1:] or a[1:] == b or (a[:2] == b[1::-1] and a[2:] == b[2:])


QWEN = Tagged(
    name="qwen",
    think=("<think>", "</think>"),
    thought=("<think>", "\n</think>\n\n"),
    empty="<think>\n\n</think>\n\n",
    call=("<tool_call>", "</tool_call>"),
    function=("<function=", "</function>"),
    parameter=("<parameter=", "</parameter>"),
    turn=("<|im_start|>", "<|im_end|>"),
    assistant="assistant",
)
GEMMA = Dialect(
    name="gemma",
    think=("<|channel>", "<channel|>"),
    thought=("<|channel>thought", "\n<channel|>"),
    empty="<|channel>thought\n<channel|>",
    call=("<|tool_call>", "<tool_call|>"),
    turn=("<|turn>", "<turn|>"),
    assistant="model",
    guarded=SAID,
)
THINKS = "<|think|>"  # Gemma 4's templates write this control token where thinking is on.


def dialect_of_turns(control: Container[str]) -> Dialect:
    """Returns the dialect whose messages begin with a control token of the vocabulary, Qwen's where none does."""
    return GEMMA if GEMMA.turn[0] in control else QWEN


def dialect_of(tokenizer: Tokenizer) -> Dialect:
    """Returns the dialect of a model by its vocabulary: Qwen's where it has the marks of no other."""
    marks = (*GEMMA.think, *GEMMA.call)
    return GEMMA if all(tokenizer.added(mark) is not None for mark in marks) else QWEN
