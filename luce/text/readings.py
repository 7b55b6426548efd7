"""Says how calls of tools may be read that models write with closers doubled, missing or misspelt, and with
marks of the dialect within values.

A text is read in all ways that may still be right at once, and a Reading is one of them. Each mark takes it from
one place to the next, and what is damaged on the way has its price in Damage. Of readings that stand alike, the
one with the least damage goes on, and among equals the one whose values end later. So calls that a value holds
stay in it, a value never takes in a second call, and the last end that leaves a well-formed rest ends a call.
tests/support/call_reference.py has the same rules in a plain form, and tries all readings.

Where a grammar forces a call (`held`), it is nothing else, and its first end is its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Any, NamedTuple

from luce.text.dialects import Kind, Mark
from luce.text.parameters import TEXT, Parameters, trimmed, value_of


class Damage(IntEnum):
    """What a reading pays for what it has to put up with. Only sums are compared."""

    NONE = 0
    DOUBLED = 1  # A mark once more, with only blanks between.
    MISSPELT = 1  # A closer.
    SHARED = 1  # A second function in one wrapper.
    MISSING = 2  # A closer.
    REOPENED = 2  # A parameter behind the end of its function.
    UNDECLARED = 3  # A parameter that the schema does not have; it is paid once a call.
    AGAIN = 3  # A parameter that was given before.
    STRAY = 2  # A closer in a value that closes nothing there.
    BEFORE = 4  # A closer between text and a call.
    DEBRIS = 5  # A mark in text.
    SPOKEN = 1  # An opening in a value that nothing closes there, within a sentence,
    OPEN = 2  # or where marks stand,
    OPEN_CALL = 8  # or one of a whole call,
    NEVER = 10**6  # or one that is declared, which no value has.
    NESTED = 1  # A parameter that is still to come, in a value.
    UNREAD = 1000  # Text that begins like a call.


PROSE = frozenset(" \t\"'`([{=+,:|*")  # A mark right behind one of these is spoken of.
DEEPEST = 64  # So many marks of a kind may be open within a value.
HOPELESS = 500  # Readings with so much more damage than a safe one are given up,
MOST = 24  # and of more readings those with the most damage, unless they are safe.
_UNSAFE = re.compile(r"[\s{}\"'`$]")  # A name that nobody declared has none of these.
CLOSERS = {Kind.END_CALL: 0, Kind.END_FUNCTION: 1, Kind.END_PARAMETER: 2}  # Indexes of State.opens.
_NOTHING: tuple[tuple[int, ...], ...] = ((), (), ())


class Place(Enum):
    """Where a reading stands between two marks."""

    TEXT = "outside of calls"
    BEFORE = "behind closers in a text, which may be debris before a call"
    AFTER = "behind a call, with nothing but blanks and closers since"
    HEAD = "behind the mark of a call"
    BODY = "in a function, between parameters"
    VALUE = "in a parameter's value"
    CLOSED = "behind a function, or an object, within the mark of a call"


@dataclass(frozen=True)
class Event:
    """What a reading meets: a mark, or the first letter of text between two marks. A mark is `fresh` where only
    blanks are before it in its line or since another mark, `placed` where marks stand, not within a sentence;
    only blanks are before it in its `line`. Text may begin in the `same_line` as the mark before it."""

    begin: int
    end: int
    mark: Mark | None = None
    letter: str = ""
    fresh: bool = True
    placed: bool = True
    line: bool = True
    same_line: bool = False

    @property
    def kind(self) -> Kind | None:
        return self.mark.kind if self.mark else None

    @property
    def name(self) -> str:
        return self.mark.name if self.mark else ""

    @property
    def misspelt(self) -> int:
        return Damage.MISSPELT if self.mark and self.mark.near else 0


@dataclass(frozen=True, eq=False)
class Node:
    """What a reading has read last, and what `before`: text that was "said" or a "value", both at begin:end, the
    "begin" of a call and its `name`, a "key", the "end" of a call; or the text was "cut" within one."""

    before: Node | None
    what: str
    end: int
    begin: int = 0
    name: str = ""
    found: Any = None  # The arguments of a JSON object.
    depth: int = field(default=0, kw_only=True)  # So many are before it.


class State(NamedTuple):
    """Where a reading stands: what may come next, and at what price, follows from it alone."""

    place: Place
    thinking: bool = False  # It is among thoughts.
    head: bool = False  # TEXT, VALUE: the mark of a call was just before. HEAD: it follows a call.
    spoken: bool = False  # TEXT: it speaks of calls, so closers in it are no debris.
    objects: bool = True  # A call may be a JSON object. A model keeps to one form, so it may not behind the other.
    fragile: bool = False  # A call had none of its closers: no text may follow.
    tight: bool = False  # A call lacks closers: no text may follow in the same line.
    name: str = ""  # The function that is open: "" for a JSON object.
    wrapped: bool = False  # It is in the mark of a call.
    given: frozenset[str] = frozenset()  # Its parameters so far.
    odd: bool = False  # One of them is not declared.
    key: str = ""  # The parameter that is open.
    opens: tuple[tuple[int, ...], ...] = _NOTHING  # What calls, functions and parameters that it opens cost.
    run: str = ""  # VALUE: the closers just before are text: "p" if a parameter's is among them, else "f".
    over: bool = False  # VALUE: an end of the call was passed over.
    passed: bool = False  # VALUE: a closer of its own was passed over: none is missing,
    whole: bool = False  # and there it was all that its type takes.

    @property
    def is_safe(self) -> bool:
        """Says whether a reading goes on from here whatever comes."""
        return self.place is Place.TEXT or (self.place is Place.AFTER and not (self.fragile or self.tight))

    @property
    def takes_object(self) -> bool:
        """Says whether a JSON object would be a call here."""
        return self.objects and (self.place is Place.HEAD or (self.place is Place.CLOSED and not self.name))

    @property
    def left_open(self) -> int:
        """Returns what a value costs that ends here."""
        return sum(map(sum, self.opens))


@dataclass(frozen=True)
class Reading:
    """One way to read the text so far, at the `cost` of its damage. The text or value that is open begins at
    `start`. Of its nodes, `first` is the first that was not said, and `node` the last."""

    state: State
    start: int
    cost: int = 0
    node: Node | None = None
    first: Node | None = None

    def to(self, state: State, start: int, cost: int = 0, *read: tuple[Any, ...]) -> Reading:
        """Returns the reading that goes on from there, after it has `read` the fields of more nodes."""
        node, first = self.node, self.first
        for fields in read:
            node = Node(node, *fields, depth=node.depth + 1 if node else 0)
            first = first or node
        return Reading(state, start, self.cost + cost, node, first)

    def nodes(self, root: Node | None = None) -> list[Node]:
        """Returns what was read since `root`, in order."""
        found, node = list[Node](), self.node
        while node is not None and node is not root:
            found.append(node)
            node = node.before
        return found[::-1]

    def behind(self, root: Node) -> Reading:
        """Returns the reading of which all up to `root` was said."""
        following = self.nodes(root)
        return replace(self, first=following[0] if following else None)

    def better(self, other: Reading) -> bool:
        """Says whether it has less damage, or as much and later ends."""
        if self.cost != other.cost:
            return self.cost < other.cost
        one, another = self.node, other.node
        mine, others = list[int](), list[int]()  # The ends of what only one of them has read, last first.
        while one is not another:
            deeper = (one.depth if one else -1) - (another.depth if another else -1)
            if one and deeper >= 0:
                mine.append(one.end)
                one = one.before
            if another and deeper <= 0:
                others.append(another.end)
                another = another.before
        for end, other_end in zip(reversed(mine), reversed(others), strict=False):
            if end != other_end:
                return end > other_end
        return len(mine) < len(others)


Readings = Iterator[Reading]


class Rules:
    """Says how readings go on. `parameters` returns those of a declared tool by its name, else None, and `text`
    what is from one place of the text to another."""

    def __init__(
        self,
        parameters: Callable[[str], Parameters | None],
        text: Callable[[int, int], str],
        held: bool = False,
    ):
        self._parameters, self._slice, self._held = parameters, text, held
        self._by_place = {
            Place.TEXT: self._text,
            Place.BEFORE: self._before,
            Place.AFTER: self._after,
            Place.HEAD: self._head,
            Place.BODY: self._body,
            Place.VALUE: self._value,
            Place.CLOSED: self._closed,
        }

    def steps(self, reading: Reading, event: Event) -> Readings:
        """Yields each way in which a reading may go on."""
        return self._by_place[reading.state.place](reading, reading.state, event)

    def named(self, name: str) -> str:
        """Returns a tool's name without quotes, if that is one."""
        bare = name.strip("\"'")
        return bare if self._parameters(bare) is not None else name

    def parameter(self, function: str, name: str) -> tuple[str, bool]:
        """Returns a parameter's name, without quotes if that is one, and whether its function may have it."""
        tool, bare = self._parameters(function), name.strip("\"'")
        if tool is None or name in tool.names:
            return name, True
        return (bare, True) if bare in tool.names else (name, tool.open)

    def declared(self, name: str) -> bool:
        return self._parameters(self.named(name)) is not None

    def may_be_called(self, name: str) -> bool:
        """Says whether a function in the mark of a call may have this name: an undeclared one is one, too."""
        return self.declared(name) or not _UNSAFE.search(name)

    # ---- outside of calls

    def _text(self, r: Reading, s: State, e: Event) -> Readings:
        here = s._replace(head=False) if s.head else s
        if e.kind is Kind.CALL:
            cost = Damage.DEBRIS if s.head else 0
            if not self._held:
                yield r.to(s._replace(head=True, spoken=True), r.start, cost)
            head = State(Place.HEAD, s.thinking, objects=s.objects)
            yield r.to(head, e.begin, cost, ("said", e.begin, r.start))
        elif e.kind is Kind.FUNCTION:
            yield from self._function_in_text(r, s, here, e)
        elif e.kind in CLOSERS and not (e.misspelt or s.spoken):
            yield r.to(here, r.start, Damage.DEBRIS)
            if e.line and not s.thinking:
                before = State(Place.BEFORE, objects=s.objects)
                yield r.to(before, e.begin, Damage.BEFORE, ("said", e.begin, r.start))
        elif e.kind is Kind.END_THOUGHT and s.thinking:
            yield r.to(here._replace(thinking=False), e.end, 0, ("said", e.begin, r.start))
        else:
            yield r.to(here, r.start, Damage.DEBRIS if e.kind is Kind.PARAMETER else 0)

    def _function_in_text(self, r: Reading, s: State, here: State, e: Event) -> Readings:
        bare = e.line and not s.thinking and self.declared(e.name)
        here = here._replace(spoken=True) if e.line else here
        if bare or (s.head and self.may_be_called(e.name)):
            yield r.to(here._replace(objects=False), r.start, Damage.UNREAD)
        else:
            yield r.to(here, r.start)
        if bare and not s.head:
            yield self._begun(r.to(s, r.start, 0, ("said", e.begin, r.start)), s, e, wrapped=False)

    def _before(self, r: Reading, s: State, e: Event) -> Readings:
        if e.kind in CLOSERS and not e.misspelt:
            yield r.to(s, r.start, Damage.BEFORE)
        elif e.kind is Kind.CALL:
            yield r.to(State(Place.HEAD, objects=s.objects), e.begin)
        elif e.kind is Kind.FUNCTION and e.line and self.declared(e.name):
            yield self._begun(r, s, e, wrapped=False)

    def _after(self, r: Reading, s: State, e: Event) -> Readings:
        text = State(Place.TEXT, objects=s.objects)
        if e.kind is None:
            if not (s.fragile or (s.tight and e.same_line)):
                yield r.to(text, r.start)
        elif e.kind in CLOSERS:
            yield r.to(s._replace(tight=False), e.end, Damage.DOUBLED)
        elif e.kind is Kind.END_THOUGHT or e.misspelt:
            yield r.to(s._replace(tight=False), e.end)
        elif e.kind is Kind.CALL:
            yield r.to(State(Place.HEAD, head=True, objects=s.objects, fragile=s.fragile), e.begin)
            if not (s.fragile or self._held):
                yield r.to(text._replace(head=True, spoken=True), r.start)
        else:
            bare = e.kind is Kind.FUNCTION and e.placed and self.declared(e.name)
            if bare:
                yield self._begun(r, s, e, wrapped=False)
            if not s.fragile:
                debris = Damage.DEBRIS if bare or e.kind is Kind.PARAMETER else 0
                yield r.to(text, r.start, Damage.UNREAD if bare and e.line else debris)

    # ---- calls

    def _head(self, r: Reading, s: State, e: Event) -> Readings:
        if e.kind is None:
            if s.head and not e.same_line and not s.fragile:
                yield r.to(State(Place.TEXT, objects=s.objects), e.begin, Damage.DOUBLED)
        elif e.kind is Kind.CALL:
            yield r.to(s, r.start, Damage.DOUBLED)
        elif e.kind is Kind.FUNCTION and self.may_be_called(e.name):
            yield self._begun(r, s, e, wrapped=True)
        elif e.kind is Kind.END_CALL and s.head:
            after = State(Place.AFTER, objects=s.objects, fragile=s.fragile)
            yield r.to(after, e.end, 2 * Damage.DOUBLED)

    def object(self, r: Reading, begin: int, end: int, name: str, arguments: dict[str, Any]) -> Reading:
        """Returns how the reading goes on behind a call that is a JSON object: the first in the mark of a call,
        or a further one."""
        if r.state.place is Place.CLOSED:
            r = r.to(r.state, r.start, Damage.SHARED, ("end", r.start))
        closed = State(Place.CLOSED, r.state.thinking, wrapped=True)
        return r.to(closed, end, 0, ("begin", begin, 0, name), ("object", end, 0, "", arguments))

    def _begun(self, r: Reading, s: State, e: Event, wrapped: bool, cost: int = 0) -> Reading:
        """Returns how the reading goes on in a function."""
        body = State(Place.BODY, s.thinking, objects=False, fragile=s.fragile, name=self.named(e.name),
                     wrapped=wrapped)  # fmt: skip
        return r.to(body, e.end, cost, ("begin", e.begin, 0, body.name))

    def _opened(self, r: Reading, s: State, e: Event, cost: int = 0) -> Reading:
        """Returns how the reading goes on in the value of a parameter."""
        key, known = self.parameter(s.name, e.name)
        cost += (0 if known or s.odd else Damage.UNDECLARED) + (Damage.AGAIN if key in s.given else 0)
        value = State(Place.VALUE, s.thinking, objects=False, fragile=s.fragile, name=s.name, wrapped=s.wrapped,
                      given=s.given | {key}, odd=s.odd or not known, key=key)  # fmt: skip
        return r.to(value, e.end, cost, ("key", e.end, 0, key))

    def _ended(self, r: Reading, s: State, e: Event, cost: int, tight: bool = False) -> Reading:
        """Returns how the reading goes on behind the mark that ends a call."""
        after = State(Place.AFTER, objects=s.objects, fragile=s.fragile, tight=tight)
        return r.to(after, e.end, cost, ("end", e.end))

    def _next_call(self, r: Reading, s: State, e: Event, cost: int = 0) -> Readings:
        """Yields how the reading goes on where another call begins before this one has all of its closers."""
        ended, s = r.to(s, r.start, cost, ("end", e.begin)), s._replace(thinking=False)
        if e.kind is Kind.CALL:
            head = State(Place.HEAD, head=True, objects=s.objects, fragile=s.fragile)
            yield ended.to(head, e.begin, Damage.MISSING if s.wrapped else 0)
        elif e.kind is Kind.FUNCTION and s.wrapped and self.may_be_called(e.name):
            yield self._begun(ended, s, e, wrapped=True, cost=Damage.SHARED)
        elif e.kind is Kind.FUNCTION and not s.wrapped and self.declared(e.name):
            yield self._begun(ended, s, e, wrapped=False)

    def _body(self, r: Reading, s: State, e: Event) -> Readings:
        if e.kind is Kind.PARAMETER:
            yield self._opened(r, s, e)
        elif e.kind in (Kind.END_PARAMETER, Kind.WORD):
            yield r.to(s, r.start, Damage.DOUBLED)
        elif e.kind is Kind.END_FUNCTION and s.wrapped:
            yield r.to(s._replace(place=Place.CLOSED), e.end, e.misspelt)
        elif e.kind is Kind.END_FUNCTION:
            yield self._ended(r, s, e, e.misspelt)
        elif e.kind is Kind.END_CALL:
            yield self._ended(r, s, e, Damage.MISSING + e.misspelt)
        elif e.kind in (Kind.CALL, Kind.FUNCTION) and e.placed:
            yield from self._next_call(r, s, e, Damage.MISSING)

    def _closed(self, r: Reading, s: State, e: Event) -> Readings:
        if e.kind is None:
            if not (s.fragile or (s.tight and e.same_line)):
                yield r.to(State(Place.TEXT, objects=s.objects), r.start, Damage.MISSING, ("end", r.start))
        elif e.kind is Kind.END_CALL:
            yield self._ended(r, s, e, e.misspelt)
        elif e.kind in (Kind.END_PARAMETER, Kind.END_FUNCTION, Kind.WORD):
            yield r.to(s, e.end, Damage.DOUBLED)
        elif e.kind is Kind.END_THOUGHT:
            after = State(Place.AFTER, objects=s.objects, fragile=s.fragile)
            yield r.to(after, e.end, Damage.MISSING, ("end", r.start))
        elif e.kind is Kind.PARAMETER and s.name:
            yield self._opened(r, s, e, Damage.REOPENED)
        else:
            yield from self._next_call(r, s, e)
            if not (s.fragile or self._held):
                debris = Damage.DEBRIS if e.kind is Kind.PARAMETER else 0
                passed = Damage.UNREAD if e.kind is Kind.FUNCTION and self.may_be_called(e.name) else debris
                called = e.kind is Kind.CALL
                text = State(Place.TEXT, head=called, spoken=called, objects=s.objects)
                yield r.to(text, r.start, Damage.MISSING + passed, ("end", r.start))

    # ---- values

    def _value(self, r: Reading, s: State, e: Event) -> Readings:
        plain = s._replace(run="", head=False) if s.run or s.head else s
        if e.kind in CLOSERS:
            yield from self._closer_in_value(r, s, e)
        elif e.kind is Kind.PARAMETER:
            yield from self._parameter_in_value(r, s, plain, e)
        elif e.kind in (Kind.CALL, Kind.FUNCTION):
            yield from self._call_in_value(r, s, plain, e)
        elif e.kind is Kind.END_THOUGHT and s.thinking:
            return  # Where thoughts go on, the call was only spoken of.
        elif e.kind is Kind.WORD and e.fresh and e.name == s.key and not s.run:
            if f"<{s.key}" not in self._slice(r.start, e.begin):  # It is closed by its own name.
                yield self._value_ended(r, s, e)
            yield r.to(plain, r.start)
        elif not (e.letter == "{" and s.over and s.head):
            yield r.to(plain, r.start)

    def _closer_in_value(self, r: Reading, s: State, e: Event) -> Readings:
        assert e.kind is not None
        if not s.run and (e.kind is Kind.END_PARAMETER or (e.placed and not s.passed)):
            yield self._value_ended(r, s, e)
        at = CLOSERS[e.kind]
        if e.misspelt:
            yield r.to(s._replace(run="", head=False), r.start)
        elif s.opens[at]:
            opens = (*s.opens[:at], _without_dearest(s.opens[at]), *s.opens[at + 1 :])
            yield r.to(s._replace(run="", head=False, opens=opens), r.start)
        else:
            own = e.kind is Kind.END_PARAMETER
            over = not own and s.run == "p"
            run = "p" if own or over else "f" if e.fresh else ""
            whole = s.whole or (own and self._is_whole(r, s, e.begin))
            if not (over and (self._held or s.whole)):
                after = s._replace(run=run, head=False, over=s.over or over, whole=whole, passed=s.passed or own)
                yield r.to(after, r.start, Damage.STRAY)

    def _is_whole(self, r: Reading, s: State, end: int) -> bool:
        """Says whether a value that ends there is all that its parameter's type takes."""
        tool = self._parameters(s.name)
        types = tool.types(s.key) if tool else TEXT
        if not TEXT.isdisjoint(types):
            return False
        return not isinstance(value_of(trimmed(self._slice(r.start, end)), types), str)

    def _value_ended(self, r: Reading, s: State, e: Event) -> Reading:
        """Returns how the reading goes on behind a closer that ends the value, and what else lacks its own."""
        cost = s.left_open + (Damage.MISSPELT if e.kind is Kind.WORD else e.misspelt)
        r = r.to(s, r.start, cost, ("value", e.begin, r.start, s.key))
        s = s._replace(place=Place.BODY, key="", opens=_NOTHING, head=False, over=False, passed=False, whole=False)
        if e.kind in (Kind.END_PARAMETER, Kind.WORD):
            return r.to(s, e.end)
        if e.kind is Kind.END_FUNCTION and s.wrapped:
            return r.to(s._replace(place=Place.CLOSED, tight=True), e.end, Damage.MISSING)
        missing = Damage.MISSING if e.kind is Kind.END_FUNCTION else 2 * Damage.MISSING
        return self._ended(r, s, e, missing, tight=True)

    def _parameter_in_value(self, r: Reading, s: State, plain: State, e: Event) -> Readings:
        key, known = self.parameter(s.name, e.name)
        to_come = e.placed and known and key not in s.given
        if to_come and not (s.run or s.passed):
            ended = r.to(s, r.start, s.left_open + Damage.MISSING, ("value", e.begin, r.start, s.key))
            yield self._opened(ended, s, e)
        if not (to_come and s.run):  # Else the closer before it is the value's.
            price = Damage.NEVER if to_come else Damage.OPEN if e.placed else Damage.SPOKEN
            nested = to_come and not s.opens[0] and not s.opens[1]
            opens = (*s.opens[:2], (*s.opens[2], price)[-DEEPEST:])
            yield r.to(plain._replace(opens=opens), r.start, Damage.NESTED if nested else 0)

    def _call_in_value(self, r: Reading, s: State, plain: State, e: Event) -> Readings:
        calls, functions, parameters = s.opens
        if e.kind is Kind.CALL:
            opens = ((*calls, int(Damage.SPOKEN))[-DEEPEST:], functions, parameters)
            yield r.to(plain._replace(head=e.placed, opens=opens), r.start)
        else:
            known = self.declared(e.name)
            real = (s.head and self.may_be_called(e.name)) or (e.line and known)
            price = Damage.SPOKEN if not real else Damage.NEVER if known and not self._held else Damage.OPEN_CALL
            if real and s.head:
                calls = (*calls[:-1], price)
            if not (real and s.over):  # Else the end that was passed over is the call's.
                opens = (calls, (*functions, int(price))[-DEEPEST:], parameters)
                yield r.to(plain._replace(opens=opens), r.start)
        if not (self._held or s.run or s.passed or s.head) and e.placed and (e.kind is Kind.CALL or e.line):
            ended = r.to(s, r.start, s.left_open, ("value", e.begin, r.start, s.key))
            yield from self._next_call(ended, s._replace(fragile=True), e, 2 * Damage.MISSING)

    # ---- the end of the text

    def end(self, r: Reading, at: int, cut: bool, half: bool) -> Readings:
        """Yields how a reading ends where the text does. It was `cut` where more would have come, and `half` a
        mark that opens a call may have been there."""
        s = r.state
        if s.place is Place.TEXT:
            if cut and half:
                yield r.to(s, at, Damage.DEBRIS if s.head else 0, ("said", at, r.start), ("cut", at))
            else:
                yield r.to(s, at, Damage.DEBRIS if s.head else 0, ("said", at, r.start))
        elif s.place is Place.AFTER:
            yield r.to(s, at, 0, *([("cut", at)] if cut and half else []))
        elif cut and not (s.place is Place.BEFORE or (s.place is Place.CLOSED and not s.name)):
            yield r.to(s, at, 0, ("cut", r.start if s.place is Place.HEAD else at))
        elif s.place is Place.HEAD and s.head and not cut:
            yield r.to(s, at, Damage.DOUBLED)
        elif s.place is Place.CLOSED:
            yield r.to(s, at, Damage.MISSING, ("end", at))
        elif s.place is Place.BODY and not cut:
            tool = self._parameters(s.name)
            if s.given or (tool is not None and not tool.names):
                yield r.to(s, at, Damage.MISSING * (2 if s.wrapped else 1), ("end", at))


