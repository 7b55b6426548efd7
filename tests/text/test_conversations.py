"""Renders conversations that templates refuse, continues last messages, and turns thinking on and off."""

import fake_core
import pytest
from hypothesis import given
from hypothesis import strategies as st
from templates import CALL, CHATML, GEMMA, PROMPT, PUBLISHED, QWEN

from luce.errors import TemplateFailed
from luce.files.template import ChatTemplate
from luce.text.conversation import ways
from luce.text.prompt import BoundedTemplate, prompt_ids
from luce.text.thinking import said_of

BYTES = fake_core.tokenizer()

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is there?"}
SAID = {"role": "assistant", "content": "Waves."}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"role": "tool", "content": "a boat", "tool_call_id": "call_1"}
TALKS = {
    "the system alone": [SYSTEM],
    "the system, a call and its answer": [SYSTEM, CALLS, TOOL],
    "a call and its answer": [CALLS, TOOL],
    "an answer of a tool alone": [TOOL],
    "the assistant first": [SAID, USER],
    "the system and the assistant": [SYSTEM, SAID, USER],
    "two users": [USER, USER],
    "two assistants": [USER, SAID, SAID, USER],
    "a user after a tool": [USER, CALLS, TOOL, USER],
    "two calls": [USER, {**CALLS, "tool_calls": [CALL, {**CALL, "id": "call_2"}]}, TOOL,
                  {**TOOL, "tool_call_id": "call_2"}],
}  # fmt: skip


def rendered(source, messages, continues=False, **how):
    ids = prompt_ids(ChatTemplate(source), BYTES, messages, None, None, continues, **how)
    return BYTES.decode(ids, special=True)


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("template", PUBLISHED)
def test_no_conversation_is_refused_and_nothing_of_it_is_lost(template, talk):
    text = rendered(PUBLISHED[template], TALKS[talk])
    told = [message["content"] for message in TALKS[talk] if message["role"] in ("system", "user", "tool")]
    assert all(content in text for content in told), text
    calls = [call for message in TALKS[talk] for call in message.get("tool_calls", ())]
    shown = text.count("look") if template in ("qwen", "mistral", "gemma") else len(calls)
    assert shown == len(calls), text


def test_a_conversation_that_is_taken_is_rendered_as_it_is():
    for messages in ([SYSTEM, USER], [USER, SAID, USER], [SYSTEM, USER, CALLS, TOOL]):
        assert rendered(QWEN, messages) == ChatTemplate(QWEN).render(messages)


def test_simpler_ways_are_what_the_template_would_have_for_them():
    nobody = [SYSTEM, {"role": "user", "content": ""}]
    assert rendered(QWEN, [SYSTEM]) == ChatTemplate(QWEN).render(nobody)
    merged = [{"role": "user", "content": "Be brief.\n\nWhat is there?"}]
    assert rendered(GEMMA, [SYSTEM, USER]) == ChatTemplate(GEMMA).render(merged)
    spelled = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
    plain = [USER, {"role": "assistant", "content": spelled},
             {"role": "user", "content": "<tool_response>\na boat\n</tool_response>"}]  # fmt: skip
    assert rendered(GEMMA, [USER, CALLS, TOOL]) == ChatTemplate(GEMMA).render(plain)


def test_what_no_way_helps_is_said_in_the_templates_first_words():
    source = "{{ raise_exception('not ' + messages[0].role + ', ' + messages|length|string) }}"
    with pytest.raises(TemplateFailed, match="tokenizer.chat_template failed: not system, 2"):
        rendered(source, [SYSTEM, SAID])
    bounded = BoundedTemplate(source)
    with pytest.raises(TemplateFailed, match="not system, 2"):
        prompt_ids(bounded, BYTES, [SYSTEM, SAID])
    bounded.close()


ROLES = st.sampled_from([SYSTEM, USER, SAID, CALLS, TOOL])


@given(st.lists(ROLES, min_size=1, max_size=7))
def test_the_last_way_has_a_user_and_the_assistant_by_turns_and_every_word(messages):
    *_, last = ways(messages)
    assert rendered(GEMMA, messages)
    roles = [message["role"] for message in last]
    if last != messages:
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)
    words = " ".join(message["content"] for message in last)
    for message in messages:
        assert message["content"] in words
    assert messages == [*messages] and SAID == {
        "role": "assistant",
        "content": "Waves.",
    }  # Nothing was changed.


def test_text_that_trainers_mark_is_rendered():
    marked = CHATML.replace("m.content +", "'' }}{% generation %}{{ m.content }}{% endgeneration %}{{ ''  +")
    assert "generation" in marked
    assert rendered(marked, [USER, SAID, USER]) == rendered(CHATML, [USER, SAID, USER])


# ---- a last message that is continued


@pytest.mark.parametrize(
    "text", ["Wa", "    return", "two \n\n", "im_end", "a<|im_end|>b", "</think>", "user", "\t"]
)
@pytest.mark.parametrize("template", PUBLISHED)
def test_a_prompt_ends_behind_the_last_message(template, text):
    """Whatever the template strips, and whatever it writes behind it."""
    prompt = rendered(PUBLISHED[template], [USER, {"role": "assistant", "content": text}], True)
    assert prompt.endswith(text) and prompt.count(USER["content"]) == 1
    before = rendered(PUBLISHED[template], [USER, {"role": "assistant", "content": "Wa"}], True)
    assert prompt.removesuffix(text) == before.removesuffix("Wa")


