"""Runs the clients' own SDKs against a real server, with a model that says what its script holds."""

import json
import re
from itertools import count
from unittest import mock

import msgspec
import pytest
import scripted_model
from checkout import ROOT
from depth import deeper, deeper_but
from said_calls import ANTHROPIC_TOOL, ARGUMENTS, FUNCTION, SCRIPTS, SYSTEM, TOOL
from serving import each_event_alone, serving, settings

from luce.server import answer
from luce.server.answer import Answer
from luce.server.api.anthropic import MessagesBody, messages_ask
from luce.server.ask import Refused
from luce.text.conversation import ordered
from luce.text.dialects import QWEN
from luce.text.prompt import prompt_ids

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.clients


@pytest.fixture(scope="module", params=deeper_but(SCRIPTS, QWEN), ids=lambda dialect: dialect.name)
def dialect(request):
    return request.param


@pytest.fixture(scope="module")
def server(native, tmp_path_factory, dialect):
    folder = tmp_path_factory.mktemp("scripted")
    path = scripted_model.write(folder / "scripted.gguf", SCRIPTS[dialect], dialect=dialect)
    with serving({"scripted": path}, settings(ctx=4096), keys=["key"]) as running:
        yield running


@pytest.fixture(scope="module")
def chatgpt(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0) as client:
        yield client


GREEDY = {"temperature": 0, "max_tokens": 400}


def say(name):
    return [{"role": "user", "content": f"Please SAY {name} now"}]


def test_the_example_of_the_servers_page(server, capsys):
    page = (ROOT / "docs" / "server.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)
    assert "http://127.0.0.1:8080" in example and '"local"' in example
    exec(example.replace("http://127.0.0.1:8080", server.url).replace('"local"', '"key"'), {})
    assert capsys.readouterr().out.strip()


# ---- /v1/chat/completions


def test_chat(chatgpt):
    found = chatgpt.chat.completions.create(model="gpt-x", messages=say("hello"), **GREEDY)
    type(found).model_validate(found.model_dump(), strict=True)
    message = found.choices[0].message
    assert (message.content, message.reasoning_content) == ("Hello, wörld!", "The user greets me.")
    assert found.choices[0].finish_reason == "stop" and found.model == "gpt-x"
    assert 0 < found.usage.completion_tokens_details.reasoning_tokens < found.usage.completion_tokens


def test_chat_streams_and_calls_tools(chatgpt):
    messages = say("read")
    with chatgpt.chat.completions.stream(model="m", messages=messages, tools=[TOOL], **GREEDY) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_completion().choices[0]
    assert {"chunk", "content.delta", "tool_calls.function.arguments.done"} <= kinds
    (call,) = found.message.tool_calls
    assert found.finish_reason == "tool_calls" and found.message.content == "I look."
    assert (call.function.name, json.loads(call.function.arguments)) == ("read", ARGUMENTS)
    messages += [found.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    found = chatgpt.chat.completions.create(model="m", messages=messages, tools=[TOOL], **GREEDY)
    assert found.choices[0].message.content == "It says 42."


def test_several_calls_or_one(chatgpt):
    asked = {"model": "m", "messages": say("twice"), "tools": [TOOL], **GREEDY}
    calls = chatgpt.chat.completions.create(**asked).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["lines"] for call in calls] == [3, 4]
    one = chatgpt.chat.completions.create(parallel_tool_calls=False, **asked).choices[0]
    assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"


def test_a_function_that_is_named_is_called_once(chatgpt):
    """So OpenAI says: "Forced Function: Call exactly one specific function"."""
    asked = {"model": "m", "messages": say("twice"), "tools": [TOOL], **GREEDY}
    named = {"type": "function", "function": {"name": "read"}}
    assert len(chatgpt.chat.completions.create(tool_choice=named, **asked).choices[0].message.tool_calls) == 1
    asked = {"model": "m", "input": say("twice"), "tools": [FUNCTION], "max_output_tokens": 400, "temperature": 0}
    found = chatgpt.responses.create(tool_choice={"type": "function", "name": "read"}, **asked)
    assert [item.type for item in found.output].count("function_call") == 1 and found.parallel_tool_calls


def test_a_broken_call_and_tools_that_may_not_be_called(chatgpt, dialect):
    found = chatgpt.chat.completions.create(model="m", messages=say("broken"), tools=[TOOL], **GREEDY)
    assert found.choices[0].message.content == SCRIPTS[dialect]["broken"][0]
    found = chatgpt.chat.completions.create(
        model="m", messages=say("read"), tools=[TOOL], tool_choice="none", **GREEDY
    )
    assert found.choices[0].message.content == "Fine." and not found.choices[0].message.tool_calls


def test_errors_are_the_sdks_own(chatgpt, claude, server):
    long = [{"role": "user", "content": "words " * 5000}]
    with pytest.raises(openai.BadRequestError) as error:
        chatgpt.chat.completions.create(model="m", messages=long)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        chatgpt.chat.completions.create(model="m", messages=say("hello"), n=0)
    assert error.value.param == "n"
    with pytest.raises(openai.AuthenticationError):
        chatgpt.with_options(api_key="wrong").responses.create(model="m", input="a")
    with pytest.raises(anthropic.BadRequestError, match="tool_choice names 'nobody'"):
        claude.messages.create(
            model="m", messages=say("hello"), max_tokens=5, tool_choice={"type": "tool", "name": "nobody"}
        )
    with pytest.raises(anthropic.BadRequestError, match="there are no tools"):
        claude.messages.create(model="m", messages=long, max_tokens=5, tool_choice={"type": "any"})
    with pytest.raises(openai.NotFoundError):
        chatgpt.models.retrieve("nobody")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: [0-9]+ tokens > 4096 maximum"):
        claude.messages.create(model="m", messages=long, max_tokens=5)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="wrong").messages.create(
            model="m", messages=say("hello"), max_tokens=5
        )
    assert [model.id for model in chatgpt.models.list()] == ["scripted"]


