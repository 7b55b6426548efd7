"""Asks a real server with each field of the table: those that are honoured act, those that are refused are
refused by name, and those that are harmless change nothing."""

import re
from functools import cache

import fim_model
import make_field_page
import pytest
from depth import deeper_but
from serving import serving, settings, streamed, until

from luce.data import BOX
from luce.server import models
from luce.server.api import fields, openai
from luce.server.api.fields import (
    CHAT,
    COMPLETIONS,
    COUNT,
    DETOKENIZE,
    EMBEDDINGS,
    HEADER,
    INFILL,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    OLLAMA_SHOW,
    RESPONSES,
    ROWS,
    TEMPLATE,
    TOKENIZE,
    State,
)
from luce.server.ask import Refused
from luce.server.watch import Watch
from luce.text.prompt import BoundedTemplate

# What a request asks of thoughts and tools is in the prompt, as with Qwen's templates.
CHAT_TEMPLATE = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if thinking_budget is defined %}{{ '# ' ~ thinking_budget ~ ' tokens\\n' }}{% endif %}
{%- if reasoning_effort is defined %}{{ '# ' + reasoning_effort + '\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and preserve_thinking is defined and preserve_thinking %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
TALK = [
    {"role": "user", "content": "def add(a, b):"},
    {"role": "assistant", "content": "    return a + b", "reasoning_content": "It adds."},
    {"role": "user", "content": "def sub(a, b):"},
]
INPUT = [
    TALK[0],
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "It adds."}]},
    {"role": "assistant", "content": TALK[1]["content"]},
    TALK[2],
]
SAID = [{"role": each["role"], "content": each["content"]} for each in TALK]
GREEDY = {"max_tokens": 12, "temperature": 0}
OPTIONS = {"num_predict": 12, "temperature": 0}
BASE = {  # What each route is asked, beside the field that is tried.
    CHAT: {"messages": TALK, **GREEDY},
    COMPLETIONS: {"prompt": "def add(a, b):\n", **GREEDY},
    RESPONSES: {"input": INPUT, "max_output_tokens": 12, "temperature": 0},
    MESSAGES: {"messages": SAID, **GREEDY},
    OLLAMA_CHAT: {"messages": SAID, "stream": False, "options": OPTIONS},
    OLLAMA_GENERATE: {"prompt": "def add(a, b):", "stream": False, "options": OPTIONS},
    INFILL: {"input_prefix": "def add(a, b):\n", "input_suffix": "\nprint(add(1, 2))\n", **GREEDY},
    OLLAMA_SHOW: {"model": "any"},
    EMBEDDINGS: {"input": "import sys"},
    OLLAMA_EMBED: {"input": "import sys"},
    OLLAMA_EMBEDDINGS: {"prompt": "import sys"},
    TOKENIZE: {"content": "<|im_start|>é"},
    DETOKENIZE: {"tokens": [300]},
    TEMPLATE: {"messages": TALK},
    COUNT: {"messages": SAID},
}
LIKE = {TEMPLATE: CHAT, COUNT: MESSAGES}  # Their bodies are those of others.
HOT = {"temperature": 1.5, "seed": 4}
NO_END = {"logit_bias": {"4092": -100, "4094": -100}}  # The model does not end its text by itself.
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = {CHAT: [{"type": "function", "function": FUNCTION}], RESPONSES: [{"type": "function", **FUNCTION}],
         MESSAGES: [{"name": "f", "input_schema": FUNCTION["parameters"]}]}  # fmt: skip
FORMS = ("structured_outputs", "guided_json", "json_schema", "guided_regex", "regex", "guided_choice",
         "guided_grammar", "grammar", "ebnf", "structural_tag")  # They act on the text behind thoughts.