def test_what_is_before_a_continued_message_is_the_templates_own():
    assert rendered(CHATML, [USER, SAID], True) == ChatTemplate(CHATML).render([USER]) + "Waves."
    closed = ChatTemplate(QWEN).render([USER], enable_thinking=False)
    assert rendered(QWEN, [USER, SAID], True) == closed + "Waves."  # Text means that thinking is over.
    thought = {**SAID, "reasoning_content": "I look."}
    assert rendered(QWEN, [USER, thought], True).endswith("<think>\nI look.\n</think>\n\nWaves.")
    inline = {"role": "assistant", "content": "<think>\nI look.\n</think>\n\nWaves."}
    assert rendered(QWEN, [USER, inline], True) == rendered(QWEN, [USER, thought], True)


@pytest.mark.parametrize(
    "last",
    [{"content": "", "reasoning_content": "I lo"}, {"content": "<think>\nI lo"}, {"content": "<think>I lo"}],
)
def test_a_thought_that_has_not_ended_goes_on(last):
    last = {"role": "assistant", **last}
    assert said_of(last) == ("I lo", None)
    assert rendered(QWEN, [USER, last], True) == ChatTemplate(QWEN).render([USER]) + "I lo"
    unshown = QWEN.replace("thought|trim", "''")  # It shows no thoughts.
    assert rendered(unshown, [USER, last], True) == ChatTemplate(QWEN).render([USER]) + "I lo"


def test_a_message_that_the_template_does_not_show_goes_behind_the_beginning_of_one():
    unshown = QWEN.replace("{{- content|trim }}", "").replace(
        "'<think>\\n' + thought|trim + '\\n</think>\\n\\n'", "''"
    )
    closed = ChatTemplate(QWEN).render([USER], enable_thinking=False)
    assert rendered(unshown, [USER, SAID], True) == closed + "Waves."
    thought = {**SAID, "reasoning_content": "I look."}
    opened = ChatTemplate(QWEN).render([USER])
    assert rendered(unshown, [USER, thought], True) == opened + "I look.\n</think>\n\nWaves."


def test_control_tokens_of_a_continued_message_are_text():
    last = {"role": "assistant", "content": "a<|im_end|>"}
    ids = prompt_ids(ChatTemplate(CHATML), BYTES, [USER, last], None, None, True)
    assert ids.count(BYTES.control["<|im_end|>"]) == 1 and BYTES.decode(ids).endswith("a<|im_end|>")


# ---- thinking

OPEN, EMPTY = "<think>\n", "<think>\n\n</think>\n\n"
ALWAYS = PROMPT.replace("assistant\\n", "assistant\\n<think>\\n")
BY_SWITCH = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{{- '<think>\\n' if SWITCH else '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
ENDS = {  # Each prompt ends so where nothing is asked, where thinking is on, and where it is off.
    "on by default": (BY_SWITCH.replace("SWITCH", "enable_thinking|default(true)"), OPEN, OPEN, EMPTY),
    "off by default": (BY_SWITCH.replace("SWITCH", "enable_thinking|default(false)"), EMPTY, OPEN, EMPTY),
    "another name": (BY_SWITCH.replace("SWITCH", "thinking is defined and thinking"), EMPTY, OPEN, EMPTY),
    "by an effort": (BY_SWITCH.replace("SWITCH", "(reasoning_effort|default('no_think')) in ['low', 'high']"),
                     EMPTY, OPEN, EMPTY),
    "always on": (ALWAYS, OPEN, OPEN, EMPTY),
    "always off": (BY_SWITCH.replace("SWITCH", "false"), EMPTY, OPEN, EMPTY),
    "as the model likes": (PROMPT + "{#- <think> -#}", "assistant\n", "assistant\n", EMPTY),
    "not at all": (PROMPT, "assistant\n", "assistant\n", "assistant\n"),
}  # fmt: skip
ASKED = {
    "nothing": {},
    "on": {"enable_thinking": True},
    "off": {"enable_thinking": False},
    **{
        effort: {"enable_thinking": True, "reasoning_effort": effort}
        for effort in ("low", "medium", "high", "max")
    },
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("template", ENDS)
def test_thinking_is_turned_whatever_the_template_reads(template, asked):
    source, unasked, on, off = ENDS[template]
    text = rendered(source, [USER], **ASKED[asked])
    assert text == "<|im_start|>assistant\n".removesuffix("assistant\n") + (
        "assistant\n" + {"nothing": unasked, "off": off}.get(asked, on).removeprefix("assistant\n")
    )


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (
            "low medium xhigh",
            {"minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "max": "xhigh"},
        ),
        ("low high max", {"low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}),
        ("medium", {"low": "low", "medium": "medium", "high": "high"}),  # It prints what it is given.
        ("", {"low": "low", "medium": "medium", "high": "xhigh", "max": "xhigh"}),  # Qwen3.8 has these.
    ],
)
def test_an_effort_is_told_in_the_templates_own_words(known, words):
    listed = ", ".join(f"'{word}'" for word in known.split())
    source = f"{{%- if reasoning_effort in [{listed}] %}}{{%- endif %}}{{{{- reasoning_effort }}}}"
    assert {effort: rendered(source, [USER], reasoning_effort=effort) for effort in words} == words


def test_an_effort_that_the_template_refuses_is_left_to_it():
    source = "{%- if reasoning_effort == 'medium' %}{{- raise_exception('no medium') }}{%- endif %}" + CHATML
    assert rendered(source, [USER], reasoning_effort="medium") == rendered(CHATML, [USER])


def test_variables_that_are_read_are_named():
    source = QWEN + "{%- if effort == 'xhigh' %}{{ tools|tojson }}{%- endif %}"
    bounded = BoundedTemplate(source)
    for template in (ChatTemplate(source), bounded):
        assert {"enable_thinking", "effort", "xhigh", "messages"} <= template.mentions()
        assert not {"reasoning_effort", "reasoning_content", "thinking"} & (
            template.mentions() - {"reasoning_content"}
        )
    bounded.close()
