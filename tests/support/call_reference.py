"""Reads a model's text slowly and plainly: it tries every reading of the whole text, and takes the one with the
least damage. luce/text/calls.py reads the same a piece at a time. What each damage costs is said here once more,
so that the two can be compared.

A reading goes from mark to mark. Between two of them it stands in one of these places:

    text     outside of calls
    before   behind closers that follow text, and may be debris before a call
    after    behind a call, with nothing but blanks and closers since
    head     behind <tool_call>
    body     in a function, between parameters
    value    in a parameter's value
    closed   behind </function>, or a JSON object, within <tool_call>
"""

import json
import re
from dataclasses import dataclass, replace

CLOSERS = {"p": "</parameter>", "f": "</function>", "c": "</tool_call>"}
MARK = re.compile(
    r"(?P<C><tool_call>)|(?P<F><function=(?P<function>[^<>\n]{1,256})>)"
    r"|(?P<P><parameter=(?P<key>[^<>\n]{1,256})>)|(?P<t></think>)"
    r"|(?P<tag>< ?[/\\]{0,2} ?[A-Za-z][\w.:=-]{0,60} ?[/\\]?>?)"
)
MISSING, DOUBLED, MISSPELT, SHARED, REOPENED = 2, 1, 1, 1, 2
UNDECLARED, AGAIN = 3, 3
STRAY_IN_VALUE, STRAY_IN_TEXT, STRAY_BEFORE, UNREAD = 2, 5, 4, 1000
OPEN_IN_PROSE, OPEN_PLACED, OPEN_FUNCTION, NEVER = 1, 2, 8, 10**6
NESTED_DECLARED = 1
BLANK = " \t\r\n"
PROSE = " \t\"'`([{=+,:|*"  # Behind one of these a mark is spoken of.


