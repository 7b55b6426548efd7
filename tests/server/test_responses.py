"""Asks /v1/responses as agents do: items of every type, references to what was said, and what is kept."""

import msgspec
import pytest
import scripted_model
from depth import deeper, deeper_but
from said_calls import FUNCTION, SCRIPTS
from serving import serving, settings

from luce.server.api.items import messages_of
from luce.server.api.responses import ResponsesBody, conversation_of, responses_ask
from luce.server.ask import Refused
from luce.server.stored import Stored
from luce.text.dialects import QWEN

PATH = "/v1/responses"
GREEDY = {"temperature": 0, "max_output_tokens": 400}


@pytest.fixture(scope="module", params=deeper_but(SCRIPTS, QWEN), ids=lambda dialect: dialect.name)
def server(request, native, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    path = scripted_model.write(folder / "scripted.gguf", SCRIPTS[request.param], dialect=request.param)
    with serving({"scripted": path}, settings(ctx=4096)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as client:
        yield client


def user(text):
    return {"role": "user", "content": text}


def told(*items):
    """Returns what a model is told of items, without the message that asks."""
    *_, asks = messages = messages_of([*items, user("x")])
    assert asks == user("x")
    return messages[:-1]


def calling(name, arguments, id="c"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(name, arguments, output=None, id="c"):
    """Returns the messages of a call, and of its answer where there is one."""
    message = {"role": "assistant", "content": "", "tool_calls": [calling(name, arguments, id)]}
    return [message] + ([] if output is None else [{"role": "tool", "content": output, "tool_call_id": id}])


NOTE = "[image: this model reads text alone]"
SHELL = {"type": "exec", "command": ["ls"], "env": {}}
ITEMS = [  # The model is told this of each.
    ({"type": "message", **user("a")}, [user("a")]),
    ({"type": None, **user("a")}, [user("a")]),
    (user([{"type": "input_text", "text": "a"}]), [user("a")]),
    ({"role": "developer", "content": "a"}, [{"role": "developer", "content": "a"}]),
    ({"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [
        {"type": "output_text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": "b"}]},
     [{"role": "assistant", "content": "ab"}]),
    # They have nothing for a model.
    *((item, []) for item in (
        {"type": "additional_tools", "role": "developer", "tools": []},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}},
        {"type": "file_search_call", "id": "f", "status": "completed", "queries": ["q"], "results": None},
        {"type": "compaction", "id": "c", "encrypted_content": "xyz"},
        {"type": "compaction_summary", "encrypted_content": "xyz"},
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
        {"type": "mcp_approval_request", "id": "m", "server_label": "s", "name": "f", "arguments": "{}"},
        {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
        {"type": "mcp_call", "id": "m", "server_label": "s", "name": "f", "arguments": "{}"},
        {"type": "code_interpreter_call", "id": "i", "code": "1", "container_id": "c", "outputs": None},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "of another server"},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
        {"type": "tool_search_call", "call_id": "c", "arguments": {}},
        {"type": "tool_search_output", "call_id": "c", "tools": []},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "nobody_knows_it", "data": 1},
    )),
    # thoughts
    ({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
     [{"role": "assistant", "content": "", "reasoning_content": "hm"}]),
    ({"type": "reasoning", "summary": [], "encrypted_content": "luce:aG0="},
     [{"role": "assistant", "content": "", "reasoning_content": "hm"}]),
    ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "xyz"},
     [{"role": "assistant", "content": "", "reasoning_content": "hm"}]),
    # calls
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}, called("f", {"a": 1})),
    ({"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
     called("apply_patch", {"input": "*** Begin"})),
    ({"type": "local_shell_call", "call_id": "c", "action": SHELL}, called("local_shell", SHELL)),
    ({"type": "local_shell_call", "id": "c", "action": SHELL}, called("local_shell", SHELL)),
    ({"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
     called("shell", {"commands": ["ls"]})),
    ({"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
     called("apply_patch", {"type": "delete_file", "path": "a"})),
    ({"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}},
     called("computer", {"type": "screenshot"})),
    # calls that were answered
    ({"type": "mcp_call", "id": "c", "name": "f", "arguments": '{"a": 1}', "output": "42"},
     called("f", {"a": 1}, "42")),
    ({"type": "mcp_call", "id": "c", "name": "f", "arguments": "{}", "error": "it failed"},
     called("f", {}, "it failed")),
    ({"type": "file_search_call", "id": "c", "queries": ["q"], "results": [{"id": 1, "text": "words"}]},
     called("file_search", {"queries": ["q"]}, "words")),
    ({"type": "code_interpreter_call", "id": "c", "code": "6*7",
      "outputs": [{"type": "logs", "logs": "42"}]},
     called("code_interpreter", {"code": "6*7"}, "42")),
    ({"type": "image_generation_call", "id": "i", "result": "A"}, [{"role": "assistant", "content": NOTE}]),
]  # fmt: skip
OUTPUTS = [  # A tool's output is told so.
    ({"type": "function_call_output", "output": "42"}, "42"),
    ({"type": "function_call_output", "output": [{"type": "input_text", "text": "42"}]}, "42"),
    ({"type": "function_call_output", "output": [{"type": "input_image", "image_url": "x"}]}, NOTE),
    ({"type": "function_call_output", "output": {"content": "forty-two apples", "success": True}},
     "forty-two apples"),
    ({"type": "function_call_output", "output": {"apples": 42}}, '{"apples": 42}'),
    ({"type": "custom_tool_call_output", "output": "42"}, "42"),
    ({"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "42"}]}, "42"),
    ({"type": "local_shell_call_output", "output": '{"output": "42"}'}, '{"output": "42"}'),
    ({"type": "shell_call_output", "output": [{"stdout": "42", "outcome": {"type": "exit"}}]},
     '[{"stdout": "42", "outcome": {"type": "exit"}}]'),
    ({"type": "apply_patch_call_output", "status": "failed", "output": "no such file"}, "no such file"),
    ({"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "x"}}, NOTE),
    ({"type": "program_output", "result": "42", "status": "completed"}, "42"),
]  # fmt: skip


@pytest.mark.parametrize(("item", "messages"), ITEMS)
def test_every_item_is_told_or_left_out(item, messages):
    assert told(item) == messages


@pytest.mark.parametrize(("item", "text"), OUTPUTS)
def test_what_a_tool_answered_reaches_the_model(item, text):
    assert told({**item, "call_id": "c"}) == [{"role": "tool", "content": text, "tool_call_id": "c"}]


def test_items_of_one_turn_are_one_message():
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "web_search_call", "id": "w"},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "2"},
    ]
    message, *outputs = told(*items)
    calls = [calling("f", {}), calling("g", {"input": "x"}, "d")]
    assert message == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": calls,
    }
    assert [(each["tool_call_id"], each["content"]) for each in outputs] == [("c", "1"), ("d", "2")]


def test_items_declare_tools_and_change_the_configuration():
    other = {**FUNCTION, "name": "write"}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [other, {"type": "web_search"}]},
        {"type": "tool_search_output", "call_id": "c", "tools": [FUNCTION]},
        user("x"),
        {"type": "configuration_update", "reasoning": {"effort": "none"}},
        {"type": "configuration_update", "text": {"format": {"type": "json_object"}}},
    ]
    body = {"input": items, "tools": [FUNCTION], "reasoning": {"effort": "high"}}
    ask = responses_ask(msgspec.convert(body, ResponsesBody))
    assert [tool.name for tool in ask.tools] == ["read", "write"]
    held = {"input": "x", "text": {"format": {"type": "json_object"}}}
    assert ask.variables == {"enable_thinking": False}
    assert ask.constraint == responses_ask(msgspec.convert(held, ResponsesBody)).constraint is not None


# ---- what is kept


@pytest.mark.clients
def test_an_item_that_was_said_is_referred_to(client, server):
    """The AI SDK sends its second step so."""
    first = client.responses.create(model="m", input="SAY read", tools=[FUNCTION], **GREEDY)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"] and first.store
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    references = [
        {"type": kind, "id": item.id}
        for kind, item in zip((None, "item_reference"), first.output[:2], strict=True)
    ]
    items = [user("SAY read"), *references, {"type": "item_reference", "id": call.id}, output]
    by_reference = client.responses.create(model="m", input=items, tools=[FUNCTION], **GREEDY)
    assert by_reference.output_text == "It says 42."
    whole = [user("SAY read"), *(item.model_dump() for item in first.output), output]
    by_value = client.responses.create(model="m", input=whole, tools=[FUNCTION], **GREEDY)
    assert by_value.output_text == "It says 42."
    assert by_value.usage.input_tokens == by_reference.usage.input_tokens


@pytest.mark.clients
@pytest.mark.parametrize("stream", [True, *deeper(False)])
def test_a_response_that_was_given_is_gone_on_from(client, stream):
    asked = {"model": "m", "tools": [FUNCTION], "instructions": "Be brief.", **GREEDY}
    if stream:
        with client.responses.stream(input="SAY read", **asked) as events:
            first = events.until_done().get_final_response()
    else:
        first = client.responses.create(input="SAY read", **asked)
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    second = client.responses.create(previous_response_id=first.id, input=[output], **asked)
    assert second.output_text == "It says 42." and second.previous_response_id == first.id
    whole = [user("SAY read"), *(item.model_dump() for item in first.output), output]
    assert client.responses.create(input=whole, **asked).usage.input_tokens == second.usage.input_tokens
    third = client.responses.create(previous_response_id=second.id, input="SAY hello", **asked)
    assert third.output_text == "Hello, wörld!"
    again = [*whole, *(item.model_dump() for item in second.output), user("SAY hello")]
    assert client.responses.create(input=again, **asked).usage.input_tokens == third.usage.input_tokens
    fewer = {**asked, "instructions": None}  # Instructions are those of a request alone.
    assert client.responses.create(
        previous_response_id=first.id, input=[output], **fewer
    ).usage.input_tokens < (second.usage.input_tokens)


@pytest.mark.clients
def test_what_was_kept_is_told_and_deleted(client, server):
    items = [{"role": "developer", "content": "rules"}, user([{"type": "input_text", "text": "SAY hello"}])]
    made = client.responses.create(model="m", input=items, metadata={}, **GREEDY)
    kept = client.responses.retrieve(made.id)
    assert kept.model_dump() == made.model_dump()
    page = client.responses.input_items.list(made.id, order="asc")
    texts = [(item.role, item.content[0].text) for item in page]
    assert texts == [("developer", "rules"), ("user", "SAY hello")] and len({item.id for item in page}) == 2
    one = client.responses.input_items.list(made.id, order="asc", limit=1)
    assert [item.role for item in one] == ["developer", "user"]  # The client asks for each page.
    assert [item.role for item in client.responses.input_items.list(made.id)] == ["user", "developer"]
    client.responses.delete(made.id)
    for path, ask in (("", server.http.get), ("", server.http.delete), ("/input_items", server.http.get)):
        gone = ask(f"{PATH}/{made.id}{path}")
        assert gone.status_code == 404 and made.id in gone.json()["error"]["message"]
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match=made.id) as error:
        client.responses.create(model="m", input="a", previous_response_id=made.id)
    assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.BadRequestError, match=made.output[0].id) as error:
        client.responses.create(model="m", input=[{"type": "item_reference", "id": made.output[0].id}])
    assert error.value.param == "input"
    assert server.http.get(f"{PATH}/x/input_items?limit=0").status_code in (400, 404)


