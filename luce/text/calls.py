"""Reads calls of tools in a text that comes in pieces of any size.

The text becomes events, which take all readings along (readings.py). What all readings have in common is certain,
and is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from luce.text.dialects import BLANK, Kind, Mark, Tagged
from luce.text.objects import Scan, call_of
from luce.text.parameters import TEXT, Parameters, behind_opening, trimmed, value_of, without_break
from luce.text.pieces import Arguments, Call, CallBegin, CallEnd, Piece, as_json
from luce.text.readings import CLOSERS, PROSE, Event, Node, Place, Reading, Rules, State, best, go_on, in_common


class CallReader:
    """Takes a text from the first mark on that may be of a call, and says what is certain: calls, and strings of
    text. `parameters` returns those of a declared tool by its name, else None. `thinking` says that the text
    begins among thoughts, `line` that only blanks are before it in its line, `objects` that a call may be a JSON
    object, `spoken` that the text before spoke of calls. Calls that a grammar forces (`held`) come while they
    are written.

    Once it is `done`, `rest` is what it has not looked at, and `line` is as at first. `cut` says that the text
    ended within a call."""

    def __init__(
        self,
        dialect: Tagged,
        parameters: Callable[[str], Parameters | None],
        *,
        thinking: bool = False,
        line: bool = True,
        objects: bool = True,
        spoken: bool = False,
        held: bool = False,
    ):
        self.done, self.rest, self.cut, self.line = False, "", False, line
        self._dialect, self._parameters = dialect, parameters
        self._rules, self._held = Rules(parameters, self._slice, held), held
        self._readings = [Reading(State(Place.TEXT, thinking, objects=objects, spoken=spoken), 0)]
        self._root: Node | None = None  # It, and all before, was said.
        self._moved = False  # The readings went on since.
        # ---- the text
        self._seen, self._seen_at = list[str](), 0  # It was looked through, and begins there.
        self._tail, self._at = "", 0  # It was not yet.
        self._solid, self._broken = False, False  # Text, or the end of a line, came since the last mark.
        self._closer = False  # That was a closer, and nothing came since.
        self._blank, self._last = True, ""  # Only blanks, and that letter, are before a mark since the last one.
        self._scan: Scan | None = None  # An object is looked through.
        self._refused = -1  # The object there was none.
        # ---- the call that is open
        self._name = ""
        self._arguments = dict[str, Any]()
        self._value: HeldValue | None = None  # It is said while it is written.

    @property
    def called(self) -> bool:
        """Says whether a call has ended, as far as is known."""
        state = min(self._readings, key=lambda reading: reading.cost).state
        return state.place is Place.AFTER or (state.place is Place.TEXT and not state.thinking)

    @property
    def objects(self) -> bool:
        """Says whether a later call may be a JSON object."""
        return all(reading.state.objects for reading in self._readings)

    @property
    def spoken(self) -> bool:
        """Says whether text was left that speaks of calls."""
        return any(reading.state.spoken for reading in self._readings)

    def push(self, text: str) -> Iterator[Piece | str]:
        """Yields what is certain now."""
        self._tail += text
        self._look(final=False)
        yield from self._settle()

    def flush(self, cut: bool) -> Iterator[Piece | str]:
        """Yields what is left where the text has ended. It was `cut` where more would have come."""
        half = self._half() if cut and not self._scan else ""
        self._tail = self._tail[: len(self._tail) - len(half)]
        part = ""  # The beginning of another mark, which belongs to the call that the text ended within.
        if cut and not self._scan and not half:
            at = len(self._tail) - self._dialect.undecided(self._tail)
            self._tail, part = self._tail[:at], self._tail[at:]
        self._look(final=True)
        if not self.done:
            ends = self._ends(cut, bool(half)) or self._ends(True, bool(half))  # No grammar ends within a call.
            self._readings, self._moved = [best(ends)], True
            self.cut = any(node.what == "cut" for node in self._readings[0].nodes(self._root))
            half, part = "", "" if self.cut else part
        yield from self._settle()
        self.done, self.rest = True, self.rest + half + part

    def _ends(self, cut: bool, half: bool) -> list[Reading]:
        return [end for r in self._readings for end in self._rules.end(r, self._at, cut, half)]

    def _half(self) -> str:
        """Returns the end of the text that opens a call, as far as it goes."""
        half = self._tail[len(self._tail) - self._dialect.undecided(self._tail) :]
        line = self.line and not self._tail[: len(self._tail) - len(half)].strip(BLANK)
        called = any(reading.state.place is Place.AFTER for reading in self._readings)
        return half if self._dialect.opens(half, line, called) else ""

    # ---- from the text to events

    def _look(self, final: bool) -> None:
        """Takes the readings along, as far as the text is decided."""
        while not self.done and (self._tail or (final and self._scan)):
            if self._scan is not None:
                if not self._look_in_object(self._scan, final):
                    return
                continue
            limit = len(self._tail) - (0 if final else self._dialect.undecided(self._tail))
            end = self._look_to(limit)
            self._seen.append(self._tail[:end])
            self._tail, self._at = self._tail[end:], self._at + end
            if self._scan is None:
                return

    def _look_to(self, limit: int) -> int:
        """Takes the readings along up to `limit` of the tail, or to where an object begins, or until they are
        done. Returns how far that was."""
        at = 0
        for mark in self._dialect.marks(self._tail, 0, limit):
            if (stop := self._pass(at, mark.begin)) is not None:
                return stop
            self._meet(Event(self._at + mark.begin, self._at + mark.end, mark, fresh=self._blank,
                             placed=self._blank or self._last not in PROSE, line=self.line))  # fmt: skip
            if self.done and mark.kind is Kind.END_THOUGHT:
                return mark.begin  # The thoughts are others'.
            at = mark.end
            self._behind_mark()
            self._closer = mark.kind in CLOSERS
            if self.done:
                return at
        stop = self._pass(at, limit)
        return limit if stop is None else stop

    def _pass(self, begin: int, end: int) -> int | None:
        """Passes text between marks, and returns where to stop if not at its end."""
        text = self._tail[begin:end]
        if text and self._closer:
            self._closer = False
            if text[0] == ">":  # It is one too many.
                at = self._at + begin
                self._meet(Event(at, at + 1, Mark(Kind.WORD, at, at + 1, near=True)))
                self._behind_mark()
                begin, text = begin + 1, text[1:]
                if self.done:
                    return begin
        solid = text.lstrip(BLANK)
        if solid and not self._solid:
            blanks = len(text) - len(solid)
            self._passed(text[:blanks])
            at = self._at + begin + blanks
            if solid[0] == "{" and self._may_be_object(at):
                self._scan = Scan()
                return begin + blanks
            self._solid = True
            self._meet(Event(at, at, letter=solid[0], same_line=not self._broken))
            if self.done:
                return begin + blanks + (at == 0)  # Else the same text would be looked at again.
            text = solid
        self._passed(text)
        return None

    def _passed(self, text: str) -> None:
        line = text.rpartition("\n")[2]
        broken, blank = len(line) < len(text), not line.strip(BLANK)
        self._broken = self._broken or broken
        self.line = blank and (broken or self.line)
        self._blank = blank and (broken or self._blank)
        self._last = text[-1:] or self._last

    def _behind_mark(self) -> None:
        self._solid, self._broken, self._blank, self.line = False, False, True, False

    def _meet(self, event: Event) -> None:
        self._readings, self._moved = go_on(self._rules, self._readings, event), True
        states = [reading.state for reading in self._readings]
        self.done = not states or (len(states) == 1 and states[0].place is Place.TEXT and not states[0].head)

    # ---- objects

    def _heads(self) -> list[Reading]:
        """Returns the readings in which an object would be a call."""
        return [reading for reading in self._readings if reading.state.takes_object]

    def _may_be_object(self, at: int) -> bool:
        return self._dialect.objects and at != self._refused and bool(self._heads())

    def _look_in_object(self, scan: Scan, final: bool) -> bool:
        """Takes more of an object; returns whether it has ended."""
        used = scan.push(self._tail, final)
        if used is None:
            self._tail = ""
            return False
        self._scan, text, rest, call = None, scan.text, self._tail[used:], call_of(scan.object)
        if call is None:
            self._tail, self._refused = text + rest, self._at
            return True
        begin, end = self._at, self._at + len(text)
        behind = [self._rules.object(head, begin, end, *call) for head in self._heads()]
        self._readings, self._moved = [best(behind)], True
        self._seen.append(text)
        self._tail, self._at = rest, end
        self._behind_mark()
        return True

    # ---- from readings to pieces

    def _settle(self) -> Iterator[Piece | str]:
        """Yields what is certain and was not said."""
        if self._moved:
            self._moved = False
            common = in_common(self._readings, self._root)
            for node in common:
                yield from self._say(node)
                self._root = node
            if common:
                self._readings = [reading.behind(common[-1]) for reading in self._readings]
        if self.done:
            yield from self._leave()
        elif self._value is not None:
            end = min([reading.first.end for reading in self._readings if reading.first], default=self._at)
            yield from self._value.push(self._slice(self._value.at, end))
        self._forget()

    def _leave(self) -> Iterator[Piece | str]:
        """Yields the text that nobody takes for a call, up to what it has not looked at."""
        if not self._readings:  # No grammar lets this happen.
            yield from [CallEnd(whole=False)] if self._name else []
        elif (start := self._readings[0].start) < self._at:
            yield self._slice(start, self._at)
        self.rest, self._tail = self._tail, ""

    def _say(self, node: Node) -> Iterator[Piece | str]:
        if node.what == "said":
            yield from filter(None, [self._slice(node.begin, node.end)])
        elif node.what == "begin":
            self._name, self._arguments = node.name, {}
            if self._held:
                yield from (CallBegin(node.name), Arguments("{"))
        elif node.what == "key" and self._held:
            begin = (", " if self._arguments else "") + as_json(node.name) + ": "
            self._value = HeldValue(node.end, self._types(node.name))
            self._arguments[node.name] = None
            yield Arguments(begin + self._value.quote)
        elif node.what == "value" and self._value is not None:
            yield from self._value.push(self._slice(self._value.at, node.end), ended=True)
            self._value = None
        elif node.what == "value":
            text = self._slice(node.begin, node.end)
            self._arguments[node.name] = value_of(trimmed(text), self._types(node.name))
        elif node.what == "object":
            self._arguments = {key: self._typed(key, value) for key, value in node.found.items()}
        elif node.what in ("end", "cut") and self._held:
            whole = node.what == "end"
            if whole:
                yield from (Arguments("}"), CallEnd())
            elif self._name:
                yield CallEnd(whole=False)
            self._name = ""
        elif node.what == "end":
            yield Call(self._name, as_json(self._arguments))

    def _types(self, key: str) -> frozenset[str]:
        tool = self._parameters(self._name)
        return TEXT if tool is None else tool.types(key)

    def _typed(self, key: str, value: Any) -> Any:
        return value_of(value, self._types(key)) if isinstance(value, str) else value

    def _slice(self, begin: int, end: int) -> str:
        """Returns text that was looked through."""
        self._seen = ["".join(self._seen)]
        seen = self._seen[0][begin - self._seen_at : end - self._seen_at]
        return seen + self._tail[max(begin - self._at, 0) : end - self._at] if end > self._at else seen

    def _forget(self) -> None:
        """Drops text that was said."""
        at = self._value.at if self._value else self._root.end if self._root else 0
        if at > self._seen_at:
            self._seen, self._seen_at = [self._slice(at, self._at)], at


class HeldValue:
    """The value of a parameter that is said while it is written, from `at` on: letter by letter where it is text
    whatever it says."""

    def __init__(self, at: int, types: frozenset[str]):
        self.at, self._types = at, types
        self.quote = '"' if types == TEXT else ""
        self._begun, self._windows = False, False

    def push(self, text: str, ended: bool = False) -> Iterator[Arguments]:
        """Takes all that is certain from `at` on, and yields what is certain of the argument."""
        if not self.quote:
            yield from [Arguments(as_json(value_of(trimmed(text), self._types)))] if ended else []
            return
        if not self._begun and (ended or text not in ("", "\r")):
            self._begun = True
            text = self._behind_opening(text)
        if not self._begun:
            return
        kept = without_break(text, self._windows) if ended else text.removesuffix("\n").removesuffix("\r")
        self.at += len(kept)
        said = as_json(kept)[1:-1] + (self.quote if ended else "")
        yield from [Arguments(said)] if said else []

    def _behind_opening(self, text: str) -> str:
        behind, self._windows = behind_opening(text)
        self.at += len(text) - len(behind)
        return behind
