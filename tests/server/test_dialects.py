"""Asks models of two dialects the same over each API: what comes is the same, event by event."""

import json
import re

import pytest
import scripted_model
from depth import deeper
from said_calls import ANTHROPIC_TOOL, ARGUMENTS, FUNCTION, GEMMA_SCRIPT, SCRIPTS, TOOL
from serving import serving, settings


@pytest.fixture(scope="module")
def server(native, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    paths = {
        each.name: scripted_model.write(folder / f"{each.name}.gguf", script, dialect=each)
        for each, script in SCRIPTS.items()
    }
    with serving(paths, settings(ctx=4096)) as running:
        yield running


def say(name):
    return [{"role": "user", "content": f"Please SAY {name} now"}]


def answered(name, api):
    """Returns the conversation in which the tools that a text calls have answered."""
    call = {"name": "read", "arguments": json.dumps(ARGUMENTS)}
    if api == "messages":
        used = {"type": "tool_use", "id": "c1", "name": "read", "input": ARGUMENTS}
        told = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]}
        return [*say(name), {"role": "assistant", "content": [used]}, {"role": "user", "content": [told]}]
    if api == "responses":
        return [*say(name), {"type": "function_call", "call_id": "c1", **call},
                {"type": "function_call_output", "call_id": "c1", "output": "42"}]  # fmt: skip
    arguments = ARGUMENTS if api == "ollama" else call["arguments"]
    calls = [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}]
    told = {"role": "tool", "tool_call_id": "c1", "tool_name": "read", "content": "42"}
    return [*say(name), {"role": "assistant", "content": "", "tool_calls": calls}, told]


APIS = {
    "chat": ("/v1/chat/completions", lambda said: {"messages": said, "tools": [TOOL], "temperature": 0,
                                                    "max_tokens": 400}),
    "responses": ("/v1/responses", lambda said: {"input": said, "tools": [FUNCTION], "temperature": 0,
                                                 "max_output_tokens": 400}),
    "messages": ("/v1/messages", lambda said: {"messages": said, "tools": [ANTHROPIC_TOOL], "max_tokens": 400,
                                               "thinking": {"type": "adaptive"}}),
    "ollama": ("/api/chat", lambda said: {"messages": said, "tools": [TOOL], "options": {"temperature": 0}}),
}  # fmt: skip
VARYING = {"id", "created", "created_at", "item_id", "call_id", "usage", "timings", "model", "system_fingerprint",
           "completed_at", "encrypted_content", "obfuscation", "signature"}  # fmt: skip


def same(value):
    """Returns what of an answer does not depend on when and by which model it was given."""
    if isinstance(value, dict):
        return {key: same(each) for key, each in value.items()
                if key not in VARYING and not re.search(r"_(duration|count)$", key)}  # fmt: skip
    return [same(each) for each in value] if isinstance(value, list) else value


def text_of(event):
    """Returns the place of the text in an event that adds to one, as a list of keys, and the text."""
    for keys in (["delta"], ["delta", "text"], ["delta", "thinking"], ["delta", "partial_json"],
                 ["choices", 0, "delta", "content"], ["choices", 0, "delta", "reasoning_content"],
                 ["message", "content"], ["message", "thinking"]):  # fmt: skip
        value = event
        for key in keys:
            there = key in value if isinstance(value, dict) else isinstance(value, list) and value
            value = value[key] if there else None
        if isinstance(value, str) and value:
            return keys, value
    return None, ""


def events_of(text, api):
    """Returns the events of a stream, those that add to the same text as one: [(kind, the event or the text)]."""
    lines = text.splitlines() if api == "ollama" else re.findall(r"^data: (.*)$", text, re.M)
    found = []
    for line in lines:
        event = {} if line == "[DONE]" else same(json.loads(line))
        event.pop("sequence_number", None)
        keys, said = text_of(event)
        if keys and not event.get("done") and found and found[-1][0] == keys:
            found[-1] = (keys, found[-1][1] + said)
        else:
            found.append((keys, said) if keys and not event.get("done") else (None, event))
    return found