ONE_OF = {*FORMS, "response_format", "output_config.format", "output_format"}  # One of them may be given.
TWO = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
BESIDE = {  # A field acts beside these; some of them have other values in Ollama's options or by route.
    "top_p": HOT, "top_k": HOT, "min_p": HOT, "seed": HOT, "n": HOT,
    "presence_penalty": {"max_tokens": 40, **HOT}, "frequency_penalty": {"max_tokens": 40, **HOT},
    "repetition_penalty": {"max_tokens": 40, **HOT}, "repeat_penalty": {"max_tokens": 40, **HOT},
    "stop": {"max_tokens": 40}, "stop_sequences": {"max_tokens": 40},
    "include_stop_str_in_output": {"max_tokens": 40, "stop": ["n", "r"]},
    "response_format": {"enable_thinking": False}, "text.format": {"enable_thinking": False},
    "format": {"think": False},
    **dict.fromkeys(FORMS, {"enable_thinking": False}),
    "guided_whitespace_pattern": {"enable_thinking": False, "guided_json": TWO},
    "ignore_eos": {"logit_bias": {"4094": 100}}, "parse_special": {"prompt": "<|im_start|>def f("},
    "continue_final_message": {"messages": TALK[:2]}, "top_logprobs": {"logprobs": True},
    "parallel_tool_calls": {"tool_choice": "required", "enable_thinking": False, **NO_END},
    "output_config.effort": {"thinking": {"type": "adaptive"}},
    "thinking.budget_tokens": {"thinking": {"type": "adaptive"}, "max_tokens": 12},
    "max_tokens": {}, "prompt": {},
}  # fmt: skip
LONG = {
    "parallel_tool_calls": 60, "guided_whitespace_pattern": 40, "response_format": 40, "text.format": 40, "format": 40}


@pytest.fixture(scope="module")
def server(native, tmp_path_factory):
    path = fim_model.write(tmp_path_factory.mktemp("fim") / "fim.gguf")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(models, "chat_template", lambda kv: BoundedTemplate(CHAT_TEMPLATE))
        with serving({"fim": path}, settings(ctx=1024)) as running:
            yield running


def rows_of(api, state):
    return [row for row in ROWS[api].values() if row.state is state]


def put(body, name, value):
    """Returns a body with a field, whose name may lead into an object."""
    outer, _, inner = name.partition(".")
    if inner and outer != "speculative":
        return body | {outer: {**(body.get(outer) or {}), inner: value}}
    return body | {name: value}


def beside(api, name):
    """Returns the body that a field is tried in."""
    body, last = BASE[api], name.removeprefix("options.")
    more = dict(BESIDE.get(name, BESIDE.get(last, {})))
    if api == COMPLETIONS and name in ("response_format", "guided_whitespace_pattern", *FORMS):
        more.pop("enable_thinking", None)
    if name in ("tool_choice", "parallel_tool_calls"):
        more["tools"] = TOOLS[LIKE.get(api, api)]
    tokens = LONG.get(name, more.pop("max_tokens", None))
    if api in (OLLAMA_CHAT, OLLAMA_GENERATE):
        tokens = {} if tokens is None else {"num_predict": tokens}
        options = body["options"] | tokens | (more if name.startswith("options.") else {})
        return body | {"options": options} | ({} if name.startswith("options.") else more)
    limit = "max_output_tokens" if api == RESPONSES else "max_tokens"
    return body | more | ({} if tokens is None else {limit: tokens})


IDS = {"id", "item_id", "call_id", "signature", "encrypted_content", "timings", "created_at"}


def cleaned(value):
    """Returns an answer without what is another one each time."""
    if isinstance(value, dict):
        return {key: cleaned(each) for key, each in value.items() if key not in IDS}
    return [cleaned(each) for each in value] if isinstance(value, list) else value


def said(response):
    """Returns what an answer says, and how many tokens it has read and written."""
    assert response.status_code == 200, response.text
    if "json" not in response.headers["content-type"] or "\n{" in response.text:
        return response.headers["content-type"]
    body = response.json()
    usage = body.get("usage") or body
    read = usage.get("input_tokens", 0) + usage.get("cache_read_input_tokens", 0)
    counted = ("prompt_tokens", "completion_tokens", "output_tokens", "prompt_eval_count", "eval_count",
               "tokens_predicted", "tokens_evaluated")  # fmt: skip
    counts = [usage.get(key) for key in counted]
    kept = ("choices", "output", "content", "message", "response", "tokens", "count", "prompt", "thinking",
            "template", "status", "stop_reason", "done_reason", "model_info", "data", "embeddings",
            "embedding", "prompt_logprobs")  # fmt: skip
    return cleaned([[body.get(key) for key in kept], read, counts])


def test_the_table_names_each_field_once():
    assert len(ROWS[CHAT]) > 150
    for api, rows in ROWS.items():
        for row in rows.values():
            assert row.why and (row.state is State.HONOURED or row.example not in row.neutral[:1]), row
            assert not row.target or row.target in rows or api in (TEMPLATE, COUNT), (api, row.name)