@pytest.mark.clients
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_kept_where_store_says_so(client, server, stream):
    asked = {"model": "m", "input": "SAY hello", "store": False, **GREEDY}
    made = client.responses.create(**asked, stream=stream)
    if stream:
        *_, last = made
        made = last.response
    assert made.store is False and made.output_text == "Hello, wörld!"
    assert server.http.get(f"{PATH}/{made.id}").status_code == 404
    body = {"input": [user("a"), {"type": "item_reference", "id": made.output[0].id}]}
    assert made.output[0].id in server.post(PATH, **body).json()["error"]["message"]
    kept = client.responses.create(**{**asked, "store": True})
    gone_on = client.responses.create(model="m", input="SAY hello", previous_response_id=kept.id, store=False)
    assert gone_on.output_text == "Hello, wörld!"


@pytest.mark.clients
def test_a_cut_answer_is_kept_too(client):
    made = client.responses.create(model="m", input="SAY hello", temperature=0, max_output_tokens=2)
    assert made.status == "incomplete" == client.responses.retrieve(made.id).status


@pytest.mark.clients
def test_a_finished_answer_is_followed_by_another(client, server):
    """A message that is complete is not continued; one that was cut is."""
    made = client.responses.create(model="m", input="SAY hello", **GREEDY)
    again = client.responses.create(model="m", input=[], previous_response_id=made.id, **GREEDY)
    assert again.output_text == "Hello, wörld!"
    asks = {}
    for status in ("completed", "incomplete"):
        item = {**made.output[-1].model_dump(), "status": status}
        asks[status] = responses_ask(msgspec.convert({"input": [user("a"), item]}, ResponsesBody)).continues
    assert asks == {"completed": False, "incomplete": True}


