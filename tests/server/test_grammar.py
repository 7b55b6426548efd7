"""Checks what a text is held to: schemas, calls that are required, penalties, log-probabilities.

Each is asked of a server with drafts and of one without, which have to say the same."""

import enum
import json
import math
from contextlib import ExitStack
from typing import Literal

import httpx
import pytest
from depth import deeper
from serving import HANG_S, serving, settings

from luce.data import BOX
from luce.files.tokenizer import Tokenizer
from luce.native import File

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.clients

COLOURS = ["red", "green", "dark blue"]


class Paint(pydantic.BaseModel):
    """This is a schema with the usual parts."""

    colour: str = pydantic.Field(json_schema_extra={"enum": COLOURS})
    layers: list[bool] = pydantic.Field(min_length=1, max_length=3)
    glossy: bool
    name: str = pydantic.Field(max_length=8)


class Flat(pydantic.BaseModel):
    """This is one that each SDK leaves as it is."""

    colour: Literal["red", "green"]
    glossy: bool
    layers: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def urls(native):
    """Runs the model in the box with three drafts in each round, and with none."""
    ways = (settings(spec="mtp", gamma=3), settings(spec="off"))
    with ExitStack() as opened:
        yield [opened.enter_context(serving({"box": BOX}, how)).url for how in ways]


@pytest.fixture(scope="module")
def both(urls):
    """Gives both(ask): what ask(client) returns for each of the servers, where it is the same."""
    with ExitStack() as opened:
        how = {"api_key": "none", "max_retries": 0}
        clients = [opened.enter_context(openai.OpenAI(base_url=f"{url}/v1", **how)) for url in urls]

        def run(ask):
            with_drafts, without = map(ask, clients)
            assert with_drafts == without
            return without

        run.client = clients[0]
        yield run