@pytest.mark.parametrize("api", ROWS)
def test_refused_fields_are_refused_by_name(server, api):
    wrong = []
    for row in rows_of(api, State.REFUSED):
        refused = server.http.post(api, json=put(BASE[api], row.name, row.example))
        told = refused.json().get("error")
        if refused.status_code != 400 or row.name not in str(told) or row.why not in str(told):
            wrong.append((row.name, row.example, refused.text))
        if api in (CHAT, COMPLETIONS, RESPONSES, INFILL, EMBEDDINGS) and told["param"] != row.name:
            wrong.append((row.name, told))
    assert not wrong


@cache
def plain(server, api):
    """Returns the answer without further fields, which is asked for once."""
    return said(server.http.post(api, json=BASE[api]))


def same(server, api, given):
    """Asks with all of these fields, and says that the answer is the one without them."""
    body = BASE[api]
    for name, value in given.items():
        body = put(body, name, value)
    found = server.http.post(api, json=body)
    return said(found) == plain(server, api) and HEADER not in found.headers


@pytest.mark.parametrize("api", deeper_but(ROWS, CHAT))
def test_values_that_ask_for_nothing_are_taken(server, api):
    rows = rows_of(api, State.REFUSED)
    for at in range(max((len(row.neutral) for row in rows), default=0)):
        assert same(server, api, {row.name: row.neutral[at % len(row.neutral)] for row in rows}), at


@pytest.mark.parametrize("api", ROWS)
def test_harmless_fields_leave_the_answer_as_it_is(server, api):
    rows = {row.name: row.example for row in rows_of(api, State.HARMLESS)}
    for name in ONE_OF & rows.keys():
        assert same(server, api, {name: rows[name]}), name
    given = {name: example for name, example in rows.items() if name not in ONE_OF}
    if not same(server, api, given):
        assert not [name for name in given if not same(server, api, {name: given[name]})]
        raise AssertionError("together they change the answer")


# These are tried by tests of their own.
APART = {"model", "best_of", "stream_options.include_usage", "stream_options.continuous_usage_stats",
         "include", "previous_response_id", "store", "keep_alive",
         "prefill.keep", "prefill.model"}  # fmt: skip
UNSEEDED = {(MESSAGES, "top_p"), (MESSAGES, "top_k")}  # Without a seed an answer is another one each time.


@pytest.mark.long
@pytest.mark.parametrize("api", ROWS)
def test_honoured_fields_act(server, api):
    wrong = []
    for row in rows_of(api, State.HONOURED):
        if row.name in APART or row.target or (api, row.name) in UNSEEDED:
            continue
        body = beside(api, row.name)
        bodies = body, put(body, row.name, row.example)
        without, having = (server.http.post(api, json=each) for each in bodies)
        if said(without) == said(having):
            wrong.append((row.name, having.text))
    assert not wrong


@pytest.mark.parametrize("api", deeper_but(ROWS, CHAT, OLLAMA_CHAT))
def test_other_names_mean_what_the_first_one_does(server, api):
    wrong = []
    for row in rows_of(api, State.HONOURED):
        if not row.target or (row.target not in ROWS[api] and api in LIKE):
            continue
        body = beside(api, row.target)
        body.pop(row.target, None)
        meant = next((meant for known, meant in row.values if known == row.example), row.example)
        first, other = (
            server.http.post(api, json=put(body, name, value))
            for name, value in ((row.target, meant), (row.name, row.example))
        )
        if said(first) != said(other) or HEADER in other.headers:
            wrong.append((row.name, other.text))
    assert not wrong


@pytest.mark.parametrize("api", [MESSAGES])
def test_without_a_seed_the_filters_leave_the_most_probable_token(server, api):
    greedy = said(server.http.post(api, json=BASE[api]))
    for filtered in ({"top_p": 0.01}, {"top_k": 1}, {"top_p": 0}):
        assert said(server.http.post(api, json=BASE[api] | {"temperature": 1.5} | filtered)) == greedy


@pytest.mark.parametrize("api", deeper_but(ROWS, RESPONSES))
def test_whole_numbers_may_be_written_with_a_point(server, api):
    whole = [row for row in rows_of(api, State.HONOURED) if row.whole and not row.target]
    for row in whole:
        body = BASE[api] if (api, row.name) in UNSEEDED else beside(api, row.name)
        given = row.example, float(row.example)
        first, other = (server.http.post(api, json=put(body, row.name, n)) for n in given)
        assert said(first) == said(other), row.name
        refused = server.http.post(api, json=put(body, row.name, 1.5))
        assert refused.status_code == 400 and f"{row.name} is 1.5: it has to be a whole" in refused.text