def test_completions(chatgpt):
    found = chatgpt.completions.create(model="m", prompt="x", max_tokens=3, echo=True, temperature=0)
    assert found.choices[0].text.startswith("x") and found.usage.completion_tokens == 3
    parts = list(chatgpt.completions.create(model="m", prompt="x", max_tokens=3, stream=True, temperature=0))
    assert "x" + "".join(part.choices[0].text for part in parts) == found.choices[0].text


def test_a_stream_lives_while_a_call_is_held_back(server, monkeypatch):
    """It is certain at its end alone, and much may happen before."""
    monkeypatch.setattr(answer, "monotonic", count().__next__)  # Nobody waits by this clock.
    monkeypatch.setattr(answer, "KEEP_ALIVE", 4)
    body = {"messages": say("read"), "tools": [TOOL], "stream": True, **GREEDY}
    with each_event_alone():
        text = server.http.post("/v1/chat/completions", json=body, headers={"x-api-key": "key"}).text
    held = text[text.rindex('"content":"') : text.index('"tool_calls":[')]
    assert held.count(": keep-alive\n\n") >= 3


# ---- /v1/responses

OTHERS = [{"type": "web_search"}, {"type": "namespace", "name": "mcp", "description": "x", "tools": []}]


def test_responses_stream_calls_and_go_on(chatgpt, dialect):
    asked = {"model": "m", "tools": [FUNCTION, *OTHERS], "instructions": "Be brief.", "temperature": 0}
    items = [{"role": "developer", "content": "rules"}, *say("read")]
    with chatgpt.responses.stream(input=items, store=False, **asked) as stream:
        events = list(stream)
        found = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 3
    assert [event.sequence_number for event in events] == list(range(len(events)))
    reasoning, message, call = found.output
    assert reasoning.content[0].text == "The user greets me." and message.content[0].text == "I look."
    assert (call.name, json.loads(call.arguments)) == ("read", ARGUMENTS)
    sealed = reasoning.model_dump() | {"content": None}  # codex sends it back so.
    items += [
        sealed,
        message,
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]
    items = [item if isinstance(item, dict) else item.model_dump() for item in items]
    assert chatgpt.responses.create(input=items, **asked).output_text == "It says 42."
    with_thought = chatgpt.post("/../apply-template", cast_to=object, body={"messages": [
        {"role": "assistant", "content": "a", "reasoning_content": "b"}]})  # fmt: skip
    assert ("<think>\nb\n</think>" in with_thought["prompt"]) == (dialect is QWEN)  # Gemma forgets older thoughts.


