"""Random JSON schemas, and values that may fit them, for property tests."""

import json

from hypothesis import strategies as st

KEYS = ["a", "b", "c", "x1"]
KEY = st.sampled_from(KEYS)
SCALARS = [
    {"type": "string"}, {"type": "string", "pattern": "^a+$"}, {"pattern": "b"}, {"pattern": "^(?!a)[ab]*$"},
    {"pattern": "a$|^b"}, {"minLength": 1, "maxLength": 2}, {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "number", "exclusiveMinimum": 1.5}, {"multipleOf": 3}, {"type": "boolean"}, {"type": ["string", "null"]},
    {"enum": ["a", 1, None, [1]]}, {"enum": [True, 1.5, {"a": 1}, "b"]}, {"const": "a"}, {"const": {"b": None}},
    {"minimum": 2, "maxLength": 3, "maxItems": 1}, {}, True, False, {"type": "null"},
    {"type": "string", "format": "date"},
]  # fmt: skip
DENIED = [{"type": "string"}, {"const": "a"}, {"enum": [1, True]}, {"required": ["a"]}, {"minimum": 3}, {}]
REFERENCES = [{"$ref": "#"}, {"$ref": "#/$defs/d"}, {"$ref": "#/$defs/e"}]


def keywords(inner):
    """Returns schemas of which others are parts."""
    some = st.lists(inner, min_size=1, max_size=3)
    of_objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(KEY, inner, max_size=3),
            "required": st.lists(KEY, max_size=2, unique=True),
            "additionalProperties": inner,
            "patternProperties": st.fixed_dictionaries({"^x": st.sampled_from(SCALARS)}),
            "minProperties": st.integers(0, 3),
            "maxProperties": st.integers(0, 3),
            "dependentRequired": st.dictionaries(KEY, st.lists(KEY, max_size=1), max_size=1),
            "propertyNames": st.sampled_from([{"enum": ["a", "b"]}, {"pattern": "^[abx]"}, {"maxLength": 1}]),
        },
    )
    of_arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={"items": inner, "prefixItems": some, "minItems": st.integers(0, 2), "maxItems": st.integers(0, 3)},
    )
    conditions = st.fixed_dictionaries(
        {"if": st.sampled_from(DENIED), "then": inner, "else": inner},
        optional={"properties": st.dictionaries(KEY, inner)},
    )
    return (
        of_objects
        | of_arrays
        | conditions
        | st.builds(lambda parts: {"anyOf": parts}, some)
        | st.builds(lambda parts: {"allOf": parts}, some)
        | st.builds(lambda part: {"not": part}, st.sampled_from(DENIED))
        | st.builds(lambda one, parts: one | {"anyOf": parts}, of_objects, some)
    )


PARTS = st.recursive(st.sampled_from(SCALARS + REFERENCES), keywords, max_leaves=8)
SCHEMAS = st.builds(
    lambda root, d, e: root | {"$defs": {"d": d, "e": e}},
    PARTS.filter(lambda part: isinstance(part, dict)),
    PARTS,
    PARTS,
)
VALUES = st.recursive(
    st.sampled_from(["", "a", "b", "ab", "x1", 0, 1, 3, 1.5, -2, True, False, None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=4,
)


def ordered(value):
    """Yields the value as JSON, with the keys of objects in any order: a grammar has one order of them."""
    if isinstance(value, dict) and value:
        for key in value:
            rest = {name: each for name, each in value.items() if name != key}
            for first in ordered(value[key]):
                for others in ordered(rest):
                    yield f"{{{json.dumps(key)}:{first}{',' if rest else ''}{others[1:-1]}}}"
    elif isinstance(value, list) and value:
        for first in ordered(value[0]):
            for others in ordered(value[1:]):
                yield f"[{first}{',' if value[1:] else ''}{others[1:-1]}]"
    else:
        yield json.dumps(value)