# ---- bounds


def response(number, size=0, previous=None):
    item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": "a" * size}
    return {"id": f"resp_{number}", "previous_response_id": previous and f"resp_{previous}", "output": [item]}


def kept(stored, numbers):
    found = []
    for number in numbers:
        try:
            stored._known(f"resp_{number}")
            found.append(number)
        except Refused:
            with pytest.raises(Refused):
                stored.holders([f"msg_{number}"])
    return found


def test_the_store_is_bounded_by_number_and_bytes():
    stored = Stored(most=3)
    for number in range(1, 6):
        stored.keep(response(number), b"[]")
    assert kept(stored, range(1, 6)) == [3, 4, 5]
    stored.get("resp_3")  # It was used last.
    stored.keep(response(6), b"[]")
    assert kept(stored, range(1, 7)) == [3, 5, 6]
    stored = Stored(most_bytes=10_000)
    for number in range(1, 6):
        stored.keep(response(number, 2000), b'["' + b"b" * 1000 + b'"]')
    assert kept(stored, range(1, 6)) == [3, 4, 5] and stored._bytes <= 10_000
    stored.keep(response(7, 10_000), b"[]")  # It is too large by itself.
    assert kept(stored, range(1, 8)) == [3, 4, 5]
    for number in (3, 4, 5):
        stored.delete(f"resp_{number}")
    assert stored._bytes == 0 and not stored._holders


