"""Asks the server, in each API's own words, for conversations that have to go on: without a user, with a last
message to continue, with images that nobody can read."""

import json

import pytest
from serving import serving, settings, until
from templates import CALL, GEMMA, QWEN

from luce.data import BOX
from luce.files.template import ChatTemplate
from luce.server import models
from luce.text.prompt import BoundedTemplate

NOTE = "[image: this model reads text alone]"
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
LIMITS = {  # So much is said in each API.
    CHAT: {"max_tokens": 6, "temperature": 0},
    RESPONSES: {"max_output_tokens": 6, "temperature": 0},
    MESSAGES: {"max_tokens": 6, "temperature": 0},
    OLLAMA: {"stream": False, "options": {"num_predict": 6.0, "temperature": 0}},
}


@pytest.fixture(scope="module")
def server(native):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(models, "chat_template", lambda kv: BoundedTemplate(QWEN))
        with serving({"box": BOX}, settings(ctx=2048)) as running:
            yield running


@pytest.fixture
def ask(server, prompts):
    """Gives ask(path, **body), the answer and the text of its prompt."""
    decode = server.models.slots["box"].served.tokenizer.decode

    def asked(path, **body):
        response = server.post(path, **{**LIMITS[path], **body})
        assert response.status_code == 200, response.text
        return response.json(), decode(prompts[-1], special=True)

    return asked


def text_of(path, answer):
    """Returns the text that an answer says."""
    if path == CHAT:
        return answer["choices"][0]["message"]["content"]
    if path == RESPONSES:
        return answer["output"][-1]["content"][0]["text"]
    return answer["content"][0]["text"] if path == MESSAGES else answer["message"]["content"]


