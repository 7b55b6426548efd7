"""Scalars of a JSON schema, as llguidance takes them: within what it counts, and never without a value."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

from luce.text.kinds import ANY, Boolean, Kind, Number, SchemaError, String
from luce.text.pattern import matches, refusal
from luce.text.references import step

MAX_WHOLE = 2**53  # Whole numbers up to here are what llguidance takes them for.
# It counts them up to here. None has more digits: a weak model would write digits without end.
MAX_LONG = 2**63 - 1024
MAX_MULTIPLE = 10_000  # It counts remainders up to here within a moment.
MAX_BOUND = 10**18  # Its other numbers have bounds up to here.
_EXCLUSIVE = {"exclusiveMinimum", "exclusiveMaximum"}


def scalar(kind: Kind, at: str, exact: bool) -> tuple[Kind, dict[str, Any]]:
    """Returns a kind, with what turned out to be missing of it, and its JSON schema. Raises SchemaError where
    it takes no value."""
    if kind is ANY[kind.name][0]:
        return kind, {"type": kind.name}
    if isinstance(kind, Number):
        return _number(kind, at, exact)
    if isinstance(kind, String):
        return _string(kind, at)
    if isinstance(kind, Boolean) and len(kind.values) == 1:
        return kind, {"const": next(iter(kind.values))}
    return kind, {"type": kind.name}


def _string(kind: String, at: str) -> tuple[String, dict[str, Any]]:
    if kind.only is not None:
        only = tuple(text for text in kind.only if not kind.regexes or matches(kind.regexes, text))
        kind = replace(kind, only=only)
        if not kind.only:
            raise SchemaError("enum", step(at, "enum"), "has no value that matches `pattern`")
        return kind, {"enum": list(kind.only)}
    if kind.most is not None and kind.least > kind.most:
        raise SchemaError("minLength", step(at, "minLength"), "is more than `maxLength`")
    formats = kind.formats
    while True:
        found: dict[str, Any] = {"type": "string"}
        found |= {"minLength": kind.least} if kind.least else {}
        found |= {} if kind.most is None else {"maxLength": kind.most}
        parts = [{"pattern": f"^(?:{regex})$"} for regex in kind.regexes]
        parts += [{"format": each} for each in formats]
        if len(parts) == 1:
            found |= parts[0]
        elif parts:
            found["allOf"] = [{"type": "string", **part} for part in parts]
        said = refusal(json.dumps(found)) if len(parts) > 1 or len(found) > 2 and parts else ""
        if said and formats:
            formats = ()  # It is an annotation.
        elif said == "empty":
            raise SchemaError("pattern", step(at, "pattern"), "matches no string of this length")
        elif said:
            note = SchemaError("pattern", step(at, "pattern"), "cannot be enforced: it is too large")
            return kind.noted([note]), {"type": "string"}
        else:
            return kind, found


def _number(kind: Number, at: str, exact: bool) -> tuple[Number, dict[str, Any]]:
    if kind.only is not None:
        if any(abs(value) > MAX_WHOLE and value == int(value) for value in kind.only):
            why = f"cannot be enforced: it has a whole number beyond {MAX_WHOLE}"
            return kind.noted([SchemaError("enum", step(at, "enum"), why)]), {"type": "number"}
        return kind, {"enum": [int(value) if value == int(value) else value for value in kind.only]}
    multiple, integer = kind.multiple, kind.integer
    if multiple is not None and integer:
        multiple = Fraction(math.lcm(multiple.numerator, multiple.denominator), multiple.denominator)
    if multiple is not None and multiple.denominator == 1:
        integer, multiple = True, None if multiple == 1 else multiple
    if multiple is not None and multiple.numerator > MAX_MULTIPLE:
        why = f"cannot be enforced: it leaves more than {MAX_MULTIPLE} remainders"
        kind, multiple = kind.noted([SchemaError("multipleOf", step(at, "multipleOf"), why)]), None
    found: dict[str, Any] = {"type": "integer" if integer else "number"}
    found |= _whole_bounds(kind) if integer else _bounds(kind, exact)
    if multiple is not None:
        found["multipleOf"] = int(multiple) if multiple.denominator == 1 else float(multiple)
    low, high = (
        found.get(f"{end}imum", found.get(f"exclusive{end.title()}imum")) for end in ("min", "max")
    )  # fmt: skip
    if low is not None and high is not None and (low > high or (low == high and len(found.keys() & _EXCLUSIVE) > 0)):
        key = "exclusiveMinimum" if kind.above else "minimum"
        raise SchemaError(key, step(at, key), "leaves no number below the maximum")
    unusual = multiple is not None or any(MAX_WHOLE < abs(bound or 0) < MAX_LONG for bound in (low, high))
    if said := refusal(json.dumps(found)) if unusual else "":
        key = "minimum" if multiple is None else "multipleOf"
        if said == "empty":
            raise SchemaError(key, step(at, key), "takes no number between the bounds")
        return kind.noted([SchemaError(key, step(at, key))]), {"type": found["type"]}
    return kind, found


def _whole_bounds(kind: Number) -> dict[str, Any]:
    low, high = -MAX_LONG, MAX_LONG
    if kind.low is not None:
        low = _whole(math.floor(kind.low) + 1 if kind.above else math.ceil(kind.low), -1)
    if kind.high is not None:
        high = _whole(math.ceil(kind.high) - 1 if kind.below else math.floor(kind.high), 1)
    return {"minimum": low, "maximum": high}


def _bounds(kind: Number, exact: bool) -> dict[str, Any]:
    found = {}
    for key, bound, open_ in (("Minimum", kind.low, kind.above), ("Maximum", kind.high, kind.below)):
        if (near := _bounded(bound, exact)) is not None:
            found[f"exclusive{key}" if open_ and near == bound else key.lower()] = near
    return found


def _whole(bound: int, side: int) -> int:
    """Returns the bound of whole numbers that llguidance, which has it as a float, keeps to: the next one
    that is nearer. `side` is 1 for an upper bound, -1 for a lower one."""
    if abs(bound) <= MAX_WHOLE:
        return bound
    if bound * side > MAX_LONG:
        return side * MAX_LONG
    near = float(bound)
    return int(math.nextafter(near, -side * math.inf) if (int(near) - bound) * side > 0 else near)


def _bounded(bound: Any, exact: bool) -> Any:
    """Returns the bound of numbers that llguidance keeps to: a nearer one, or none if more may be taken."""
    if bound is None or abs(bound) <= MAX_BOUND:
        return bound
    return math.copysign(MAX_BOUND, bound) if exact else None