def test_responses_whole_and_cut(chatgpt):
    found = chatgpt.responses.create(model="m", input="SAY hello", temperature=0)
    type(found).model_validate(found.model_dump(), strict=False)
    assert found.output_text == "Hello, wörld!" and found.status == "completed"
    found = chatgpt.responses.create(model="m", input="SAY hello", temperature=0, max_output_tokens=2)
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"


# ---- /v1/messages

def test_messages_stream_calls_and_go_on(claude):
    asked = {"model": "claude-x", "max_tokens": 400, "system": SYSTEM,
             "tools": [ANTHROPIC_TOOL, {"type": "web_search_20250305", "name": "web_search"}],
             "thinking": {"type": "adaptive"}}  # fmt: skip
    messages = say("read")
    with claude.messages.stream(messages=messages, **asked) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert found.model == "claude-x" and found.stop_reason == "tool_use"
    thought, text, call = found.content
    assert (thought.thinking, text.text) == ("The user greets me.", "I look.") and thought.signature
    assert (call.name, call.input) == ("read", ARGUMENTS)
    answer = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]}
    messages += [{"role": "assistant", "content": found.content}, {"role": "user", "content": [answer]},
                 {"role": "system", "content": "late"}]  # fmt: skip
    done = claude.messages.create(messages=messages, **asked)
    type(done).model_validate(done.model_dump(), strict=False)
    assert [block.text for block in done.content] == ["It says 42."] and done.stop_reason == "end_turn"
    counted = claude.messages.count_tokens(
        **{k: v for k, v in asked.items() if k != "max_tokens"}, messages=messages
    )
    usage = done.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_turn_begins_like_the_one_before_whatever_the_client_changes(server, dialect):
    """Claude Code's first block of the system text changes at each call, and it sends a system message in the
    middle once as a list and once as a string."""
    served = server.models.slots["scripted"].served
    template, tokenizer = served.template, served.tokenizer
    late = ("Late.", [{"type": "text", "text": "Late."}])

    def prompt(n):
        body = {"system": [{"type": "text", "text": f"x-anthropic-billing-header: {n}"}, SYSTEM[1]],
                "messages": [*say("hello"), {"role": "system", "content": late[n]}]}  # fmt: skip
        ask = messages_ask(msgspec.convert(body, MessagesBody))
        return prompt_ids(template, tokenizer, ordered(ask.messages))

    assert prompt(0) == prompt(1)
    header = {"system": "x-anthropic-billing-header: 1\nBe brief.", "messages": say("hello")}
    assert messages_ask(msgspec.convert(header, MessagesBody)).messages[0]["content"] == "Be brief."
    text = tokenizer.decode(prompt(0), special=True)
    begin, end = dialect.turn
    assert "billing" not in text and text.removeprefix("<bos>").startswith(f"{begin}system\nBe brief.{end}")
    assert f"Late.{end}" in text


def test_stop_sequences_and_lengths(claude):
    asked = {"model": "m", "messages": say("hello")}
    found = claude.messages.create(max_tokens=100, stop_sequences=["lo,"], **asked)
    assert (found.stop_reason, found.stop_sequence, found.content[-1].text) == ("stop_sequence", "lo,", "Hel")
    assert claude.messages.create(max_tokens=1, **asked).stop_reason == "max_tokens"


# ---- Ollama


def test_ollamas_lines(server):
    headers = {"Authorization": "Bearer key"}
    options = {"temperature": 0, "num_predict": 400}
    body = {"model": "scripted", "messages": say("read"), "tools": [TOOL], "options": options}
    response = server.http.post("/api/chat", json=body, headers=headers)
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "I look."
    (calls,) = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    (call,) = calls
    assert call["id"] and call["function"] == {"index": 0, "name": "read", "arguments": ARGUMENTS}
    body["messages"] = say("twice")
    text = server.http.post("/api/chat", json=body, headers=headers).text
    calls = [call for line in text.splitlines() for call in json.loads(line)["message"].get("tool_calls", ())]
    whole = server.http.post("/api/chat", json=body | {"stream": False}, headers=headers).json()
    for told in (calls, whole["message"]["tool_calls"]):
        assert [call["function"]["index"] for call in told] == [0, 1]
        assert len({call["id"] for call in told}) == 2
    assert lines[-1]["done"] and lines[-1]["eval_count"] > 0
    body = {"model": "scripted", "prompt": "SAY hello", "stream": False, "options": options}
    found = server.http.post("/api/generate", json=body, headers=headers).json()
    assert (found["response"], found["thinking"]) == ("Hello, wörld!", "The user greets me.")
    for path in ("/api/tags", "/api/ps"):
        assert [m["name"] for m in server.http.get(path, headers=headers).json()["models"]] == ["scripted"]
    shown = server.http.post("/api/show", json={"model": "scripted"}, headers=headers).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert server.http.get("/api/version", headers=headers).json()["version"]


