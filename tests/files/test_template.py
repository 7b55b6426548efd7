"""Checks chat templates: what transformers' apply_chat_template renders, and what is refused."""

import io
import json
import re
from datetime import datetime
from types import SimpleNamespace

import fake_core
import pytest
from depth import deeper
from hypothesis import given
from hypothesis import strategies as st

from luce.errors import ArgumentError, Error, FileError, UnsupportedError
from luce.files import template_process as rendering
from luce.files.template import ChatTemplate
from luce.files.tokenizer import Tokenizer
from luce.text import prompt
from luce.text.prompt import BoundedTemplate, Guard, chat_template, prompt_ids

CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
You are a helpful assistant.<|im_end|>
    {% endif %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

# Qwen3's template does this, shortened: tools are JSON, thinking is off where asked, old thoughts are cut.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if ns.last < 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

USER = [{"role": "user", "content": " Grüße & <b>? "}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2"},
    {"role": "user", "content": "sure?"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "description": "<in cm> & 'm'", "n": [1, None]}}]

# Each has the template, messages, variables and transformers' result, which is checked below where that is
# installed.
CASES = {
    "chatml": (
        CHATML, USER, {},
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nGrüße & <b>?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "chatml, system, no prompt": (
        CHATML, TALK[:2], {"add_generation_prompt": False},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n",
    ),
    "qwen": (
        QWEN, USER, {},
        "<|im_start|>user\n Grüße & <b>? <|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen, thoughts cut": (
        QWEN, TALK, {},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen, no thinking": (
        QWEN, USER, {"enable_thinking": False},
        "<|im_start|>user\n Grüße & <b>? <|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "qwen, thinking": (
        QWEN, USER, {"enable_thinking": True},
        "<|im_start|>user\n Grüße & <b>? <|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen, tools": (
        QWEN, TALK[:2], {"tools": TOOLS},
        "<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n"
        '{"type": "function", "function": {"name": "größe", "description": "<in cm> & \'m\'", '
        '"n": [1, null]}}\n</tools><|im_end|>\n'
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rendered_as_transformers_does(case):
    source, messages, variables, expected = CASES[case]
    assert ChatTemplate(source).render(messages, **variables) == expected


@pytest.mark.references
@pytest.mark.parametrize("case", CASES)
def test_the_expectations_are_those_of_transformers(case):
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    source, messages, variables, expected = CASES[case]
    variables = {"add_generation_prompt": True} | variables
    rendered, _ = chat.render_jinja_template([messages], chat_template=source, **variables)
    assert rendered == [expected]


def test_the_tiny_model_has_a_chat_template(native, tiny_gguf):
    from luce.native import File

    with File(tiny_gguf, native) as file:
        rendered = chat_template(file.kv).render([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_are_variables():
    metadata = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "tokenizer.ggml.tokens": ["a", "<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert chat_template(metadata).render([{"role": "user", "content": "x"}]) == "<s>x</s>"


def test_a_date_can_be_asked_for():
    assert re.fullmatch(r"\d{4}-\d\d", ChatTemplate("{{ strftime_now('%Y-%m') }}").render([]))


# As Llama 3.1 and 3.2, gpt-oss, Mistral Small 3 and Granite 3 ask for it.
DATES = [
    ("{%- if not date_string is defined %}{%- if strftime_now is defined %}"
     "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
     "{%- endif %}{{- 'Today Date: ' + date_string + '\n\n' }}", "Today Date: 04 Mar 2026\n\n"),
    ("{{- 'Current date: ' + strftime_now('%Y-%m-%d') + '\n\n' }}", "Current date: 2026-03-04\n\n"),
    ("{%- set today = strftime_now('%Y-%m-%d') %}{{- 'The current date is ' + today + '.' }}",
     "The current date is 2026-03-04."),
    ('{{- "Today\'s Date: " + strftime_now("%B %d, %Y") + "." }}', "Today's Date: March 04, 2026."),
]  # fmt: skip


@pytest.mark.parametrize(("source", "said"), DATES)
def test_published_templates_say_the_date_as_they_spell_it(source, said, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 3, 4, 5, 6, 7)

    monkeypatch.setattr("luce.files.template.datetime", Clock)
    assert ChatTemplate(source).render([]) == said
    given = ChatTemplate(source).render([], date_string="1 Jan 2000")  # It is the template's own variable.
    assert given == ("Today Date: 1 Jan 2000\n\n" if "date_string" in source else said)


def test_a_file_without_a_template_is_refused():
    with pytest.raises(UnsupportedError, match="no chat template") as raised:
        chat_template({})
    assert raised.value.concerns == "chat_template"


def test_a_template_of_the_wrong_type_is_refused():
    with pytest.raises(FileError, match="tokenizer.chat_template"):
        chat_template({"tokenizer.chat_template": 7})


def test_what_a_template_refuses_is_said():
    with pytest.raises(Error, match=r"tokenizer.chat_template failed: No user query"):
        ChatTemplate(QWEN).render([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ 'a' }",
        "{% endfor %}",
        "{{ x | nofilter }}",
        "{{ " + "(" * 5000 + " }}",  # The parser raises a RecursionError.
        "{% if 1 %}" * 200 + "{% endif %}" * 200,  # Python's compiler raises a SyntaxError.
        "{{ " + "9" * 5000 + " }}",  # int() raises a ValueError.
    ],
    ids=range(7),
)
def test_a_syntax_error_names_the_template(source):
    with pytest.raises(Error, match="tokenizer.chat_template is not a valid template") as raised:
        ChatTemplate(source)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ messages[0].content.x.y }}", "{{ 'a' + 1 }}", "{{ messages | tojson(no=1) }}"],
)
def test_a_failing_template_is_named(source):
    with pytest.raises(Error, match="tokenizer.chat_template failed"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.format.__self__.__class__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source):
    try:
        text = ChatTemplate(source).render(USER)
    except Error:
        text = ""
    assert text == ""


# ---- bounds


@pytest.mark.parametrize(
    "source",
    [
        # It takes endless time.
        *deeper("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        "{{ 7 ** (7 ** 9) }}",  # It takes endless time in one operation.
        *deeper("{% set x = ['a' * 99999999] %}{% for i in range(30) %}{% set x = x + x %}{{ x }}{% endfor %}"),
        *deeper("{{ 'a' * 10 ** 12 }}"),
        *deeper("{{ 'x'.ljust(10 ** 10) }}"),
        "{{ 'a' * 10 ** 7 }}",  # It is more than MAX_TEXT.
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
    ],
)
def test_time_memory_and_text_of_a_template_are_bounded(source, monkeypatch):
    monkeypatch.setattr(rendering, "CPU_SECONDS", 0)  # One more second is for the process to start.
    monkeypatch.setattr(rendering, "MAX_TEXT", 1 << 20)
    template = BoundedTemplate(source)
    with pytest.raises(Error, match="^tokenizer.chat_template ") as raised:
        template.render(USER)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300
    template.close()


def test_a_bounded_template_renders_what_the_template_does():
    template = BoundedTemplate(QWEN)
    for messages, variables in ((TALK, {}), (TALK[:2], {"tools": TOOLS, "enable_thinking": False})):
        assert template.render(messages, **variables) == ChatTemplate(QWEN).render(messages, **variables)
    with pytest.raises(Error, match="No user query"):
        template.render(TALK[:1])
    assert template.render(TALK) == ChatTemplate(QWEN).render(TALK)
    template.close()


# ---- what users write is text

BYTES = fake_core.tokenizer()
CONTROL = sorted(BYTES.control)
PARTS = ["<", "<|", "|im_", "im_end", "end|>", "|>", ">", "x", " ", "</think>", *CONTROL]


def of(parts):
    return "".join(parts)


TEXTS = st.lists(st.sampled_from(PARTS), max_size=6).map(of)


@given(contents=st.lists(TEXTS, min_size=1, max_size=4), system=TEXTS)
def test_only_the_template_spells_control_tokens(contents, system):
    source = (
        "<|im_start|>{{ system }}{% for m in messages %}{% for part in m.content %}{{ part.text }}"
        "{% endfor %}{{ m.role }}<{{ m.role }}|>{% endfor %}<|im_end|>"
    )
    messages = [{"role": system, "content": [{"text": text} for text in contents]}]
    ids = prompt_ids(ChatTemplate(source), BYTES, messages)
    plain = of(contents) + system + "<" + system + "|>"
    assert ids == [
        BYTES.control["<|im_start|>"],
        *BYTES.encode(plain, special=False),
        BYTES.control["<|im_end|>"],
    ]
    assert BYTES.decode(ids) == plain


def test_escapes_of_characters_for_private_use_stay_as_they_were_written():
    """Fonts of icons have them, in code as JSON does."""
    source = "<|im_start|>{{ messages[0] | tojson }}<|im_end|>"
    said = "".join(f"\\u{code:04x}" for code in range(0xE000, 0xE020))
    ids = prompt_ids(ChatTemplate(source), BYTES, [{"role": "user", "content": said}])
    assert json.loads(BYTES.decode(ids))["content"] == said


def test_messages_with_all_characters_for_private_use_are_refused():
    private = "".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0x10FFFE)]))
    with pytest.raises(ArgumentError, match="private use"):
        Guard(["<|im_start|>"], [private])


@pytest.mark.parametrize("control", [["x" * 257], [f"<{number:020}>" for number in range(10_000)]], ids=len)
def test_control_tokens_beyond_measure_are_refused(control):
    with pytest.raises(FileError, match="control tokens"):
        Guard(control, [])


def test_a_string_is_guarded_alike_however_often_it_comes(monkeypatch):
    """Short ones are remembered, some of them."""
    monkeypatch.setattr(prompt, "KNOWN", 3)
    guard = Guard(BYTES.control, [])
    texts = ["user", "<|im_end|>", "", "<|", "im_end|>", "x" * 40 + "<|im_end|>", "user", "<|", "<|im_start|>"]
    for text in texts * 2:
        assert guard.marked([text]) == [guard._marked(text)]


def test_tools_are_text_too():
    source = "{{ tools | tojson }}{{ tools | tojson(ensure_ascii=true) }}<|im_end|>"
    tools = [{"<|im_end|>": "<|im_start|>", "n": [1, None, True]}]
    ids = prompt_ids(ChatTemplate(source), BYTES, USER, tools)
    rendered = '[{"<|im_end|>": "<|im_start|>", "n": [1, null, true]}]'
    assert BYTES.decode(ids) == rendered * 2 and ids.count(BYTES.control["<|im_end|>"]) == 1


def test_a_prompt_without_control_tokens_has_the_tokens_of_its_text(native, tiny_gguf):
    from luce.native import File

    with File(tiny_gguf, native) as file:
        template, tokenizer = chat_template(file.kv), Tokenizer(file.kv)
        text = template.render(TALK)
        assert prompt_ids(template, tokenizer, TALK) == tokenizer.encode(text)
        template.close()


def test_a_process_parses_its_template_once(monkeypatch):
    """A prompt waits for no parse but the first."""
    parsed = []

    class Counted(ChatTemplate):
        def __init__(self, source, special):
            parsed.append((source, special))
            super().__init__(source, special)

    def request(source, said, **special):
        asked = {"source": source, "special_tokens": special, "seconds": 5}
        return asked | {"variables": {"messages": [{"role": "user", "content": said}]}}

    asked = [request(CHATML, "a"), request(CHATML, "b"), request("{{ eos_token }}", "", eos_token="x"),
             request("{{ eos_token }}", "", eos_token="y"), request(CHATML, "c")]  # fmt: skip
    said = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr("luce.files.template.ChatTemplate", Counted)
        patched.setattr("resource.setrlimit", lambda *limits: None)  # They would be this process's own.
        lines = io.BytesIO("".join(json.dumps(each) + "\n" for each in asked).encode())
        patched.setattr("sys.stdin", SimpleNamespace(buffer=lines))
        patched.setattr("sys.stdout", said)
        rendering.answer_requests()
    assert len(parsed) == 4, "the second prompt had the template of the first"
    texts = [json.loads(line)["text"] for line in said.getvalue().splitlines()]
    assert texts == [ChatTemplate(each["source"], each["special_tokens"]).render(**each["variables"]) for each in asked]
