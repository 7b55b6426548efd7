"""Checks grammars: texts that are held to one, with the same tokens whatever drafts; and what bad ones
give."""

import json
import sys

import jsonschema
import pytest
from box_model import GGUF, PROMPTS
from depth import deeper

from luce.data import BOX
from luce.decode.engine import Engine
from luce.decode.events import Finished
from luce.decode.request import Request
from luce.errors import ArgumentError, UnsupportedError
from luce.files.tokenizer import Tokenizer
from luce.native import File
from luce.native.structs import Penalties, Sampling
from luce.planning.opened import Files
from luce.planning.plan import Options
from luce.text.grammar import Grammars, beginnings

RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": -5, "maximum": 99},
        "kind": {"enum": ["point", "list of points", 3, None]},
        "name": {"type": "string", "maxLength": 12},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["id", "kind", "name", "flags", "more"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 500}, "é": {"const": "ü\n"}},
            "required": ["é"],
            "additionalProperties": False,
        }
    },
}
SAMPLINGS = [
    Sampling(),
    Sampling(1.0, seed=1),
    Sampling(0.7, 20, 0.95, seed=2),
    Sampling(1.5, min_p=0.01, seed=3),
]


@pytest.fixture(scope="module")
def engines(device):
    with Files(GGUF, device=device) as files:
        plain = Engine.open(files, Options(ctx=1024, threads=1, spec="off"))
        with plain, Engine.open(files, Options(ctx=1024, threads=1, spec="mtp", gamma=3)) as drafting:
            yield plain, drafting


@pytest.fixture(scope="module")
def grammars(engines):
    return Grammars(engines[0].tokenizer)


def text(engines, grammar, sampling, prompt=PROMPTS[0], **more):
    """Returns the text that both engines write, with equal tokens, and how it ended."""
    ids = tuple(engines[0].tokenizer.encode(prompt))
    ends = [list(one.generate(Request(ids, 900, sampling, grammar=grammar, **more)))[-1] for one in engines]
    assert all(isinstance(end, Finished) for end in ends), ends
    assert ends[0].tokens == ends[1].tokens and ends[0].text == ends[1].text
    assert ends[0].reason == ends[1].reason
    return ends[0].text, ends[0].reason


@pytest.mark.parametrize("sampling", [*deeper(*SAMPLINGS[:3]), SAMPLINGS[3]], ids=str)
@pytest.mark.parametrize(
    "schema",
    [
        RECORD,
        {
            "type": "array",
            "items": {"$ref": "#/$defs/e"},
            "maxItems": 5,
            "$defs": {"e": {"enum": [1, "a", None]}},
        },
    ],
    ids=["record", "array"],
)
def test_json_is_valid_under_its_schema(engines, grammars, schema, sampling):
    hot = sampling.temperature > 1
    penalties = Penalties(1.2, 0.5, 0.5, bias=((10, 3.0),)) if hot else Penalties()
    grammar = grammars.json_schema(schema)
    written, reason = text(engines, grammar, sampling, PROMPTS[hot], penalties=penalties)
    assert reason == "stop", written
    jsonschema.validate(json.loads(written), schema)


def test_a_lark_grammar_ends_where_nothing_may_follow(engines, grammars):
    grammar = grammars.lark('start: "return" " " ("x" | "yes") [";"]')
    for sampling in SAMPLINGS:
        written, reason = text(engines, grammar, sampling)
        assert reason == "stop" and written in {
            f"return {name}{end}" for name in ("x", "yes") for end in ("", ";")
        }


def test_a_grammar_that_never_ends_stops_at_the_budget(engines, grammars):
    ids = tuple(engines[1].tokenizer.encode("x"))
    request = Request(ids, 9, Sampling(1.0), grammar=grammars.lark("start: /a+b/"))
    end = list(engines[1].generate(request))[-1]
    assert isinstance(end, Finished) and set(end.text) <= set("ab")
    assert end.reason == ("stop" if end.text.endswith("b") else "length")


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "[1]",
        '{"type": "frog"}',
        '{"$ref": "#/nothing"}',
        '{"type": "string", "pattern": "("}',
        '{"not": ' * 200 + "{}" + "}" * 200,
        '{"not": ' * 10**5 + "{}" + "}" * 10**5,
        '{"maxLength": ' + "9" * 5000 + "}",
    ],
    ids=range(8),
)
def test_a_schema_that_cannot_be_held_to_is_refused(grammars, schema):
    with pytest.raises(ArgumentError, match="schema|grammar"):
        grammars.json_schema(schema)


