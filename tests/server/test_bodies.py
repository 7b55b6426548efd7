"""Spoils the bodies of requests at any place: each is an ask that a model can be given, or refused in words.

What the engine is asked for is made here as the server makes it, without the engine."""

from __future__ import annotations

import asyncio
import copy
import json
import random

import pytest
from depth import deeper
from said_calls import ANTHROPIC_TOOL, ARGUMENTS, FUNCTION, SCHEMA, SYSTEM, TOOL

from luce.data import BOX
from luce.decode.request import Request
from luce.errors import Error
from luce.files.template import ChatTemplate
from luce.files.tokenizer import Tokenizer
from luce.native import File
from luce.native.structs import Penalties, Sampling
from luce.server.api import anthropic, ollama, openai, responses
from luce.server.api.body import MAX_DEPTH, _typed, read
from luce.server.ask import Refused
from luce.text.call_grammar import call_grammar
from luce.text.conversation import ordered
from luce.text.prompt import prompt_ids
from luce.text.structured import grammar_of

CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": json.dumps(ARGUMENTS)}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": "b", "reasoning_content": "c", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "42"},
]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
HOW = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}
MORE = {"model": "m", "n": 1, "stop": ["x"], "logit_bias": {"3": 1.5}, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "repetition_penalty": 1.1, "max_tokens": 4, "stream": True,
        "stream_options": {"include_usage": True}}  # fmt: skip