def test_a_conversation_that_is_used_stays_whole():
    stored = Stored(most=4)
    for number in (1, 2):
        stored.keep(response(number, previous=number - 1 or None), b'[{"n": %d}]' % number)
    stored.keep(response(10), b"[]")
    turns = stored.turns("resp_2")  # Both were used by it.
    assert [(turn.input, turn.items) for turn in turns] == [([{"n": n}], (f"msg_{n}",)) for n in (1, 2)]
    for number in (11, 12):
        stored.keep(response(number), b"[]")
    assert kept(stored, (1, 2, 10, 11, 12)) == [1, 2, 11, 12]
    stored.keep(response(13), b"[]")
    with pytest.raises(Refused, match="resp_[12]") as refused:
        stored.turns("resp_2")
    assert refused.value.status == 400 and refused.value.param == "previous_response_id"


def test_references_are_kept_as_what_they_are():
    stored = Stored()
    stored.keep(response(1), b"[]")
    body = {"input": [{"id": "msg_1"}, user("a")], "previous_response_id": "resp_1"}
    before, brought = conversation_of(msgspec.convert(body, ResponsesBody), stored)
    assert before == response(1)["output"] and brought == [*before, user("a")]
    body = {"input": [{"type": "item_reference", "id": 3}]}
    with pytest.raises(Refused):
        conversation_of(msgspec.convert(body, ResponsesBody), stored)