def test_a_schema_on_the_command_line_that_is_nested_too_deep_is_one_line(luce_):
    result = luce_("generate", "x", "-n", "1", "--json-schema", '{"not": ' * 10**4)
    assert result.exit_code == 1 and result.stderr == "Error: the schema is nested too deep\n"


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("--json-schema", "garbage", "the schema is no JSON: "),
        ("--grammar", "a(", "the grammar cannot be used: "),
    ],
)
def test_a_file_that_is_no_grammar_is_named(luce_, tmp_path, flag, text, said):
    path = tmp_path / "garbage"
    path.write_text(text)
    result = luce_("generate", "x", "-n", "1", flag, path)
    assert result.exit_code == 1 and result.stderr.startswith(f"Error: {path}: {said}")


def test_a_grammar_says_where_it_is_wrong(grammars):
    with pytest.raises(ArgumentError, match=r"1\(\d+\)") as error:
        grammars.lark("start: foo bar(")
    assert "\n" not in str(error.value)


def test_without_llguidance_the_remedy_is_named(monkeypatch, engines, luce_, tmp_path):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError):
        Grammars(engines[0].tokenizer)
    result = luce_("generate", "x", "-n", "1", "--json-schema", "{}")
    assert result.exit_code == 1 and "[grammar]" in result.stderr


@pytest.mark.long
def test_the_command_line_takes_them(luce_, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(RECORD))
    grammar.write_text('start: "no"')
    common = ("generate", "x = ", "--quiet")
    result = luce_(*common, "-n", "900", "--json-schema", schema, "--temp", "1")
    jsonschema.validate(json.loads(result.stdout), RECORD)
    cut = luce_(*common[:-1], "-n", "2", "--json-schema", schema)
    assert cut.exit_code == 0 and "after 2 tokens (-n), where its grammar would go on" in cut.stderr
    assert luce_(*common, "--json-schema", '{"const": 7}').stdout == "7"
    assert luce_(*common, "--grammar", grammar, "--logit-bias", "5=-100").stdout == "no"
    plain = luce_(*common, "-n", "20").stdout
    for flag in ("--repetition-penalty=2", "--presence-penalty=2", "--frequency-penalty=2"):
        assert luce_(*common, "-n", "20", flag).stdout != plain


@pytest.mark.parametrize(
    "flags",
    [
        ("--json-schema", "{}", "--grammar", __file__),
        ("--logit-bias", "5"),
        ("--logit-bias", "5=nan"),
        ("--logit-bias", "5=101"),
        ("--logit-bias", "-1=1"),
        ("--logit-bias", "4096=1"),
        ("--repetition-penalty", "0"),
        ("--presence-penalty", "2.1"),
        ("--frequency-penalty", "-3"),
    ],
    ids=" ".join,
)
def test_flags_out_of_range_are_usage_errors(luce_, flags):
    assert luce_("generate", "x", "-n", "1", *flags).exit_code == 2


def test_a_vocabulary_that_llguidance_cannot_take_is_refused(monkeypatch):
    """llguidance would panic, with lines of its own on stderr."""
    tokens = [bytes([first, *second]) for first in b"abc" for second in (b"", b"xy", b"xyz", b"zz")]
    assert beginnings(tokens) == len({token[:end] for token in tokens for end in range(1, len(token) + 1)})
    monkeypatch.setattr("luce.text.grammar.MAX_NODES", 256)
    with File(BOX) as box, pytest.raises(UnsupportedError, match="for grammars they are too many"):
        Grammars(Tokenizer(box.kv)).json_schema('{"type": "object"}')
