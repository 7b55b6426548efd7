"""Checks what a text is held to: schemas, calls that are required, penalties, log-probabilities; with drafts
and without."""

import json
import math

import openai
import pydantic
import pytest
from serving import serving, settings

from luce.command import BOX

COLOURS = ["red", "green", "dark blue"]


class Paint(pydantic.BaseModel):
    """This is a schema with the usual parts."""

    colour: str = pydantic.Field(json_schema_extra={"enum": COLOURS})
    layers: list[bool] = pydantic.Field(min_length=1, max_length=3)
    glossy: bool
    name: str = pydantic.Field(max_length=8)


@pytest.fixture(scope="module", params=["auto", "off"])
def client(request, native):
    with serving({"box": BOX}, settings(spec=request.param)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client


SAID = {}  # what was said, by what was asked: the same with drafts and without
ASKED = {"model": "box", "messages": [{"role": "user", "content": "def paint():"}], "seed": 3}


def same(what, text):
    assert SAID.setdefault(what, text) == text


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_json_of_a_schema(client, temperature):
    found = client.chat.completions.parse(
        response_format=Paint, temperature=temperature, max_tokens=500, **ASKED
    )
    message = found.choices[0].message
    assert message.parsed.colour in COLOURS and found.choices[0].finish_reason == "stop"
    same(("schema", temperature), message.content)


def test_any_json_object(client):
    found = client.chat.completions.create(
        response_format={"type": "json_object"}, temperature=0, max_tokens=40, **ASKED
    )
    text = found.choices[0].message.content
    assert text.startswith("{") and (
        found.choices[0].finish_reason == "length" or json.loads(text) is not None
    )
    same("json", text)


TOOLS = [
    {"type": "function", "function": {"name": "mix", "parameters": {
        "type": "object", "required": ["colour", "layers"], "properties": {
            "colour": {"type": "string", "enum": COLOURS}, "layers": {"type": "integer"},
            "options": {"type": "object", "properties": {"dry": {"type": "boolean"}}, "required": ["dry"],
                        "additionalProperties": False}}}}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip


@pytest.mark.parametrize("choice", ["required", "mix", "stop"])
def test_required_calls(client, choice):
    named = {"type": "function", "function": {"name": choice}}
    found = client.chat.completions.create(
        tools=TOOLS, tool_choice=choice if choice == "required" else named, temperature=1.5, max_tokens=300,
        parallel_tool_calls=False, **ASKED,
    )  # fmt: skip
    (call,) = found.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ((choice,) if choice != "required" else ("mix", "stop"))
    if call.function.name == "mix":
        assert arguments["colour"] in COLOURS and isinstance(arguments["layers"], int)
    assert found.choices[0].finish_reason == "tool_calls"
    same(choice, (call.function.name, call.function.arguments))


def test_a_schema_that_cannot_be(client):
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(response_format=broken, **ASKED)


def test_penalties_and_bias(client):
    asked = {"model": "box", "prompt": "import os\nimport ", "temperature": 0, "max_tokens": 12}
    plain = client.completions.create(**asked).choices[0].text
    penalised = client.completions.create(presence_penalty=2, frequency_penalty=2, **asked).choices[0].text
    same("plain", plain)
    same("penalised", penalised)
    token = client.post("/../tokenize", cast_to=object, body={"content": plain})["tokens"][0]
    without = client.completions.create(logit_bias={str(token): -100}, **asked).choices[0].text
    assert without != plain
    for wrong in ({"5000000": 1}, {"a": 1}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(logit_bias=wrong, **asked)


def test_logprobs(client):
    asked = {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 2, **ASKED}
    whole = client.chat.completions.create(**asked).choices[0]
    said = whole.logprobs.content
    assert "".join(each.token for each in said) == whole.message.content and len(said) == 8
    for each in said:
        assert each.top_logprobs[0].logprob == max(top.logprob for top in each.top_logprobs) <= 0
        assert each.token == each.top_logprobs[0].token  # greedy: the most probable one
    parts = client.chat.completions.create(stream=True, **asked)
    content = [
        each for part in parts if part.choices[0].logprobs for each in part.choices[0].logprobs.content
    ]
    assert [(each.token, each.logprob) for each in content] == [(each.token, each.logprob) for each in said]
    same("logprobs", [each.logprob for each in said])
    old = client.completions.create(model="box", prompt="import os", max_tokens=4, logprobs=3, temperature=0)
    listed = old.choices[0].logprobs
    assert "".join(listed.tokens) == old.choices[0].text and listed.text_offset[0] == 0
    assert all(math.isclose(max(top.values()), each) for top, each in
               zip(listed.top_logprobs, listed.token_logprobs, strict=True))  # fmt: skip