def refused(server, path, **body):
    """Returns what is said of a body that is refused."""
    response = server.post(path, **{**LIMITS[path], **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if path == MESSAGES:
        assert response.json()["type"] == "error" and error["type"] == "invalid_request_error"
    return error if path == OLLAMA else error["message"]


def say(text, role="user"):
    return {"role": role, "content": text}


# ---- nobody asks

SYSTEM = say("Write a title.", "system")
ANTHROPIC_CALL = [
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {"at": "sea"}}],
    },
    say([{"type": "tool_result", "tool_use_id": "c", "content": "a boat"}]),
]
CHAT_CALL = [{"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "c"}]},
             {"role": "tool", "tool_call_id": "c", "content": "a boat"}]  # fmt: skip
NOBODY = [
    (CHAT, {"messages": [SYSTEM]}, {"messages": [SYSTEM, *CHAT_CALL]}),
    (RESPONSES, {"instructions": "Write a title.", "input": []}, {"instructions": "Write a title.", "input": [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "sea"}'},
        {"type": "function_call_output", "call_id": "c", "output": "a boat"}]}),
    (MESSAGES, None,
     {"system": "Write a title.", "messages": ANTHROPIC_CALL, "thinking": {"type": "enabled"}}),
    (OLLAMA, {"messages": [SYSTEM]}, {"messages": [SYSTEM, CHAT_CALL[0], say("a boat", "tool")]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "alone", "called"), NOBODY)
def test_a_conversation_without_a_user_is_answered(ask, path, alone, called):
    expected = ChatTemplate(QWEN).render([SYSTEM, say("")])
    if alone is not None:
        assert ask(path, **alone)[1] == expected
    arguments = [{**CHAT_CALL[0], "tool_calls": [{"function": {"name": "look", "arguments": {"at": "sea"}}}]}]
    assert ask(path, **called)[1] == ChatTemplate(QWEN).render([SYSTEM, say(""), *arguments, CHAT_CALL[1]])


def test_a_template_that_takes_nothing_is_quoted(native, monkeypatch):
    source = "{{- raise_exception('I take no ' + messages[0].role) }}"
    monkeypatch.setattr(models, "chat_template", lambda kv: BoundedTemplate(source))
    with serving({"box": BOX}, settings(ctx=512)) as running:
        for path, body in ((CHAT, {"messages": [SYSTEM]}), (OLLAMA, {"messages": [SYSTEM]}),
                           (MESSAGES, {"system": "a", "messages": [say("b")]})):  # fmt: skip
            assert "tokenizer.chat_template failed: I take no system" in refused(running, path, **body)


def test_roles_by_turns_as_gemma_wants_them(native, monkeypatch):
    monkeypatch.setattr(models, "chat_template", lambda kv: BoundedTemplate(GEMMA))
    with serving({"box": BOX}, settings(ctx=512)) as running:
        talk = [SYSTEM, say("one"), say("two"), *CHAT_CALL, say("three")]
        prompt = running.post("/apply-template", messages=talk).json()["prompt"]
        turns = prompt.split("<start_of_turn>")[1:]
        assert [turn.partition("\n")[0] for turn in turns] == ["user", "model", "user", "model"]
        assert turns[0] == "user\nWrite a title.\n\none\n\ntwo<end_of_turn>\n" and "a boat" in turns[2]


# ---- a last message goes on

BEGUN = [say("def f("), say("    return", "assistant")]
CONTINUED = [
    (CHAT, {"messages": BEGUN}),
    (CHAT, {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}),
    (CHAT, {"messages": BEGUN, "continue_final_message": True}),
    (CHAT, {"messages": BEGUN, "add_generation_prompt": False}),
    (CHAT, {"messages": [BEGUN[0], {**BEGUN[1], "prefix": True}]}),
    (CHAT, {"messages": [BEGUN[0], say([{"type": "text", "text": "    return"}], "assistant")]}),
    (MESSAGES, {"messages": BEGUN}),
    (MESSAGES, {"messages": BEGUN, "thinking": {"type": "adaptive"}}),
    (RESPONSES, {"input": BEGUN}),
    (RESPONSES, {"input": [BEGUN[0], {
        "type": "message", "id": "m", "status": "incomplete", "role": "assistant",
        "content": [{"type": "output_text", "text": "    return"}]}]}),
    (OLLAMA, {"messages": BEGUN}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), CONTINUED)
def test_an_answer_goes_on_behind_the_last_message(server, ask, prompts, path, body):
    answer, prompt = ask(path, **body)
    assert prompt == ChatTemplate(QWEN).render([BEGUN[0]], enable_thinking=False) + "    return"
    asked = {"prompt": prompts[-1], "max_tokens": 6, "temperature": 0}
    raw = server.post("/v1/completions", **asked).json()["choices"][0]["text"]
    assert text_of(path, answer) == raw != ""  # It says what is new alone.


def test_a_stream_says_what_is_new_alone(server, ask):
    whole = text_of(CHAT, ask(CHAT, messages=BEGUN)[0])
    lines = server.post(CHAT, **LIMITS[CHAT], messages=BEGUN, stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole


def test_the_template_shows_what_is_continued(server):
    def shown(*messages, **more):
        return server.post("/apply-template", messages=messages, **more).json()["prompt"]

    assert shown(*BEGUN).endswith("</think>\n\n    return")
    again = shown(*BEGUN, add_generation_prompt=True)
    assert again == shown(*BEGUN, continue_final_message=False)
    assert again.endswith("return<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert shown(BEGUN[0], add_generation_prompt=False).endswith("def f(<|im_end|>\n")
    assert shown(BEGUN[0], say("", "assistant")) == shown(BEGUN[0])  # There is nothing to continue.
    form = {"type": "json_object"}
    assert shown(*BEGUN, response_format=form).endswith("<think>\n")  # JSON has no beginning elsewhere.


def test_a_thought_goes_on(ask):
    for last in ({**say("", "assistant"), "reasoning_content": "I lo"}, say("<think>\nI lo", "assistant")):
        answer, prompt = ask(CHAT, messages=[BEGUN[0], last])
        assert prompt == ChatTemplate(QWEN).render([BEGUN[0]]) + "I lo"
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] and not message["content"]
    thought = [{"type": "thinking", "thinking": "I lo", "signature": "s"}]
    answer, prompt = ask(MESSAGES, messages=[BEGUN[0], say(thought, "assistant")])
    assert prompt.endswith("<think>\nI lo") and answer["content"][0]["type"] == "thinking"


CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
NOT_CONTINUED = [  # These words are said.
    (CHAT, {"messages": [BEGUN[0], CALLS], "continue_final_message": True}, "tool calls"),
    (CHAT, {"messages": [BEGUN[0], {**CALLS, "prefix": True}]}, "tool calls"),
    (CHAT, {"messages": BEGUN[:1], "continue_final_message": True}, "continue_final_message"),
    (CHAT, {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
     "add_generation_prompt"),
    (CHAT, {"messages": [{**BEGUN[0], "prefix": True}]}, "prefix"),
    (CHAT, {"messages": [{**BEGUN[1], "prefix": True}, BEGUN[0]]}, "prefix"),
    (CHAT, {"messages": BEGUN, "continue_final_message": True, "response_format": FORM}, "schema"),
    (MESSAGES, {"messages": [BEGUN[0], ANTHROPIC_CALL[0]]}, "tool calls"),
    (MESSAGES, {"messages": BEGUN, "output_format": {"type": "json_schema", "schema": {}}}, "schema"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "words"), NOT_CONTINUED)
def test_what_cannot_be_continued_is_refused(server, path, body, words):
    assert words in refused(server, path, **body)


# ---- what the model cannot read

PNG = {"type": "base64", "media_type": "image/png", "data": "AA=="}
IMAGE = {"type": "image", "source": PNG}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
LOOKED, MORE = "look at it", [say("yes", "assistant"), say("And?")]
READ = [  # An agent read an image; a user showed one before.
    (CHAT, {"messages": [say(LOOKED), CHAT_CALL[0], {**CHAT_CALL[1], "content": [IMAGE_URL]}]}),
    (CHAT, {"messages": [say([{"type": "text", "text": LOOKED}, IMAGE_URL]), *MORE]}),
    (MESSAGES, {"messages": [say(LOOKED), ANTHROPIC_CALL[0],
                             say([{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}])]}),
    (MESSAGES, {"messages": [say([IMAGE, {"type": "text", "text": LOOKED}]), *MORE]}),
    (RESPONSES, {"input": [
        say(LOOKED), {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}]}),
    (RESPONSES, {"input": [say([{"type": "input_text", "text": LOOKED}, INPUT_IMAGE]), *MORE]}),
    (OLLAMA, {"messages": [{**say(LOOKED), "images": ["AA=="]}, *MORE]}),
]  # fmt: skip
ASKS = [
    (CHAT, {"messages": [say([IMAGE_URL])]}),
    (MESSAGES, {"messages": [*ANTHROPIC_CALL, say([IMAGE, {"type": "text", "text": LOOKED}])]}),
    (RESPONSES, {"input": [{"type": "message", "role": "user", "content": [INPUT_IMAGE]}]}),
    (OLLAMA, {"messages": [{**say(LOOKED), "images": ["AA=="]}]}),
]


@pytest.mark.parametrize(("path", "body"), READ)
def test_a_session_goes_on_after_an_image(ask, path, body):
    prompt = ask(path, **body)[1]
    assert NOTE in prompt and LOOKED in prompt and "AA==" not in prompt


@pytest.mark.parametrize(("path", "body"), ASKS)
def test_a_new_image_is_refused_by_name(server, path, body):
    assert "the newest message has an image" in refused(server, path, **body)


def test_blocks_of_anthropics_servers_are_read(ask):
    searched = [
        {"type": "thinking", "thinking": "I search.", "signature": "s"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "boats"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
            {"type": "web_search_result", "title": "Boats", "url": "http://b", "encrypted_content": "xyz"}]},
        {"type": "text", "text": "There are some."}]  # fmt: skip
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a log"}}
    found = {"type": "search_result", "source": "http://c", "title": "Crews",
             "content": [{"type": "text", "text": "three men"}]}  # fmt: skip
    talk = [say([document, {"type": "text", "text": "Where?"}]), say(searched, "assistant"),
            say([found, {"type": "text", "text": "Who?"}])]  # fmt: skip
    prompt = ask(MESSAGES, messages=talk)[1]
    for words in ("a log\nWhere?", '[web_search {"query": "boats"}]\nBoats\nhttp://b\nThere are some.',
                  "Crews\nhttp://c\nthree men\nWho?"):  # fmt: skip
        assert words in prompt
    assert "xyz" not in prompt


# ---- other forms of messages


def test_thoughts_and_older_calls_mean_the_same(ask):
    def prompt(*messages):
        return ask(CHAT, messages=[say("a"), *messages])[1]

    hm, called = (
        {**say("y", "assistant"), "reasoning_content": "hm"},
        {"name": "look", "arguments": '{"at": "sea"}'},
    )
    expected = prompt(
        {**hm, "tool_calls": [{**CALL, "function": called}]}, {**CHAT_CALL[1], "tool_call_id": "call_1"}
    )
    assert "<think>\nhm\n</think>\n\ny" in expected and "a boat" in expected
    answered = {"role": "function", "name": "look", "content": "a boat"}
    assert prompt({**hm, "function_call": called}, answered) == expected
    for parts in ([{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "y"}],
                  [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "y"}]):  # fmt: skip
        assert prompt({**say(parts, "assistant"), "function_call": called}, answered) == expected
    blocks = {
        **say("y", "assistant"),
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
    }
    assert prompt({**blocks, "function_call": called}, answered) == expected
    assert prompt({**say("y", "assistant"), "reasoning": "hm", "function_call": called}, answered) == expected


def test_efforts_turn_thinking_on_and_off(ask):
    for effort, thinks in (("none", False), ("minimal", False), ("low", True), ("high", True), ("max", True)):
        ends = "<think>\n" if thinks else "</think>\n\n"
        assert ask(CHAT, messages=[say("a")], reasoning_effort=effort)[1].endswith(ends)
        assert ask(RESPONSES, input="a", reasoning={"effort": effort})[1].endswith(ends)
    for think, ends in (
        (True, "<think>\n"),
        (False, "</think>\n\n"),
        ("low", "<think>\n"),
        ("none", "</think>\n\n"),
    ):
        assert ask(OLLAMA, messages=[say("a")], think=think)[1].endswith(ends)
    quiet = {"reasoning_effort": "high", "enable_thinking": False}
    assert ask(CHAT, messages=[say("a")], **quiet)[1].endswith("</think>\n\n")


@pytest.mark.parametrize("default", [True, False])
def test_efforts_turn_thinking_that_no_variable_turns(native, monkeypatch, default):
    """A template without a switch opens thoughts always, or closes them."""
    end = "'<think>\\n'" if default else "'<think>\\n\\n</think>\\n\\n'"
    source = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + END }}{%- endif %}"
    ).replace("END", end)
    monkeypatch.setattr(models, "chat_template", lambda kv: BoundedTemplate(source))
    with serving({"box": BOX}, settings(ctx=512)) as running:

        def shown(**asked):
            return running.post("/apply-template", messages=[say("a")], **asked).json()["prompt"]

        asked = {"none": "assistant\n<think>\n\n</think>\n\n", "high": "assistant\n<think>\n"}
        for effort, ending in asked.items():
            assert shown(reasoning_effort=effort).endswith(ending)
        assert shown().endswith(asked["high" if default else "none"])
        # In Anthropic's API thinking is off unless it is asked for; that alone changes no prompt's end.
        said = running.post(MESSAGES, messages=[say("a")], max_tokens=2, temperature=0).json()["content"][0]
        assert said["type"] == ("thinking" if default else "text")
        off = {"thinking": {"type": "disabled"}}
        said = running.post(MESSAGES, messages=[say("a")], max_tokens=2, temperature=0, **off).json()[
            "content"
        ][0]
        assert said["type"] == "text"


