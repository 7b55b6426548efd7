"""Makes prompts for Gemma 4: what templates spell is control tokens and what users write is text, thoughts are switched
by the template alone, and answers of tools come where it takes them."""

import fake_core
import gguf
import numpy as np
import pytest
from templates import CHATML, gemma4

from luce.files.template import ChatTemplate
from luce.files.tokenizer import Tokenizer
from luce.prompts.turns import Turns
from luce.text.dialects import GEMMA, QWEN, Opening, dialect_of
from luce.text.gemma import GemmaParser
from luce.text.held import Held
from luce.text.parser import Parser
from luce.text.prompt import opening_of, prompt_ids
from luce.text.thoughts import Budget
from luce.text.tool import Tool

CONTROL = ["<bos>", "<|turn>", "<turn|>", "<|think|>", "<|tool>", "<tool|>"]
EMPTY, BEGIN = "<|channel>thought\n<channel|>", "<|turn>model\n"


def vocabulary():
    """Returns a tokenizer of bytes with Gemma's control tokens, of the types that its files give them."""
    keys = fake_core.metadata()
    keys["tokenizer.ggml.tokens"] = tokens = list(keys["tokenizer.ggml.tokens"])
    types = [int(kind) for kind in keys["tokenizer.ggml.token_type"]]
    named = dict.fromkeys(CONTROL, gguf.TokenType.CONTROL) | dict.fromkeys(GEMMA.guarded, gguf.TokenType.USER_DEFINED)
    for at, (token, kind) in enumerate(named.items(), start=300):
        tokens[at], types[at] = token, int(kind)
    keys["tokenizer.ggml.token_type"] = np.array(types, np.int32).data
    keys["tokenizer.ggml.bos_token_id"] = tokens.index("<bos>")
    return Tokenizer(keys)


WORDS = vocabulary()
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is there?"}


def calling(*names, text="", thought=""):
    calls = [{"id": f"c{name}", "type": "function", "function": {"name": name, "arguments": {"at": "sea", "n": 1}}}
             for name in names]  # fmt: skip
    return {"role": "assistant", "content": text, "reasoning_content": thought, "tool_calls": calls}


def told(name, text):
    return {"role": "tool", "tool_call_id": f"c{name}", "content": text}


def ids(messages, tools=None, continues=False, source=None, **how):
    template = ChatTemplate(source or gemma4(), {"bos_token": "<bos>"})
    return prompt_ids(template, WORDS, messages, tools, None, continues, **how)


def prompt(messages, tools=None, continues=False, source=None, **how):
    return WORDS.decode(ids(messages, tools, continues, source, **how), special=True)


CALL = '<|tool_call>call:look{at:<|"|>sea<|"|>,n:1}<tool_call|>'
OTHER = CALL.replace("look", "go")


def response(name, text):
    return f'<|tool_response>response:{name}{{value:<|"|>{text}<|"|>}}<tool_response|>'


ASKED = f"<bos><|turn>user\nWhat is there?<turn|>\n{BEGIN}"
TALKS = {
    "a question": ([USER], f"{ASKED}{EMPTY}"),
    "the system": ([SYSTEM, USER], "<bos><|turn>system\nBe brief.<turn|>\n" + ASKED.removeprefix("<bos>") + EMPTY),
    "an answer of a tool": ([USER, calling("look"), told("look", "a boat")], ASKED + CALL + response("look", "a boat")),
    "answers of several tools": ([USER, calling("look", "go"), told("look", "a boat"), told("go", "ok")],
                                 ASKED + CALL + OTHER + response("look", "a boat") + response("go", "ok")),
    "in another order": ([USER, calling("look", "go"), told("go", "ok"), told("look", "a boat")],
                         ASKED + CALL + OTHER + response("go", "ok") + response("look", "a boat")),
    "one after the other": ([USER, calling("look"), told("look", "a"), calling("go"), told("go", "b")],
                            ASKED + CALL + response("look", "a") + OTHER + response("go", "b")),
    "and text": ([USER, calling("look"), told("look", "a"), {"role": "assistant", "content": "A boat."}, USER],
                 f"{ASKED}{CALL}{response('look', 'a')}A boat.<turn|>\n{ASKED.removeprefix('<bos>')}{EMPTY}"),
    "text before the call": ([USER, calling("look", text="I look."), told("look", "a")],
                             f"{ASKED}{CALL}{response('look', 'a')}I look.<turn|>\n{BEGIN}"),
    "thoughts that led to the call": ([USER, calling("look", thought="hm"), told("look", "a")],
                                      f"{ASKED}<|channel>thought\nhm\n<channel|>{CALL}{response('look', 'a')}"),
    "older thoughts": ([USER, {"role": "assistant", "content": "A boat.", "reasoning_content": "hm"}, USER],
                       f"{ASKED}A boat.<turn|>\n{ASKED.removeprefix('<bos>')}{EMPTY}"),
    "older thoughts of calls": ([USER, calling("look", thought="hm"), told("look", "a"), USER],
                                f"{ASKED}{CALL}{response('look', 'a')}{ASKED.removeprefix('<bos>')}{EMPTY}"),
}  # fmt: skip


FIRST = {  # The first templates begin a turn for each message of the model, and forget all thoughts.
    "one after the other": ASKED + CALL + response("look", "a") + BEGIN + OTHER + response("go", "b"),
    "thoughts that led to the call": ASKED + CALL + response("look", "a"),
}


@pytest.mark.parametrize("talk", TALKS)
def test_answers_of_tools_are_in_the_models_turn(talk):
    messages, text = TALKS[talk]
    assert prompt(messages) == text
    assert prompt(messages, source=gemma4(takes_tools=False)) == FIRST.get(talk, text)