def _without_dearest(prices: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the prices of openings where a closer closes the last of those that need it most."""
    at = len(prices) - 1 - prices[::-1].index(max(prices))
    return prices[:at] + prices[at + 1 :]


def go_on(rules: Rules, readings: Sequence[Reading], event: Event) -> list[Reading]:
    """Returns the readings behind an event: of those that stand alike, the best."""
    alike = dict[State, Reading]()
    for reading in readings:
        for after in rules.steps(reading, event):
            known = alike.get(after.state)
            if known is None or after.better(known):
                alike[after.state] = after
    safe = [r.cost for r in alike.values() if r.state.is_safe]
    most = min(safe) + HOPELESS if safe else None
    found = [r for r in alike.values() if most is None or r.cost <= most]
    if len(found) > MOST:
        found.sort(key=lambda r: r.cost)
        found = found[:MOST] + [r for r in found[MOST:] if r.state.is_safe]
    return found


def best(readings: Sequence[Reading]) -> Reading:
    found = readings[0]
    for reading in readings[1:]:
        found = reading if reading.better(found) else found
    return found


def in_common(readings: Sequence[Reading], root: Node | None) -> list[Node]:
    """Returns what all readings have read since `root`."""
    if len({id(reading.first) for reading in readings}) != 1:
        return []
    found = list[Node]()
    for node, *others in zip(*(reading.nodes(root) for reading in readings), strict=False):
        if any(other is not node for other in others):
            break
        found.append(node)
    return found