# ---- tools that may be called

NAMES = ("look", "swim", "dive")
FUNCTIONS = [{"name": name, "parameters": {"type": "object", "properties": {}}} for name in NAMES]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
FLAT = [{"type": "function", **function} for function in FUNCTIONS]


def allowed(mode, *names, chat=True):
    tools = [
        {"type": "function", "function": {"name": n}} if chat else {"type": "function", "name": n}
        for n in names
    ]
    inner = {"mode": mode, "tools": tools}
    return {"type": "allowed_tools", **({"allowed_tools": inner} if chat else inner)}


def test_only_allowed_tools_are_called(server):
    asked = {"messages": [say("a")], "tools": TOOLS, "max_tokens": 40, "enable_thinking": False, "seed": 1,
             "parallel_tool_calls": False}  # fmt: skip
    for names in (["swim"], ["swim", "dive"]):
        choice = server.post(CHAT, **asked, tool_choice=allowed("required", *names)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} <= {*names}
    body = {"input": "a", "tools": FLAT, "max_output_tokens": 40, "reasoning": {"effort": "none"}}
    body |= {"tool_choice": allowed("required", "dive", chat=False), "parallel_tool_calls": False}
    names = {item.get("name") for item in server.post(RESPONSES, **body).json()["output"]}
    assert names == {"dive"}