@pytest.fixture(scope="module")
def claude(urls):
    with anthropic.Anthropic(base_url=urls[0], api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokens(native):
    with File(BOX, native) as file:
        tokenizer = Tokenizer(file.kv)
    return [tokenizer.bytes_of(token) for token in range(tokenizer.n_vocab)]


SAID = [{"role": "user", "content": "def paint():"}]
ASKED = {"model": "box", "messages": SAID, "seed": 3}


@pytest.mark.parametrize("temperature", [*deeper(0), 1.2])
def test_json_of_a_schema(both, temperature):
    def ask(client):
        (choice,) = client.chat.completions.parse(
            response_format=Paint, temperature=temperature, max_tokens=500, **ASKED
        ).choices
        assert choice.message.parsed.colour in COLOURS and choice.finish_reason == "stop"
        return choice.message.content

    both(ask)


def test_any_json_object(both):
    def ask(client):
        asked = {"response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 40}
        (choice,) = client.chat.completions.create(**asked, **ASKED).choices
        return choice.message.content, choice.finish_reason

    text, reason = both(ask)
    assert text.startswith("{") and (reason == "length" or json.loads(text) is not None)


# ---- the SDKs' own ways to ask for a schema: each streams what it says whole


def test_openais_responses_are_parsed(both):
    asked = {"model": "m", "input": SAID, "text_format": Flat, "temperature": 0}
    found = both(lambda client: client.responses.parse(**asked).output_parsed)
    assert isinstance(found, Flat)
    with both.client.responses.stream(**asked) as stream:
        assert [each for each in stream][-1].type == "response.completed"
        assert stream.get_final_response().output_parsed == found


def test_openais_chats_are_parsed_from_streams(both):
    asked = {"model": "m", "messages": SAID, "response_format": Flat, "temperature": 0}
    found = both(lambda client: client.chat.completions.parse(**asked).choices[0].message.parsed)
    with both.client.chat.completions.stream(**asked) as stream:
        assert "content.done" in {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == found


def test_anthropics_messages_are_parsed(claude):
    asked = {"model": "m", "messages": SAID, "max_tokens": 200, "extra_body": {"temperature": 0}}
    found = claude.messages.parse(output_format=Flat, **asked)
    assert isinstance(found.parsed_output, Flat) and found.stop_reason == "end_turn"
    with claude.messages.stream(output_format=Flat, **asked) as stream:
        assert "text" in {event.type for event in stream}
        assert stream.get_final_message().parsed_output == found.parsed_output
    form = {"type": "json_schema", "schema": anthropic.transform_schema(Flat)}
    for where in ({"output_config": {"format": form}}, {"output_format": form}):
        # The API takes it there now, and the beta took it there.
        raw = claude.post("/v1/messages", cast_to=object, body={**asked, "temperature": 0, **where})
        assert Flat.model_validate_json(raw["content"][0]["text"]) == found.parsed_output
    for wrong in ({"type": "json_object"}, {"type": "json_schema"}, {**form, "schema": {"type": "strange"}}):
        with pytest.raises(anthropic.BadRequestError, match="schema"):
            claude.messages.create(output_config={"format": wrong}, **asked)


def test_ollamas_answers_are_of_a_schema(urls):
    options = {"temperature": 0, "num_predict": 100}

    def ask(url, form):
        asked = {"model": "m", "messages": SAID, "stream": False, "options": options, "format": form}
        return httpx.post(f"{url}/api/chat", json=asked, timeout=HANG_S).json()

    schema = Flat.model_json_schema() | {"additionalProperties": False}
    text, other = (ask(url, schema)["message"]["content"] for url in urls)
    assert text == other and Flat.model_validate_json(text)
    assert ask(urls[0], "xml") == {"error": "format 'xml' is neither json nor a schema"}


TOOLS = [
    {"type": "function", "function": {"name": "mix", "parameters": {
        "type": "object", "required": ["colour", "layers"], "properties": {
            "colour": {"type": "string", "enum": COLOURS}, "layers": {"type": "integer"},
            "options": {"type": "object", "properties": {"dry": {"type": "boolean"}}, "required": ["dry"],
                        "additionalProperties": False}}}}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip


@pytest.mark.parametrize("choice", ["required", *deeper("mix", "stop")])
def test_required_calls(both, choice):
    named = choice if choice == "required" else {"type": "function", "function": {"name": choice}}

    def ask(client):
        how = {"tools": TOOLS, "tool_choice": named, "parallel_tool_calls": False}
        (said,) = client.chat.completions.create(temperature=1.5, max_tokens=300, **how, **ASKED).choices
        (call,) = said.message.tool_calls
        return call.function.name, call.function.arguments, said.finish_reason

    name, arguments, reason = both(ask)
    assert name in ((choice,) if choice != "required" else ("mix", "stop")) and reason == "tool_calls"
    arguments = json.loads(arguments)
    assert name == "stop" or (arguments["colour"] in COLOURS and isinstance(arguments["layers"], int))


class Place(pydantic.BaseModel):
    x: Literal[1, 2]


class Colour(str, enum.Enum):
    RED, BLUE = "red", "dark blue"


class Put(pydantic.BaseModel):
    """Its fields are references and alternatives in the schema."""

    place: Place
    colour: Colour
    near: Place | None
    size: Literal["s", "m", 1]
    other: Colour | None


@pytest.mark.parametrize("seed", [0, *deeper(1, 2)])
def test_a_required_call_fits_its_pydantic_model(both, seed):
    tool = openai.pydantic_function_tool(Put)

    def ask(client):
        how = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
        found = client.chat.completions.parse(model="m", messages=SAID, seed=seed, temperature=1.5, **how)
        (call,) = found.choices[0].message.tool_calls
        return call.function.parsed_arguments

    assert type(both(ask)) is Put


@pytest.mark.long
def test_tools_may_be_called_before_an_answer_of_a_schema(both, claude, tokens):
    """What the text begins with says which of them it is; a bias keeps the other one out."""
    tool = openai.pydantic_function_tool(Put)

    def without(mark, **more):
        bias = {str(token): -100 for token, spelled in enumerate(tokens) if spelled.startswith(mark)}
        asked = {"tools": [tool], "response_format": Flat, "logit_bias": bias, "parallel_tool_calls": False}

        def ask(client):
            found = client.chat.completions.parse(temperature=0, max_tokens=300, **asked, **more, **ASKED)
            message = found.choices[0].message
            calls = [call.function.parsed_arguments for call in message.tool_calls or ()]
            return calls, message.parsed, found.choices[0].finish_reason

        return both(ask)

    (call,), nothing, reason = without(b"{")
    assert (type(call), nothing, reason) == (Put, None, "tool_calls")
    for more in ({}, {"tool_choice": "none"}):
        none, parsed, reason = without(b"<", **more)
        assert (none, type(parsed), reason) == ([], Flat, "stop")
    tools = [{"name": "now", "input_schema": {"type": "object", "properties": {}}}]
    found = claude.messages.create(model="m", messages=SAID, max_tokens=200, tools=tools, output_config={
        "format": {"type": "json_schema", "schema": anthropic.transform_schema(Flat)}})  # fmt: skip
    if found.content[0].type == "tool_use":  # It may go on to call until its length is reached.
        assert found.stop_reason in ("tool_use", "max_tokens")
    else:
        assert Flat.model_validate_json(found.content[0].text)


def test_a_schema_that_cannot_be(both):
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    with pytest.raises(openai.BadRequestError, match="schema"):
        both.client.chat.completions.create(response_format=broken, **ASKED)


def test_penalties_and_bias(both):
    asked = {"model": "box", "prompt": "import os\nimport ", "temperature": 0, "max_tokens": 12}

    def text(**more):
        return both(lambda client: client.completions.create(**asked, **more).choices[0].text)

    plain = text()
    assert text(presence_penalty=2, frequency_penalty=2) != plain
    token = both.client.post("/../tokenize", cast_to=object, body={"content": plain})["tokens"][0]
    assert text(logit_bias={str(token): -100}) != plain
    for wrong in ({"5000000": 1}, {"a": 1}):
        with pytest.raises(openai.BadRequestError):
            both.client.completions.create(logit_bias=wrong, **asked)


def test_logprobs(both):
    """They are of the rows that were verified, and the same bits as of single ones."""
    asked = {"max_tokens": 24, "logprobs": True, "top_logprobs": 2, **ASKED}

    def ask(client):
        (whole,) = client.chat.completions.create(temperature=1.0, **asked).choices
        return whole.message.content, whole.logprobs.content

    text, said = both(ask)
    assert "".join(each.token for each in said) == text and len(said) == 24
    parts = both.client.chat.completions.create(stream=True, temperature=1.0, **asked)
    found = [part.choices[0].logprobs for part in parts]
    assert [each for logprobs in found if logprobs for each in logprobs.content] == said
    (greedy,) = both.client.chat.completions.create(temperature=0, **asked).choices
    for each in greedy.logprobs.content:
        assert each.top_logprobs[0].logprob == max(top.logprob for top in each.top_logprobs) <= 0
        assert each.token == each.top_logprobs[0].token  # It is the most probable one.

    def old(client):
        asked = {"model": "box", "prompt": "import os", "max_tokens": 12, "logprobs": 3, "temperature": 0}
        (choice,) = client.completions.create(**asked).choices
        return choice.text, choice.logprobs

    text, listed = both(old)
    assert "".join(listed.tokens) == text and listed.text_offset[0] == 0
    assert all(math.isclose(max(top.values()), each) for top, each in
               zip(listed.top_logprobs, listed.token_logprobs, strict=True))  # fmt: skip