@pytest.mark.parametrize("api", ROWS)
def test_values_beyond_their_bounds_are_refused_by_name(api):
    for row in rows_of(api, State.HONOURED):
        low, high = row.bounds or (None, None)
        for value in (low - 1, high * 2 + 1) if row.bounds else ():
            with pytest.raises(Refused, match=f"{re.escape(row.name)} is {re.escape(str(value))}") as error:
                fields.checked(api, put({}, row.name, value))
            assert error.value.param == row.name
        for known, _ in row.values:
            fields.checked(api, put({}, row.name, known))
        if row.values:
            with pytest.raises(Refused, match="'x': it has to be one of"):
                fields.checked(api, put({}, row.name, "x"))


def test_a_seed_of_minus_one_is_a_random_one():
    for seed, expected in ((-1, {}), (-2, {"seed": 2**64 - 2}), (7, {"seed": 7}), (None, {})):
        assert openai.within(seed=seed) == expected


def test_several_names_of_one_field_do_not_fight():
    """The first name comes before others."""
    given = {"max_tokens": 5, "n_predict": 9, "reasoning": {"effort": "low", "max_tokens": None}}
    assert fields.checked(CHAT, given) == []
    assert given["max_tokens"] == 5 and given["reasoning_effort"] == "low" and "thinking_budget" not in given
    given = {"reasoning_effort": "high", "reasoning": None}
    fields.checked(RESPONSES, given)
    assert given["reasoning"] == {"effort": "high"}


def test_unknown_names_are_in_a_header_and_in_the_log_once(server, capsys, monkeypatch):
    monkeypatch.setattr(server.watch.log, "form", "text")
    for api, name in ((CHAT, "tempratur"), (OLLAMA_CHAT, "options.tempratur"), (MESSAGES, "thinking.budget")):
        for _ in range(2):
            found = server.http.post(api, json=put(BASE[api] | {"max_tokens": 1}, name, 1))
            assert found.status_code == 200
            assert name in found.headers[HEADER].split(", ")
    logged = [line for line in capsys.readouterr().err.splitlines() if "has no field" in line]
    assert len(logged) == 4 and sum("tempratur'" in line for line in logged) == 2
    streamed = server.http.post(CHAT, json=BASE[CHAT] | {"stream": True, "tempratur": 1})
    assert streamed.headers[HEADER] == "tempratur"
    refused = server.http.post(CHAT, json=BASE[CHAT] | {"tempratur": 1, "tool_choice": "required"})
    assert refused.status_code == 400 and refused.headers[HEADER] == "tempratur"
    assert HEADER not in server.http.post(CHAT, json=BASE[CHAT]).headers


def test_the_header_has_no_line_breaks_and_is_bounded(server):
    odd = {"x\r\nSet-Cookie: a": 1, "ä, b": 1} | {f"name_{n}": 1 for n in range(40)} | {"y" * 999: 1}
    told = server.http.post(CHAT, json=odd | BASE[CHAT]).headers[HEADER].split(", ")
    assert told[:3] == ["x??Set-Cookie:?a", "???b", "name_0"] and len(told) == fields.MAX_TOLD + 1
    assert told[-1] == "..." and fields.in_header(["y" * 999]) == "y" * fields.MAX_NAME


def test_the_log_tells_of_a_bounded_number_of_names(capsys):
    watch = Watch("text")
    for n in range(5000):
        watch.unknown_fields("/x", [f"{n}" * 50])
    lines = capsys.readouterr().err.splitlines()
    assert 0 < len(lines) <= 256 and max(map(len, lines)) < 200


def test_the_page_is_what_the_table_says():
    assert make_field_page.PAGE.read_text(encoding="utf-8") == make_field_page.page()


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
def test_usage_in_streams(server, api):
    def asked(**options):
        return streamed(server.http.post(api, json=BASE[api] | {"stream": True, "stream_options": options}))

    assert not any("usage" in event for event in asked())
    *events, last = asked(include_usage=True)
    assert all(event["usage"] is None for event in events) and last["choices"] == []
    *events, last = asked(include_usage=True, continuous_usage_stats=True)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 12
    assert {event["usage"]["prompt_tokens"] for event in [*events, last]} == {last["usage"]["prompt_tokens"]}