def test_allowed_tools_are_the_ones_that_a_model_hears_of(native, monkeypatch):
    source = "{%- for t in tools or [] %}{{- t.function.name }} {% endfor %}{{- messages[0].content }}"
    monkeypatch.setattr(models, "chat_template", lambda kv: BoundedTemplate(source))
    with serving({"box": BOX}, settings(ctx=512)) as running:

        def heard(choice):
            return running.post(
                "/apply-template", messages=[say("a")], tools=TOOLS, tool_choice=choice
            ).json()

        assert heard("auto")["prompt"] == "look swim dive a"
        assert heard(allowed("auto", "dive", "look"))["prompt"] == "look dive a"
        assert heard(allowed("auto"))["prompt"] == heard("none")["prompt"] == "a"
        for choice, words in (
            (allowed("auto", "fly"), "'fly'"),
            (allowed("required"), "there are no tools"),
            (allowed("sometimes", "dive"), "'sometimes'"),
            ({"type": "web_search_preview"}, "'web_search_preview'"),
            ({"type": "allowed_tools", "allowed_tools": {"tools": 3}}, "tool_choice"),
        ):
            error = heard(choice)["error"]
            assert error["param"] == "tool_choice" and words in error["message"]


# ---- paths


def test_paths_without_a_version(server):
    for path, body in (
        ("/chat/completions", {"messages": [say("a")], "max_tokens": 1}),
        ("/completions", {"prompt": "a", "max_tokens": 1}),
        ("/responses", {"input": "a", "max_output_tokens": 1}),
        ("/messages", {"messages": [say("a")], "max_tokens": 1}),
        ("/messages/count_tokens", {"messages": [say("a")]}),
    ):
        found, same = server.post(path, **body), server.post("/v1" + path, **body)
        assert found.status_code == same.status_code == 200 and found.json().keys() == same.json().keys()
    assert server.http.get("/models/box").json()["id"] == "box"
    assert server.http.get("/models").json() == server.http.get("/v1/models").json()
    image = server.post("/messages", messages=[say([IMAGE])], max_tokens=1).json()
    assert image["type"] == "error" and image["error"]["type"] == "invalid_request_error"