def edits(a, b):
    """Returns the number of letters that are inserted, deleted, replaced or swapped between two texts."""
    table = [[i + j if not i * j else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            best = min(table[i - 1][j] + 1, table[i][j - 1] + 1, table[i - 1][j - 1] + (a[i - 1] != b[j - 1]))
            if i > 1 and j > 1 and a[i - 2 : i] == b[j - 2 : j][::-1]:
                best = min(best, table[i - 2][j - 2] + 1)
            table[i][j] = best
    return table[-1][-1]


@dataclass(frozen=True)
class Tool:
    """These are a tool's parameters, those of them that are integers, and whether there may be others."""

    names: frozenset
    integers: frozenset = frozenset()
    open: bool = False


@dataclass(frozen=True)
class Event:
    """This is a mark: a capital opens a call, function or parameter, a small letter closes it, "w" closes
    something else, "t" the thoughts. Or it is "x", the first letter of text between two marks, or "end"."""

    kind: str
    begin: int
    end: int
    name: str = ""
    near: bool = False  # A closer that is misspelt.
    fresh: bool = True  # Only blanks are before it in its line, or since the mark before it.
    placed: bool = True  # It stands where marks stand, not in the middle of a sentence.
    line: bool = True  # Only blanks are before it in its line.
    same_line: bool = False  # Text that begins in the line of the mark before it.


def tag_of(written):
    """Returns (kind, whether it is misspelt) of what looks like a tag, or None where it means nothing."""
    for kind, closer in CLOSERS.items():
        if written == closer:
            return kind, False
    if written.startswith(("<tool_call>", "<function=", "<parameter=")):
        return None
    word = written.lower().strip("<>/\\ ")
    for kind, closer in CLOSERS.items():
        own = closer.strip("</>")
        starts = word.startswith(own) or (len(word) >= 4 and own.startswith(word))
        if edits(written.lower(), closer) <= 1 or (written.startswith("</") and starts):
            return kind, True
    return ("w", False) if written.startswith("</") and written.endswith(">") else None


def next_mark(text, at, closer):
    """Returns the first mark from `at` on, which is where the mark before it ended, which was a closer or not."""
    if closer and text[at : at + 1] == ">":  # It is one too many.
        return Event("w", at, at + 1, near=True)
    for found in MARK.finditer(text, at):
        kind = next(k for k in ("C", "F", "P", "t", "tag") if found[k] is not None)
        near, name = False, (found["function"] or found["key"] or found[0].strip("</> ")).strip()
        if kind == "tag":
            if (known := tag_of(found[0])) is None:
                continue
            kind, near = known
        since = text[at : found.start()].rpartition("\n")[2]
        fresh = not since.strip(BLANK)
        placed = fresh or since[-1] not in PROSE
        line = not text[: found.start()].rpartition("\n")[2].strip(BLANK)
        return Event(kind, found.start(), found.end(), name, near, fresh, placed, line)
    return Event("end", len(text), len(text))


def next_event(text, at, since):
    """Returns what comes from `at` on, where a mark ended. `since` says what came last: a "closer" or another
    "mark", or "text" behind it."""
    mark = next_mark(text, at, since == "closer")
    gap = text[at : mark.begin]
    if since == "text" or not gap.strip(BLANK):
        return mark
    begin = at + len(gap) - len(gap.lstrip(BLANK))
    return Event("x", begin, begin, text[begin], same_line="\n" not in text[at:begin])


@dataclass(frozen=True)
class State:
    place: str
    start: int = 0  # The text, or the value, begins here.
    thinking: bool = False  # It is among thoughts.
    head: bool = False  # Text, value: <tool_call> was just before. Head: it follows a call.
    spoken: bool = False  # Text: it speaks of calls, so closers in it are no debris.
    form: str = ""  # The calls so far were "tagged" or "json": a model keeps to one form.
    fragile: bool = False  # A call had none of its closers: no text may follow.
    tight: bool = False  # Closers are missing: no text may follow in the same line.
    name: str = ""  # The function that is open.
    wrapped: bool = False  # It is in <tool_call>.
    given: tuple = ()  # Its parameters so far.
    odd: bool = False  # One of them is not declared.
    key: str = ""  # The parameter that is open.
    opens: tuple = ((), (), ())  # Calls, functions and parameters that are open in the value: what each costs.
    run: str = ""  # Value: the closers just before, which are text.
    over: bool = False  # Value: an end of the call was passed over.
    passed: bool = False  # Value: a closer of its own was passed over, so none is missing,
    whole: bool = False  # and an integer was whole there.


class Reference:
    """Reads `text`, which may begin among thoughts, and may have been `cut`. `tools` has a Tool by name."""

    def __init__(self, text, tools, thinking=False, cut=False):
        self.all, self.tools, self.cut = text, tools, cut
        self.thinking, self.known = thinking, {}

    def read(self):
        """Returns what was read, in order: ("said", begin, end), ("begin", name, at), ("value", key, begin, end),
        ("end", at), ("cut", at)."""
        return self.best(State("text", 0, self.thinking), 0, "mark")[2]

    def best(self, state, at, since):
        """Returns (cost, order among equals, items) of the best reading from here on."""
        if (state, at, since) in self.known:
            return self.known[state, at, since]
        event = next_event(self.all, at, since)
        found = []
        for cost, items, after, *where in self.steps(state, event):
            if after is not None:
                last = "text" if event.kind == "x" else "closer" if event.kind in "pfc" else "mark"
                to = where or [at if last == "text" else event.end, last]
                more, order, rest = self.best(after, *to)
                cost, items = cost + more, items + rest
            order = (*[-item[-1] for item in items], -NEVER)
            found.append((cost, order, items))
        best = min(found, default=(NEVER * 9, (), []))
        self.known[state, at, since] = best
        return best

    def steps(self, state, event):
        """Yields (cost, items, state after, [place and whether text has begun]) of each way to go on."""
        yield from getattr(self, state.place)(state, event)

    # ---- outside of calls

    def begun(self, s, event, items, cost, wrapped):
        """Yields the reading in which a function begins."""
        yield cost, [*items, ("begin", event.name, event.begin)], State(
            "body", thinking=s.thinking, form="tagged", fragile=s.fragile, name=self.named(event.name),
            wrapped=wrapped)  # fmt: skip

    def named(self, name):
        bare = name.strip("\"'")
        return bare if bare in self.tools else name

    def is_name(self, name, wrapped):
        return self.named(name) in self.tools or (wrapped and not re.search(r"[\s{}\"'`$]", name))

    def text(self, s, e):
        here = replace(s, head=False)
        if e.kind == "end":
            yield STRAY_IN_TEXT * s.head, [("said", s.start, e.end)], None
        elif e.kind == "x":
            if s.head and e.name == "{" and self.may_be_json(s) and self.json_at(e.begin):
                return
            yield 0, [], here
        elif e.kind == "t" and s.thinking:
            yield 0, [("said", s.start, e.end)], replace(here, start=e.end, thinking=False)
        elif e.kind == "C":
            yield STRAY_IN_TEXT * s.head, [], replace(s, head=True, spoken=True)
            head = State("head", e.begin, s.thinking, form=s.form)
            yield STRAY_IN_TEXT * s.head, [("said", s.start, e.begin)], head
        elif e.kind == "F":
            bare = e.line and not s.thinking and self.named(e.name) in self.tools
            passed = (s.head and self.is_name(e.name, True)) or bare
            form = "tagged" if passed else s.form
            yield UNREAD * passed, [], replace(here, form=form, spoken=s.spoken or e.line)
            if bare and not s.head:
                yield from self.begun(s, e, [("said", s.start, e.begin)], 0, wrapped=False)
        elif e.kind == "P":
            yield STRAY_IN_TEXT, [], here
        elif e.kind in "pfc" and not e.near and not s.spoken:
            yield STRAY_IN_TEXT, [], here
            if e.line and not s.thinking:
                before = State("before", e.begin, s.thinking, form=s.form)
                yield STRAY_BEFORE, [("said", s.start, e.begin)], before
        else:
            yield 0, [], here

    def before(self, s, e):
        if e.kind in ("p", "f", "c") and not e.near:
            yield STRAY_BEFORE, [], s
        elif e.kind == "C":
            yield 0, [], State("head", e.begin, s.thinking, form=s.form)
        elif e.kind == "F" and e.line and self.named(e.name) in self.tools:
            yield from self.begun(s, e, [], 0, wrapped=False)

    def after(self, s, e):
        if e.kind == "end":
            yield 0, [], None
        elif e.kind == "x":
            if not s.fragile and not (s.tight and e.same_line):
                yield 0, [], State("text", s.start, form=s.form)
        elif e.kind in "pfc":
            yield DOUBLED, [], replace(s, start=e.end, tight=False)
        elif e.kind == "t" or e.near:
            yield 0, [], replace(s, start=e.end, tight=False)
        elif e.kind == "C":
            yield 0, [], State("head", e.begin, head=True, form=s.form, fragile=s.fragile)
            if not s.fragile:
                yield 0, [], State("text", s.start, head=True, spoken=True, form=s.form)
        else:
            bare = e.kind == "F" and self.named(e.name) in self.tools and e.placed
            if bare:
                yield from self.begun(s, e, [], 0, wrapped=False)
            if not s.fragile:
                cost = UNREAD if bare and e.line else STRAY_IN_TEXT if bare or e.kind == "P" else 0
                yield cost, [], State("text", s.start, form=s.form)

    # ---- calls

    def may_be_json(self, s):
        return s.form != "tagged"

    def json_at(self, at):
        """Returns (name, arguments, end) of the JSON call that begins there, or None."""
        try:
            found, end = json.JSONDecoder().raw_decode(self.all, at)
        except ValueError:
            return None
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
        good = isinstance(name, str) and isinstance(arguments, dict)
        return (name, arguments, end) if good else None

    def behind_json(self, s, e, found, cost, items):
        name, arguments, end = found
        items = [*items, ("begin", name, e.begin), ("json", arguments, end)]
        return cost, items, State("closed", end, thinking=s.thinking, form="json", wrapped=True), end, "mark"

    def head(self, s, e):
        follows = s.head  # What stands behind a call is no text.
        if e.kind == "end":
            if self.cut:
                yield 0, [("cut", s.start)], None
            elif follows:
                yield DOUBLED, [], None
        elif e.kind == "x":
            if e.name == "{" and self.may_be_json(s):
                if found := self.json_at(e.begin):
                    yield self.behind_json(s, e, found, 0, [])
            elif follows and not e.same_line and not s.fragile:
                yield DOUBLED, [], State("text", e.begin, form=s.form)
        elif e.kind == "C":
            yield DOUBLED, [], s
        elif e.kind == "F" and self.is_name(e.name, True):
            yield from self.begun(s, e, [], 0, wrapped=True)
        elif e.kind == "c" and follows:
            yield DOUBLED * 2, [], State("after", e.end, form=s.form, fragile=s.fragile)

    def parameter(self, s, name):
        """Returns a parameter's name, and whether the tool has it."""
        tool, bare = self.tools.get(s.name), name.strip("\"'")
        if tool is None or name in tool.names:
            return name, True
        return (bare, True) if bare in tool.names else (name, tool.open)

    def opened(self, s, e, cost):
        """Yields the reading in which a parameter begins."""
        name, declared = self.parameter(s, e.name)
        cost += AGAIN * (name in s.given) + UNDECLARED * (not declared and not s.odd)
        given = tuple(sorted({*s.given, name}))
        yield cost, [("key", name, e.end)], replace(
            s, place="value", start=e.end, key=name, given=given, odd=s.odd or not declared, tight=False,
            opens=((), (), ()), run="", over=False, passed=False, whole=False, head=False)  # fmt: skip

    def ended(self, s, e, cost, items=(), tight=False):
        """Yields the reading in which the call has ended and its wrapper is closed."""
        after = State("after", e.end, form=s.form, tight=tight, fragile=s.fragile)
        yield cost, [*items, ("end", e.end)], after

    def next_call(self, s, e, items, missing, fragile=False):
        """Yields the readings in which another call begins before this one has its closers."""
        items = [*items, ("end", e.begin)]
        wrapper = MISSING * s.wrapped
        fragile = s.fragile or fragile
        if e.kind == "C":
            yield missing + wrapper, items, State("head", e.begin, head=True, form=s.form, fragile=fragile)
        elif e.kind == "F" and s.wrapped and self.is_name(e.name, True):
            yield from self.begun(replace(s, fragile=fragile, thinking=False), e, items, missing + SHARED, True)
        elif e.kind == "F" and not s.wrapped and self.named(e.name) in self.tools:
            yield from self.begun(replace(s, fragile=fragile, thinking=False), e, items, missing, False)

    def body(self, s, e):
        if e.kind == "end":
            tool = self.tools.get(s.name)
            if self.cut:
                yield 0, [("cut", e.end)], None
            elif s.given or (tool is not None and not tool.names):
                yield MISSING + MISSING * s.wrapped, [("end", e.end)], None
        elif e.kind == "P":
            yield from self.opened(s, e, 0)
        elif e.kind in ("p", "w"):
            yield DOUBLED, [], s
        elif e.kind == "f" and s.wrapped:
            yield MISSPELT * e.near, [], replace(s, place="closed", start=e.end)
        elif e.kind == "f":
            yield from self.ended(s, e, MISSPELT * e.near)
        elif e.kind == "c":
            yield from self.ended(s, e, MISSING + MISSPELT * e.near)
        elif e.kind in ("C", "F") and e.placed:
            yield from self.next_call(s, e, [], MISSING)

    def closed(self, s, e):
        if e.kind == "end":
            if self.cut and s.form != "json":
                yield 0, [("cut", e.end)], None
            else:
                yield MISSING, [("end", e.end)], None
        elif e.kind == "x" and s.form == "json" and e.name == "{" and self.json_at(e.begin):
            yield self.behind_json(s, e, self.json_at(e.begin), SHARED, [("end", s.start)])
        elif e.kind == "x":
            if not s.fragile and not (s.tight and e.same_line):
                yield MISSING, [("end", s.start)], State("text", s.start, form=s.form)
        elif e.kind == "c":
            yield from self.ended(s, e, MISSPELT * e.near)
        elif e.kind in ("p", "f", "w"):
            yield DOUBLED, [], replace(s, start=e.end)
        elif e.kind == "t":
            yield MISSING, [("end", s.start)], State("after", e.end, form=s.form, fragile=s.fragile)
        elif e.kind == "P" and s.form != "json":
            yield from self.opened(s, e, REOPENED)
        else:
            yield from self.next_call(s, e, [], 0)
            if not s.fragile:
                cost = UNREAD if e.kind == "F" and self.is_name(e.name, True) else STRAY_IN_TEXT * (e.kind == "P")
                text = State("text", s.start, head=e.kind == "C", spoken=e.kind == "C", form=s.form)
                yield MISSING + cost, [("end", s.start)], text

    # ---- values

    def value(self, s, e):
        plain = replace(s, run="", head=False)  # What comes is text.
        if e.kind == "end":
            if self.cut:
                yield 0, [("cut", e.end)], None
        elif e.kind == "x":
            if not (s.over and s.head and e.name == "{"):
                yield 0, [], plain
        elif e.kind == "t":
            if not s.thinking:
                yield 0, [], plain
        elif e.kind == "w":
            yield 0, [], plain
            if e.fresh and e.name == s.key and not s.run and f"<{s.key}" not in self.all[s.start : e.begin]:
                left, items = sum(map(sum, s.opens)), [("value", s.key, s.start, e.begin)]
                yield left + MISSPELT, items, replace(
                    s, place="body", start=e.end, opens=((), (), ()), run="", over=False,
                    passed=False, whole=False, key="",
                    head=False)  # fmt: skip
        elif e.kind in "CFP":
            yield from self.opener_in_value(s, e)
        else:
            yield from self.closer_in_value(s, e)

    def declares(self, s, name):
        name, declared = self.parameter(s, name)
        return declared and name not in s.given

    def opener_in_value(self, s, e):
        calls, functions, parameters = s.opens
        items, left = [("value", s.key, s.start, e.begin)], sum(calls + functions + parameters)
        plain = replace(s, run="", head=False)
        if e.kind == "P":
            new = e.placed and self.declares(s, e.name)
            if new and not s.run and not s.passed:
                yield from self.opened_within(s, e, items, MISSING + left)
            if not (new and s.run):
                price = NEVER if new else OPEN_PLACED if e.placed else OPEN_IN_PROSE
                nested = NESTED_DECLARED * (new and not calls and not functions)
                yield nested, [], replace(plain, opens=(calls, functions, (*parameters, price)))
            return
        if e.kind == "C":
            yield 0, [], replace(plain, head=e.placed, opens=((*calls, OPEN_IN_PROSE), functions, parameters))
        else:
            known = self.named(e.name) in self.tools
            real = (s.head and self.is_name(e.name, True)) or (e.line and known)
            price = OPEN_IN_PROSE if not real else NEVER if known else OPEN_FUNCTION
            if real and s.head:
                calls = (*calls[:-1], price)
            if not (real and s.over):
                yield 0, [], replace(plain, opens=(calls, (*functions, price), parameters))
        if e.placed and not s.run and not s.passed and not s.head and (e.kind == "C" or e.line):
            yield from self.next_call(s, e, items, 2 * MISSING + left, fragile=True)

    def opened_within(self, s, e, items, cost):
        for more, key, state in self.opened(s, e, cost):
            yield more, items + key, state

    def closer_in_value(self, s, e):
        at = "cfp".index(e.kind)
        left = sum(sum(opens) for opens in s.opens)
        items = [("value", s.key, s.start, e.begin)]
        if not s.run and (e.kind == "p" or (e.placed and not s.passed)):
            cost = left + MISSPELT * e.near
            if e.kind == "p":
                yield cost, items, replace(s, place="body", start=e.end, opens=((), (), ()),
                    run="", over=False, passed=False,
                                           whole=False, key="", head=False)  # fmt: skip
            elif e.kind == "f" and s.wrapped:
                yield cost + MISSING, items, replace(
                    s, place="closed", start=e.end, opens=((), (), ()), run="", over=False,
                    passed=False, whole=False, key="",
                    head=False, tight=True)  # fmt: skip
            elif e.kind == "f":
                yield from self.ended(s, e, cost + MISSING, items, tight=True)
            else:
                yield from self.ended(s, e, cost + 2 * MISSING, items, tight=True)
        if e.near:
            yield 0, [], replace(s, run="", head=False)
        elif s.opens[at]:
            dear = [n for n, price in enumerate(s.opens[at]) if price == max(s.opens[at])][-1]
            left = s.opens[at][:dear] + s.opens[at][dear + 1 :]
            opens = (*s.opens[:at], left, *s.opens[at + 1 :])
            yield 0, [], replace(s, run="", head=False, opens=opens)
        else:
            over = e.kind != "p" and s.run == "p"
            run = "p" if e.kind == "p" or over else "f" if e.fresh else ""
            whole = s.whole or (e.kind == "p" and self.is_integer(s, e.begin))
            if not (over and s.whole):
                yield STRAY_IN_VALUE, [], replace(
                    s, run=run, over=s.over or over, passed=s.passed or e.kind == "p", whole=whole,
                    head=False)  # fmt: skip

    def is_integer(self, s, end):
        tool = self.tools.get(s.name)
        text = self.all[s.start : end]
        return tool is not None and s.key in tool.integers and bool(re.fullmatch(r"\s*-?[0-9]+\s*", text))