def test_a_response_that_is_kept_can_be_gone_on_from(server):
    for store, status in ((True, 200), (None, 200), (False, 400)):
        first = server.post(RESPONSES, input="def add(a, b):", max_output_tokens=4, store=store).json()
        asked = {"input": "and sub", "max_output_tokens": 4}
        found = server.post(RESPONSES, **asked, previous_response_id=first["id"])
        assert found.status_code == status, found.text
        if status == 200:
            alone = server.post(RESPONSES, **asked).json()["usage"]["input_tokens"]
            assert found.json()["usage"]["input_tokens"] > alone
    refused = server.post(RESPONSES, **BASE[RESPONSES], include=["message.output_text.logprobs"])
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "include"
    more = {"include": ["reasoning.encrypted_content", "web_search_call.results"]}
    bodies = BASE[RESPONSES], BASE[RESPONSES] | more
    without, having = (said(server.http.post(RESPONSES, json=body)) for body in bodies)
    assert having == without


@pytest.mark.parametrize("api", [OLLAMA_CHAT, OLLAMA_GENERATE])
def test_keep_alive_unloads(server, api):
    loaded = lambda: server.http.get("/api/ps").json()["models"]  # noqa: E731
    for kept in ("5m", 30, None, 0):
        assert server.http.post(api, json=BASE[api] | {"keep_alive": kept}).status_code == 200
        if kept != 0:
            assert loaded()
    until(lambda: not loaded(), "the model is unloaded")


def test_best_of_is_n_or_refused(server):
    for n, best_of, status in ((1, 2, 400), (2, 1, 400), (2, 2, 200), (None, 1, 200)):
        found = server.post(COMPLETIONS, **BASE[COMPLETIONS], n=n, best_of=best_of)
        assert found.status_code == status
        assert status == 200 or found.json()["error"]["param"] == "best_of"


def test_a_stop_that_is_kept_needs_a_stop(server):
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        assert server.post(COMPLETIONS, **BASE[COMPLETIONS], **{name: True}).json()["error"]["param"]
    text = server.post(COMPLETIONS, **BASE[COMPLETIONS]).json()["choices"][0]["text"]
    stop = text[5:8]
    at = text.index(stop)
    for kept, expected in ((False, text[:at]), (True, text[: at + len(stop)])):
        more = {"stop": [stop], "include_stop_str_in_output": kept}
        found = server.post(COMPLETIONS, **BASE[COMPLETIONS], **more).json()["choices"][0]
        assert (found["text"], found["finish_reason"]) == (expected, "stop")
        events = streamed(server.post(COMPLETIONS, **BASE[COMPLETIONS], **more, stream=True))
        assert "".join(event["choices"][0]["text"] for event in events) == expected


def test_where_thoughts_are(server):
    body = BASE[CHAT] | {"thinking_budget": 4, "max_tokens": 16}

    def message(**how):
        found = server.http.post(CHAT, json=body | how).json()["choices"][0]["message"]
        events = streamed(server.http.post(CHAT, json=body | how | {"stream": True}))
        for key in ("content", "reasoning_content"):
            assert "".join(e["choices"][0]["delta"].get(key) or "" for e in events) == (found.get(key) or "")
        return found.get("reasoning_content"), found["content"]

    thought, text = message()
    assert thought and text
    assert message(reasoning_format="none") == (None, f"<think>\n{thought}\n</think>\n\n{text}")
    assert message(include_reasoning=False) == (None, text)
    assert message(reasoning_format="auto") == (thought, text)


def test_a_bias_may_be_a_list_and_false_bans(server):
    text = server.post(COMPLETIONS, **BASE[COMPLETIONS]).json()["choices"][0]["text"]
    first = server.post("/tokenize", content=text).json()["tokens"][0]
    for bias in ({str(first): -100}, [[first, -100.0]], [[first, False]]):
        found = server.post(COMPLETIONS, **BASE[COMPLETIONS], logit_bias=bias).json()["choices"][0]["text"]
        assert not found.startswith(server.post("/detokenize", tokens=[first]).json()["content"])
    for bias in ([["def", 1.0]], [[1, 2, 3]], {"def": 1.0}, [5]):
        refused = server.post(COMPLETIONS, **BASE[COMPLETIONS], logit_bias=bias)
        assert refused.status_code == 400 and "logit_bias" in refused.text


def test_a_name_of_no_model_is_refused_where_there_are_several(native):
    with serving({"a": BOX, "b": BOX}, settings(ctx=256)) as two:
        for api, body in BASE.items():
            if api != INFILL:
                assert two.http.post(api, json=body | {"model": "nobody"}).status_code == 404, api
