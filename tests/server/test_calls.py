"""Checks calls that a grammar forces, over the clients' own SDKs: their arguments come while they are
written."""

import json

import pytest
from serving import serving

from luce.data import BOX

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.clients

PATH = 'notes/ä "b".txt, or whichever name the other one has by now'
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": [PATH]}, "lines": {"type": "integer", "enum": [3, 4]}},
    "required": ["path", "lines"],
    "additionalProperties": False,
}
FUNCTION = {"name": "read", "description": "Reads.", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]
SAID = [{"role": "user", "content": "def read("}]
ASKED = {"model": "m", "messages": SAID, "tools": TOOLS, "tool_choice": "required", "temperature": 0,
         "parallel_tool_calls": False}  # fmt: skip


@pytest.fixture(scope="module")
def server(native):
    with serving({"box": BOX}) as running:
        yield running


@pytest.fixture(scope="module")
def chatgpt(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def whole(chatgpt):
    return chatgpt.chat.completions.create(**ASKED)


@pytest.fixture(scope="module")
def arguments(whole):
    (call,) = whole.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert arguments["path"] == PATH and arguments["lines"] in (3, 4) and call.function.name == "read"
    return arguments


def chat(chatgpt, **more):
    """Returns (content, tool calls as (name, [arguments]), finish_reason) of a stream."""
    content, calls, reason = "", [], None
    for part in chatgpt.chat.completions.create(stream=True, **ASKED, **more):
        (choice,) = part.choices
        content, reason = content + (choice.delta.content or ""), choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls)
                calls.append((call.function.name, []))
            if call.function.arguments:
                calls[call.index][1].append(call.function.arguments)
    return content, calls, reason


def test_chat_completions(chatgpt, arguments):
    content, ((name, parts),), reason = chat(chatgpt)
    assert (content, name, reason) == ("", "read", "tool_calls")
    assert json.loads("".join(parts)) == arguments and len(parts) > 8


def test_messages(server, arguments):
    tool, choice = (
        {"name": "read", "input_schema": SCHEMA},
        {"type": "any", "disable_parallel_tool_use": True},
    )
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        with claude.messages.stream(
            model="m",
            max_tokens=400,
            messages=SAID,
            tools=[tool],
            tool_choice=choice,
            extra_body={"temperature": 0},
        ) as stream:
            parts = [event.partial_json for event in stream if event.type == "input_json"]
            found = stream.get_final_message()
    assert found.content[-1].input == arguments == json.loads("".join(parts)) and len(parts) > 8
    assert found.stop_reason == "tool_use"


RESPONSE = {"model": "m", "input": SAID, "tools": [{"type": "function", **FUNCTION}], "temperature": 0,
            "tool_choice": "required", "parallel_tool_calls": False}  # fmt: skip


def test_responses(chatgpt, arguments):
    with chatgpt.responses.stream(**RESPONSE) as stream:
        events = list(stream)
    parts = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    (done,) = [each for each in events if each.type == "response.function_call_arguments.done"]
    assert json.loads(done.arguments) == arguments and "".join(parts) == done.arguments and len(parts) > 8
    assert events[-1].response.output[-1].status == "completed"


def test_a_call_that_the_token_limit_cuts_is_told_in_every_form(chatgpt, whole, arguments):
    """What a stream has begun stays, and is no whole call; nothing of it is content."""
    most = whole.usage.completion_tokens - 12
    (cut,) = chatgpt.chat.completions.create(max_tokens=most, **ASKED).choices
    assert cut.finish_reason == "length" and not cut.message.tool_calls and not cut.message.content
    content, ((name, parts),), reason = chat(chatgpt, max_tokens=most)
    assert (content, name, reason) == ("", "read", "length")
    assert json.dumps(arguments, ensure_ascii=False).startswith("".join(parts)) and parts
    *_, last = chatgpt.responses.create(max_output_tokens=most, stream=True, **RESPONSE)
    (call,) = last.response.output
    assert (last.type, call.status) == ("response.incomplete", "incomplete")
    assert call.arguments == "".join(parts)