def asked(server, model, api, said, stream, **more):
    path, body = APIS[api]
    reply = server.http.post(path, json={"model": model, "stream": stream, **body(said), **more})
    assert reply.status_code == 200, reply.text
    return events_of(reply.text, api) if stream else same(reply.json())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["read", *deeper("hello", "twice")])
@pytest.mark.parametrize("api", APIS)
def test_both_dialects_give_the_same_events(server, api, name, stream):
    qwen, gemma = (asked(server, model, api, say(name), stream) for model in ("qwen", "gemma"))
    assert gemma == qwen
    told = json.dumps(gemma, ensure_ascii=False)
    assert ("notes/a b.txt" in told) == (name != "hello") and ("greets me" in told) == (name != "twice")
    assert not re.search(r"<\|?(channel|tool_call|think)|(channel|tool_call)\|?>", told)


@pytest.mark.parametrize("api", APIS)
def test_both_dialects_go_on_with_what_a_tool_answers(server, api):
    qwen, gemma = (asked(server, model, api, answered("read", api), True) for model in ("qwen", "gemma"))
    assert gemma == qwen and "It says 42." in json.dumps(gemma)


@pytest.mark.parametrize("api", APIS)
def test_a_call_that_is_broken_is_text(server, api):
    found = asked(server, "gemma", api, say("broken"), False)
    assert json.dumps(GEMMA_SCRIPT["broken"][0])[1:-1] in json.dumps(found)


LETTERS = "whichever name the other one has by now"
FORCED = {"type": "object", "properties": {"path": {"enum": [LETTERS]}, "lines": {"type": "integer", "enum": [3, 4]}},
          "required": ["path", "lines"], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "read"}}, "auto"], ids=str)
def test_a_forced_call_is_of_the_models_dialect(server, choice):
    """The script says something else: the grammar's words are the only ones. A strict tool is held to where it is
    called."""
    tool = {"type": "function", "function": {**TOOL["function"], "parameters": FORCED, "strict": True}}
    body = {"model": "gemma", "messages": say("twice"), "tools": [tool], "temperature": 0, "max_tokens": 400,
            "tool_choice": choice, "parallel_tool_calls": False}  # fmt: skip
    (whole,) = server.http.post("/v1/chat/completions", json=body).json()["choices"]
    (call,) = whole["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["path"] == LETTERS and arguments["lines"] in (3, 4) and whole["finish_reason"] == "tool_calls"
    text = server.http.post("/v1/chat/completions", json={**body, "stream": True}).text
    parts = [each for line in re.findall(r"^data: (\{.*)$", text, re.M) for each in json.loads(line)["choices"]]
    told = [call["function"].get("arguments") or "" for each in parts for call in each["delta"].get("tool_calls") or ()]
    assert "".join(told) == call["function"]["arguments"] and len(told) > 8
    assert not any(each["delta"].get("content") for each in parts)


def test_the_template_decides_how_a_prompt_that_does_not_think_ends(server):
    prompts = {
        think: server.http.post("/apply-template", json={"model": "gemma", "messages": say("hello"),
                                                         "chat_template_kwargs": {"enable_thinking": think}}).json()
        for think in (True, False)
    }  # fmt: skip
    ends = {think: reply["prompt"].rpartition("<|say:")[0] for think, reply in prompts.items()}
    empty = "<|channel>thought\n<channel|>"
    assert ends[False].endswith(f"<|turn>model\n{empty}") and ends[True].endswith("<|turn>model\n")
    assert ends[True].startswith("<bos><|turn>system\n<|think|>\n") and "<|think|>" not in ends[False]


def test_reasoning_is_counted(server):
    body = {"model": "gemma", "messages": say("hello"), "temperature": 0, "max_tokens": 400}
    usage = server.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert "thinking" in server.http.post("/api/show", json={"model": "gemma"}).json()["capabilities"]