TEXT = {"type": "output_text", "text": "b"}
INPUT = [
    {"role": "developer", "content": "d"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "reasoning", "summary": [], "encrypted_content": "luce:YQ=="},
    {"type": "message", "role": "assistant", "content": [TEXT]},
    {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "42"},
]
BLOCKS = [
    {"type": "thinking", "thinking": "t", "signature": "s"},
    {"type": "text", "text": "x"},
    {"type": "tool_use", "id": "c", "name": "read", "input": ARGUMENTS},
]
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "42"}]}
BODIES = {  # By API, these are its form, what makes an ask of it, and bodies that use all of it.
    "chat completions": (openai.ChatBody, openai.chat_ask, [
        {"messages": TALK, "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2,
         "reasoning_effort": "low", "thinking_budget": 5, **HOW, **MORE,
         "chat_template_kwargs": {"enable_thinking": True, "preserve_thinking": False}},
        {"messages": TALK, "response_format": FORM},
        {"messages": TALK[:2], "tools": [TOOL],
         "tool_choice": {"type": "function", "function": {"name": "read"}}}]),
    "completions": (openai.CompletionBody, openai.completion_ask, [
        {"prompt": "a", "echo": True, "logprobs": 2, "best_of": 1, "ignore_eos": True, **HOW, **MORE},
        {"prompt": [1, 2]}]),
    "responses": (responses.ResponsesBody, responses.responses_ask, [
        {"input": INPUT, "instructions": "i", "tools": [FUNCTION], "tool_choice": "auto", **HOW,
         "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}]),
    "messages": (anthropic.MessagesBody, anthropic.messages_ask, [
        {"system": SYSTEM, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "auto"}, "max_tokens": 4,
         "thinking": {"type": "enabled", "budget_tokens": 5}, "stop_sequences": ["x"], "top_k": 3,
         "output_config": {"effort": "low"}, "messages": [
             {"role": "user", "content": "a"}, {"role": "assistant", "content": BLOCKS},
             {"role": "user", "content": [RESULT]}, {"role": "system", "content": "late"}]},
        {"messages": [{"role": "user", "content": "a"}],
         "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}]),
    "Ollama's chats": (ollama.ChatBody, ollama.chat_ask, [
        {"messages": [{"role": "user", "content": "a"},
                      {"role": "assistant", "content": "b", "thinking": "t",
                       "tool_calls": [{"function": {"name": "read", "arguments": ARGUMENTS}}]},
                      {"role": "tool", "content": "42"}],
         "tools": [TOOL], "format": SCHEMA, "think": "low",
         "options": {**HOW, "num_predict": 3, "stop": ["x"], "repeat_penalty": 1.1}}]),
    "Ollama's texts": (ollama.GenerateBody, ollama.generate_ask, [
        {"prompt": "a", "system": "s", "raw": False, "think": True, "options": {"num_predict": 3}}]),
}  # fmt: skip
ODD = [
    None, True, 0, -1, 1.5, 1e308, 2**63, -(2**70), "", "x", "\0", "auto", "\u65e5" * 9, [], {}, [None], [[]],
    ["x"], [1], [{}], {"a": 1}, {"type": 1}, {"type": "text"}, {"": None}, {"properties": 3},
]  # fmt: skip


# It does with a message what those of models do.
TEMPLATE = ChatTemplate("""
{%- for tool in tools or [] %}{{ tool.function.name + (tool | tojson) }}{% endfor %}
{%- for m in messages %}{{ m.role + m.content + (m.reasoning_content or '') }}
{%- for c in m.tool_calls or [] %}{{ '<function=' + c.function.name }}
{%- for key, value in c.function.arguments | items %}{{ key + (value | tojson) }}{% endfor %}
{%- endfor %}{% endfor %}""")


@pytest.fixture(scope="module")
def tokenizer(native):
    with File(BOX, native) as file:
        return Tokenizer(file.kv)


def places(value, above=()):
    """Yields the paths of all that is in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*above, key)
        yield from places(each, (*above, key))


def spoilt(rng, body):
    """Returns a body of which one or two places are missing, of another type, or in a list."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 2)):
        *above, key = rng.choice([*places(body)] or [("x",)])
        holder, how = body, rng.random()
        for each in above:
            holder = holder[each]
        if how < 0.8 or not body:
            holder[key] = copy.deepcopy(rng.choice(ODD))
        elif how < 0.9:
            holder[key] = [holder[key]]
        else:
            del holder[key]
    return body


class Sent:
    """This is an HTTP request with a body."""

    def __init__(self, body):
        self._raw = json.dumps(body).encode()

    async def stream(self):
        yield self._raw


def given(ask, tokenizer):
    """Makes of an ask what the engine gets."""
    if ask.prompt is None:
        tools = [tool.as_template for tool in ask.tools]
        prompt_ids(TEMPLATE, tokenizer, ordered(ask.messages), tools or None, **ask.variables)
    Request((1,), ask.max_tokens, Sampling(**ask.sampling), ask.stops, ask.ignore_eos,
            penalties=Penalties(**ask.penalties), logprobs=ask.logprobs)  # fmt: skip
    if ask.tools:
        call_grammar(ask.tools, True, required=True, many=ask.parallel_calls)
    if ask.constraint is not None:
        grammar_of(ask.constraint, True)


def test_what_is_asked_of_sampling_means_the_same_in_each_api():
    stop, more = ["x"], {"presence_penalty": 0.25, "frequency_penalty": 0.5}
    said = [{"role": "user", "content": "a"}]
    penalties = {"presence": 0.25, "frequency": 0.5, "repetition": 1.1}
    theirs = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}  # Anthropic has no others.
    asked = {
        "chat completions": ({"messages": said, "stop": stop, "repetition_penalty": 1.1, **HOW, **more}, HOW),
        "completions": ({"prompt": "a", "stop": stop, "repeat_penalty": 1.1, **HOW, **more}, HOW),
        "responses": ({"input": "a", **HOW}, HOW),
        "messages": ({"messages": said, "stop_sequences": stop, **theirs}, theirs),
    }
    options = {"options": {**HOW, **more, "stop": stop, "repeat_penalty": 1.1}}
    asked |= {"Ollama's chats": ({"messages": said, **options}, HOW), "Ollama's texts": (options, HOW)}
    assert asked.keys() == BODIES.keys()
    for api, (body, sampling) in asked.items():
        form, ask_of, _ = BODIES[api]
        ask = ask_of(asyncio.run(read(Sent(body), form)))
        assert ask.sampling == sampling
        assert ask.stops == (() if api == "responses" else ("x",))
        assert ask.penalties == ({} if api in ("responses", "messages") else penalties)


@pytest.mark.parametrize("n", [100, *deeper(400)])
@pytest.mark.parametrize("api", BODIES)
def test_a_body_that_is_spoilt_anywhere_is_an_ask_or_refused(api, n, tokenizer):
    form, ask_of, bodies = BODIES[api]

    async def is_asked(body):
        try:
            given(ask_of(await read(Sent(body), form)), tokenizer)
        except Refused as refused:
            assert refused.status == 400 and refused.message, body
        except Error:  # The server refuses what the engine does.
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}: {json.dumps(body)}") from error
        else:
            return True
        return False

    async def all_of_them():
        rng = random.Random(1)
        assert [await is_asked(body) for body in bodies] == [True] * len(bodies)
        asked = [await is_asked(spoilt(rng, rng.choice(bodies))) for _ in range(n)]
        assert 0.05 * n < sum(asked) < 0.95 * n

    asyncio.run(all_of_them())


def nested(deep: int, inside: list[object]) -> bytes:
    """A body whose prompt is so many lists within each other, the innermost of which is `inside`."""
    return b'{"prompt":' + b"[" * (deep - 1) + json.dumps(inside).encode() + b"]" * (deep - 1) + b"}"


@pytest.mark.parametrize("inside", [[1], [1, 2, 3], ["x"], [1, [2]], [[2], 1], [{"a": 1}, 2]])
def test_a_body_may_be_nested_so_deep_whatever_lies_innermost(inside):
    """Of an innermost list one value says how deep it is."""
    deeper_by = 1 if any(isinstance(each, (list, dict)) for each in inside) else 0
    most = MAX_DEPTH - 1 - deeper_by  # The body itself is a level.
    for deep, refused in ((most, False), (most + 1, True)):
        try:
            _typed(nested(deep, inside), openai.CompletionBody, openai.CompletionBody.API, [])
            said = ""
        except Refused as error:
            said = str(error)
        assert (said == "the body is nested too deeply") == refused, (deep, said)


@pytest.mark.parametrize(
    ("given", "taken"),
    [([1, 2, 3], [1, 2, 3]), ([1.0, 2], [1, 2]), ([], []), ([True], None), ([1.5, 2], None), ([1, None], None),
     ("x", None), ([1, "2"], None)],
)  # fmt: skip
def test_tokens_of_a_prompt_are_whole_numbers(given, taken):
    if taken is None:
        with pytest.raises(Refused, match="neither texts nor lists of tokens"):
            openai.tokens_of(given, "prompt")
    else:
        found = openai.tokens_of(given, "prompt")
        assert found == taken and all(type(token) is int for token in found)