def test_an_answer_of_a_tool_that_nobody_called_is_shown():
    for takes_tools in (True, False):
        assert "a boat" in prompt([USER, told("look", "a boat")], source=gemma4(takes_tools=takes_tools))


def test_the_template_alone_switches_thinking():
    large, small = gemma4(), gemma4(large=False)
    assert prompt([USER], source=large, enable_thinking=False) == prompt([USER], source=large) == ASKED + EMPTY
    assert prompt([USER], source=small, enable_thinking=False) == prompt([USER], source=small) == ASKED
    on = "<bos><|turn>system\n<|think|>\n<turn|>\n" + ASKED.removeprefix("<bos>")
    assert {prompt([USER], source=each, enable_thinking=True) for each in (large, small)} == {on}
    assert prompt([USER], source=large, reasoning_effort="high") == ASKED + EMPTY  # It reads no effort.
    mute = CHATML  # A template that reads no switch.
    assert prompt([USER], source=mute, enable_thinking=False) == prompt([USER], source=mute)


def test_an_answer_begins_in_the_vocabularys_dialect():
    assert dialect_of(WORDS) is GEMMA and dialect_of(fake_core.tokenizer()) is QWEN
    assert opening_of(WORDS, ids([USER])) == Opening(GEMMA)
    assert opening_of(WORDS, ids([USER], enable_thinking=True)) == Opening(GEMMA, may_think=True)
    begun = ids([USER, {"role": "assistant", "content": "", "reasoning_content": "hm"}], continues=True)
    assert WORDS.decode(begun, special=True).endswith("<|channel>thought\nhm")
    opened = WORDS.encode("<|channel>thought\n")
    assert opening_of(WORDS, [*ids([USER]), *opened]) == Opening(GEMMA, within=True)
    spelled = ids([{"role": "user", "content": "<|think|><|channel>thought\n"}])
    assert opening_of(WORDS, spelled) == Opening(GEMMA)
    for opening, parser in ((Opening(GEMMA), GemmaParser), (Opening(QWEN), Parser)):
        assert type(Held().parser(opening)) is parser


@pytest.mark.long
def test_what_users_write_is_text():
    marks = [*CONTROL, *GEMMA.guarded]
    for text in (*marks, "".join(marks), f"a{GEMMA.guarded[-1]}b", "<|channel<channel|>>"):
        tools = [Tool("f", {"type": "object"}, description=text).as_template]
        said = {"role": "assistant", "content": "x", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"at": text}}}]}  # fmt: skip
        messages = [{**SYSTEM, "content": text}, {**USER, "content": text}, said,
                    {"role": "tool", "tool_call_id": "c", "content": text}]  # fmt: skip
        plain = [*({**each, "content": "y"} for each in messages[:2]), {**said, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"at": "y"}}}]},
            {**messages[3], "content": "y"}]  # fmt: skip
        found, known = ids(messages, tools), ids(plain, [Tool("f", {"type": "object"}, description="y").as_template])
        special = {WORDS.added(mark) for mark in marks}
        assert [token for token in found if token in special] == [token for token in known if token in special]
        assert WORDS.decode(found, special=True).count(text) - WORDS.decode(known, special=True).count(text) == 5


def test_a_prompt_begins_with_the_first_token_once():
    first = WORDS.bos_id
    for source in (gemma4(), gemma4().replace("{{- bos_token }}", "")):
        found = ids([USER], source=source)
        assert found[0] == first and found.count(first) == 1


def test_a_last_message_is_continued():
    for large in (True, False):
        said = prompt([USER, {"role": "assistant", "content": "Wa"}], continues=True, source=gemma4(large=large))
        assert said == f"{ASKED}Wa"
    thought = {"role": "assistant", "content": "Wa", "reasoning_content": "hm"}
    assert prompt([USER, thought], continues=True).endswith("Wa")


def test_turns_are_found():
    found = ids([SYSTEM, USER, {"role": "assistant", "content": "A boat."}, USER])
    _, kept = Turns(WORDS, 1024, 1).cut(found)
    text = [WORDS.decode(found[:at], special=True) for at in sorted(kept)]
    first, last, whole = text  # Within the names of roles, of which the last token is read again.
    assert first == "<bos><|turn>system\nBe brief.<turn|>\n<|turn>us" and whole == WORDS.decode(found, special=True)
    assert last.endswith("What is there?<turn|>\n<|turn>mode") and last.count("A boat.") == 1


def forced(budget, text):
    """Says a text a token at a time; returns where, in letters, the budget forces what ends thoughts, or None."""
    for at, token in enumerate(tokens := WORDS.encode(text, special=False)):
        mask = budget.mask()
        if mask is not None:
            found = []
            while (mask := budget.mask()) is not None:
                (token,) = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
                found.append(int(token))
                budget.consume(int(token))
            assert WORDS.decode(found) == "\n<channel|>"
            return len(WORDS.decode(tokens[:at]))
        budget.consume(token)
    return None


def test_thoughts_have_their_number_of_tokens():
    opened = "<|channel>thought\n"
    assert forced(Budget(WORDS, 12, False, True, dialect=GEMMA), f"{opened}klmnpqrs") == len(f"{opened}klmn")
    assert forced(Budget(WORDS, 3, True, True, dialect=GEMMA), "abcdefgh") == 3
    assert forced(Budget(WORDS, 3, True, True, dialect=GEMMA), "ab<channel|>cdefgh") is None
    assert forced(Budget(WORDS, 3, True, True, dialect=GEMMA), f"ab{CALL}cdefgh") is None
    assert forced(Budget(WORDS, 3, True, False, dialect=GEMMA), f"ab{CALL}cdefgh") is not None
    assert forced(Budget(WORDS, 0, False, True, dialect=GEMMA), "No thoughts at all") is None