# ---- the published types: every answer and every event is one of them


def sse(response):
    """Returns the data of a stream's events."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    assert response.status_code == 200 and lines, response.text
    return [json.loads(line) for line in lines]


KINDS = {
    "/v1/chat/completions": (openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
    "/v1/completions": (openai.types.Completion, openai.types.Completion),
    "/v1/responses": (openai.types.responses.Response, openai.types.responses.ResponseStreamEvent),
    "/v1/messages": (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
}


@pytest.mark.parametrize("name", ["read", *deeper("hello", "twice", "broken")])
@pytest.mark.parametrize("path", KINDS)
def test_every_answer_and_event_is_of_the_published_types(server, path, name):
    whole, event = (pydantic.TypeAdapter(kind) for kind in KINDS[path])
    extra = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    tools = {"/v1/chat/completions": [TOOL], "/v1/responses": [FUNCTION], "/v1/messages": [ANTHROPIC_TOOL]}
    said = {"/v1/completions": {"prompt": "x", "logprobs": 2}, "/v1/responses": {"input": say(name)}}
    body = {"model": "m", "max_tokens": 60, "thinking": {"type": "adaptive"}, "tools": tools.get(path)}
    body |= said.get(path, {"messages": say(name)})
    if path == "/v1/chat/completions":
        body |= {"logprobs": True, "top_logprobs": 1}
    headers = {"Authorization": "Bearer key"}
    found = server.http.post(path, json=body, headers=headers)
    whole.validate_json(found.text, strict=True)
    for each in sse(server.http.post(path, json={**body, "stream": True, **extra}, headers=headers)):
        for choice in each.get("choices", ()) if path == "/v1/completions" else ():
            # It is null in the API, but not in its types.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        event.validate_json(json.dumps(each), strict=True)


@pytest.mark.parametrize("path", KINDS)
def test_every_error_is_of_the_published_types(server, path):
    """They are of the body, of its length, and of the key."""
    long = "words " * 5000
    said = {"/v1/completions": {"prompt": long}, "/v1/responses": {"input": long}}
    asked = said.get(path, {"messages": [{"role": "user", "content": long}]})
    for body, key, status in (({}, "key", 400), (asked, "key", 400), (asked, "wrong", 401)):
        response = server.http.post(path, json={"max_tokens": 9, **body}, headers={"x-api-key": key})
        assert response.status_code == status
        if path == "/v1/messages":
            pydantic.TypeAdapter(anthropic.types.ErrorResponse).validate_json(response.text, strict=True)
        else:
            kind = pydantic.TypeAdapter(openai.types.shared.ErrorObject)
            kind.validate_json(json.dumps(response.json()["error"]), strict=True)


@pytest.mark.parametrize("path", KINDS)
def test_an_error_after_the_stream_began_is_an_event(server, path, monkeypatch):
    def failing(self, *_):
        raise Refused(500, "the device failed", "failed")

    monkeypatch.setattr(Answer, "_read", failing)
    said = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "a"}}
    body = {"max_tokens": 4, "stream": True} | said.get(path, {"messages": say("hello")})
    response = server.http.post(path, json=body, headers={"x-api-key": "key"})
    last = sse(response)[-1]
    assert "the device failed" in json.dumps(last)
    assert last.get("type") == {"/v1/responses": "response.failed", "/v1/messages": "error"}.get(path)


def test_the_sdks_raise_an_error_after_the_stream_began(chatgpt, claude, monkeypatch):
    monkeypatch.setattr(Answer, "_read", mock.Mock(side_effect=Refused(500, "the device failed", "failed")))
    asked = {"model": "m", "messages": say("hello"), "max_tokens": 4}
    with pytest.raises(openai.APIError, match="the device failed"):
        list(chatgpt.chat.completions.create(stream=True, **asked))
    with pytest.raises(anthropic.APIStatusError, match="the device failed"):
        list(claude.messages.create(stream=True, **asked))
