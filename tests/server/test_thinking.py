"""Asks how a model is to think, in each API's own words: what of it the template is given, and that thoughts
end with their budget."""

import json
from contextlib import ExitStack

import pytest
from depth import deeper_but
from serving import serving, settings

from luce.data import BOX
from luce.files.template import ChatTemplate
from luce.files.tokenizer import Tokenizer
from luce.native import File
from luce.server import models
from luce.server.models import Served
from luce.text.prompt import BoundedTemplate
from luce.text.thoughts import END, Budget

# Qwen's templates do this with their variables: 3.6 drops older thoughts where nothing is said, 3.8 keeps
# them and is told an effort.
TEMPLATE = """
{%- set kept = preserve_thinking if preserve_thinking is defined else KEPT %}
{%- set asked = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}{% endfor %}
{%- if reasoning_effort is defined %}
{{- '<|im_start|>system\\nEffort: ' + reasoning_effort + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and (kept or loop.index0 > asked.last) %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
DIALECTS = {"3.6": TEMPLATE.replace("KEPT", "false"), "3.8": TEMPLATE.replace("KEPT", "true")}


@pytest.fixture(scope="module")
def servers(native):
    """Runs the model in the box with each template, in one of them without drafts."""
    with pytest.MonkeyPatch.context() as patched, ExitStack() as running:
        found = {}
        for dialect, spec in (("3.6", "off"), ("3.8", "auto")):
            how = settings(spec=spec, ctx=1024)
            patched.setattr(models, "chat_template", lambda kv, d=dialect: BoundedTemplate(DIALECTS[d]))
            found[dialect] = running.enter_context(serving({"box": BOX}, how))
        yield found


@pytest.fixture
def server(servers):
    return servers["3.8"]


SAID, THOUGHT, MORE = "one", "a thought", "two"
TALK = [
    {"role": "user", "content": SAID},
    {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT},
    {"role": "user", "content": MORE},
]
BODIES = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1, "input": [
        TALK[0],
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        {"role": "assistant", "content": SAID}, TALK[2]]},
    "/v1/messages": {"max_tokens": 1, "messages": [
        TALK[0],
        {"role": "assistant", "content": [{"type": "thinking", "thinking": THOUGHT, "signature": "s"},
                                          {"type": "text", "text": SAID}]},
        TALK[2]]},
    "/api/chat": {"stream": False, "options": {"num_predict": 1}, "messages": [
        TALK[0], {"role": "assistant", "content": SAID, "thinking": THOUGHT}, TALK[2]]},
}  # fmt: skip
CHAT, RESPONSES, MESSAGES, OLLAMA = BODIES
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
ASKED = [  # What an API is asked stands for these variables of the template.
    (CHAT, {}, {}),
    (CHAT, OFF, OFF),
    (CHAT, ON, ON),
    (CHAT, {"preserve_thinking": True}, {"preserve_thinking": True}),
    (CHAT, {"preserve_thinking": False}, {"preserve_thinking": False}),
    (CHAT, {"reasoning_effort": "none"}, OFF),
    (CHAT, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    (CHAT, {"reasoning_effort": "high"}, {"reasoning_effort": "xhigh"}),
    (CHAT, {"chat_template_kwargs": {**OFF, "preserve_thinking": True}}, {**OFF, "preserve_thinking": True}),
    (RESPONSES, {}, {}),
    (RESPONSES, {"reasoning": {"effort": "none"}}, OFF),
    (RESPONSES, {"reasoning": {"effort": "medium", "summary": "auto"}}, {"reasoning_effort": "medium"}),
    (MESSAGES, {}, OFF),  # Thinking is off there unless it is asked for.
    (MESSAGES, {"thinking": {"type": "disabled"}}, OFF),
    (MESSAGES, {"thinking": {"type": "adaptive"}}, ON),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ON),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
     {**ON, "reasoning_effort": "xhigh"}),
    (OLLAMA, {}, {}),
    (OLLAMA, {"think": False}, OFF),
    (OLLAMA, {"think": True}, ON),
    (OLLAMA, {"think": "low"}, {"reasoning_effort": "low"}),
]  # fmt: skip


@pytest.mark.parametrize("dialect", deeper_but(DIALECTS, "3.8"))
def test_what_is_asked_of_thoughts_reaches_the_template(servers, dialect, monkeypatch):
    server = servers[dialect]
    prompts = []

    async def seen(self, ask, made=Served.seen):
        prompts.append(await made(self, ask))
        return prompts[-1]

    monkeypatch.setattr(Served, "seen", seen)
    decode = server.models.slots["box"].served.tokenizer.decode
    for path, asked, variables in ASKED:
        assert server.post(path, **BODIES[path], **asked).status_code == 200, asked
        text = decode(prompts.pop().tokens, special=True)
        assert text == ChatTemplate(DIALECTS[dialect]).render(TALK, **variables), (path, asked)
        effort, enabled = variables.get("reasoning_effort"), variables.get("enable_thinking", True)
        assert text.endswith("<think>\n" if enabled else "<think>\n\n</think>\n\n")
        assert text.startswith(f"<|im_start|>system\nEffort: {effort}<" if effort else "<|im_start|>user\n")
        assert (THOUGHT in text) == variables.get("preserve_thinking", dialect == "3.8")
    shown = server.post("/apply-template", messages=TALK, chat_template_kwargs=OFF).json()["prompt"]
    assert shown.endswith("</think>\n\n")
    for name in ("messages", "tools", "self"):
        refused = server.post("/apply-template", messages=TALK, chat_template_kwargs={name: 1})
        assert refused.status_code == 400 and name in refused.json()["error"]["message"]


# ---- budgets

SAMPLED = {"messages": TALK, "temperature": 0.8, "seed": 4, "logprobs": True, "max_tokens": 24}


def spelled(server, **asked):
    """Returns a chat's tokens as text, its message, and how many of the tokens are said to be thoughts."""
    found = server.post(CHAT, preserve_thinking=True, **{**SAMPLED, **asked}).json()
    (choice,), usage = found["choices"], found["usage"]["completion_tokens_details"]
    tokens = [each["token"] for each in choice["logprobs"]["content"]]
    return tokens, choice["message"], usage["reasoning_tokens"]