def test_paths_and_methods_that_are_none_say_what_there_is(server):
    for path in ("/v1/nothing", "/v1/responses/a/b", "/embed"):
        response = server.post(path)
        error = response.json()["error"]
        assert response.status_code == 404 and error["type"] == "invalid_request_error"
        assert (error["code"], path in error["message"]) == ("unknown_url", True)
        assert "POST /v1/chat/completions" in error["message"] and "GET /v1/models/{name}" in error["message"]
    error = server.post("/v1/messages/batches").json()
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
    assert "POST /api/chat" in server.post("/api/pull").json()["error"]
    for method, path, allow in (
        ("GET", "/v1/chat/completions", "POST"),
        ("GET", "/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET"),
        ("DELETE", "/api/tags", "GET"),
        ("GET", "/v1/messages", "POST"),
    ):
        response = server.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allow)
        error = response.json()["error"]
        words = error if path.startswith("/api") else error["message"]
        assert path in words and method in words and allow.replace(", ", " and ") in words


# ---- Ollama


def test_ollamas_names_and_digests(native):
    with serving({"a": BOX, "b": BOX}, settings(ctx=512)) as running:
        for name in ("a", "a:latest", "b:latest"):
            found = running.post(OLLAMA, model=name, messages=[say("x")], **LIMITS[OLLAMA])
            assert found.status_code == 200 and found.json()["model"] == name
        assert running.http.get("/v1/models/b:latest").json()["id"] == "b"
        assert "'c:latest'" in running.post(OLLAMA, model="c:latest", messages=[say("x")]).json()["error"]
        tags, loaded = (running.http.get(path).json()["models"] for path in ("/api/tags", "/api/ps"))
        shown = running.post("/api/show", model="a:latest").json()
        digests = {model["digest"] for model in [*tags, *loaded, shown]}
        assert len(tags) == len(loaded) == 2 and len(digests) == 1  # It is one file.
        assert all(len(digest) == 64 and int(digest, 16) for digest in digests)


@pytest.mark.long
def test_ollamas_models_leave_where_keep_alive_says_so(native):
    with serving({"box": BOX}, settings(ctx=512)) as running:
        slot = running.models.slots["box"]

        def is_loaded(**body):
            body = {"messages": [say("x")], **LIMITS[OLLAMA], **body}
            assert running.post(OLLAMA, **body).status_code == 200
            return slot.served is not None

        for keep in (None, 300, 5.5, -1, "5m", "1h30m", "-1", "300"):
            assert is_loaded(keep_alive=keep)
        for keep in (0, 0.0, "0", "0s", "0m0s"):
            for stream in (True, False):
                is_loaded(keep_alive=keep, stream=stream)
                until(lambda: slot.served is None, "the model left")
        loads = {"model": "box", "stream": False}
        assert running.post("/api/generate", **loads).json()["done_reason"] == "load" and slot.served
        gone = running.post("/api/generate", **loads, keep_alive=0).json()
        assert (gone["done_reason"], gone["done"], slot.served) == ("unload", True, None)
        assert running.post(OLLAMA, **loads, messages=[]).json()["done_reason"] == "load" and slot.served
        assert "keep_alive" in running.post(OLLAMA, messages=[say("x")], keep_alive="soon").json()["error"]


def test_a_model_that_others_ask_does_not_leave(native, monkeypatch):
    monkeypatch.setattr(models, "LEAVING", 1)  # Others are answered for longer than it waits.
    with serving({"box": BOX}, settings(ctx=2048)) as running:
        body = {"prompt": "x", "max_tokens": 1800, "ignore_eos": True, "stream": True}
        with running.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert (
                running.post(OLLAMA, messages=[say("x")], **LIMITS[OLLAMA], keep_alive=0).status_code == 200
            )
            assert running.models.slots["box"].served is not None
            assert any('"finish_reason":"length"' in line for line in lines)


def test_ollamas_whole_numbers_may_be_spelled_as_others(server):
    def count(**options):
        return server.post(OLLAMA, messages=[say("x")], stream=False, options=options).json()

    assert count(num_predict=3.0, top_k=40.0, seed=1.0)["eval_count"] == 3
    assert "num_predict" in count(num_predict=2.5)["error"]