@pytest.mark.long
def test_thoughts_end_with_their_budget(servers):
    server, plain = servers["3.8"], servers["3.6"]
    tokenizer = server.models.slots["box"].served.tokenizer
    end = [tokenizer.decode([token]) for token in tokenizer.encode(END)]
    free, message, thoughts = spelled(server)
    assert len(free) == 24 == thoughts and not message["content"]  # The box cannot end them by itself.
    for budget, field in ((0, "thinking_budget"), (9, "reasoning_budget_tokens")):
        held, message, thoughts = spelled(server, **{field: budget})
        assert held[: budget + len(end)] == free[:budget] + end
        assert message.get("reasoning_content", "") == "".join(free[:budget]).strip() and message["content"]
        assert thoughts == budget + len(end) - 1  # The blank line behind them is none.
        assert spelled(plain, **{field: budget}) == (held, message, thoughts)  # It drafts nothing.
    assert spelled(server, thinking_budget=-1)[0] == free
    assert spelled(server, thinking_budget=9, enable_thinking=False)[0][: len(end)] != end
    body = {"messages": TALK[:1], "max_tokens": 20, "thinking": {"type": "enabled", "budget_tokens": 6},
            "top_k": 1}  # fmt: skip
    kinds = [block["type"] for block in server.post(MESSAGES, **body).json()["content"]]
    assert kinds == ["thinking", "text"]


def test_an_answer_of_a_schema_follows_thoughts_that_were_ended(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    _, message, _ = spelled(server, thinking_budget=5, response_format=form, max_tokens=90)
    assert json.loads(message["content"])["a"] in (1, 2) and message["reasoning_content"]


def test_budgets_that_are_none(server):
    for path, asked in (
        (CHAT, {"thinking_budget": -2}),
        (CHAT, {"chat_template_kwargs": {"thinking_budget": "9"}}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1.5}}),
    ):
        refused = server.post(path, **BODIES[path], **asked)
        assert refused.status_code == 400 and "budget" in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def box(native):
    with File(BOX, native) as file:
        return Tokenizer(file.kv)


def forced(box, matcher, text):
    """Says `text` a token at a time; returns the place, in letters, where the matcher forces END, or None."""
    said = b""
    for token in [*box.encode(text), None]:
        if (mask := matcher.mask()) is not None:
            found = []
            while (mask := matcher.mask()) is not None:
                found.append(max(8 * len(mask) - 8 + bit for bit in range(8) if mask[-1] >> bit & 1))
                assert sum(map(int.bit_count, mask)) == 1
                matcher.consume(found[-1])
            assert box.decode(found) == END
            return len(said.decode())  # No half of a character is before it.
        if token is not None:
            matcher.consume(token)
            said += box.bytes_of(token)


CALL = "<tool_call>\n<function=read>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>"


def test_a_budget_cuts_neither_letters_nor_calls(box):
    assert len(box.encode("日")) == 3
    assert forced(box, Budget(box, 1, True, False), "日本") == 1
    assert forced(box, Budget(box, 2, True, True), "ab\n" + CALL) < 9
    assert forced(box, Budget(box, 12, True, True), "x\n" + CALL) is None  # It began in time, and ends them.
    assert forced(box, Budget(box, 12, True, False), "x\n" + CALL) is not None
    assert forced(box, Budget(box, 30, True, True), "ab\n</think>\n\n" + CALL) is None
    assert forced(box, Budget(box, 3, False, True), "<think>\nabcdefgh ijkl mnop") is not None
    assert forced(box, Budget(box, 0, False, True), " \n<think>\nabc") == len(" \n<think>")
    assert forced(box, Budget(box, 0, False, True), "No <think>\nabc and more of it") is None
