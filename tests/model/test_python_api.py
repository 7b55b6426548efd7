"""Checks the Python API: the tokens of the command line, alone or beside others, and clear errors."""

import ast
import asyncio
import gc
import importlib.util
import json
import re
import runpy
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import box_model
import jsonschema
import numpy as np
import pytest
import tiny_vision
from checkout import ROOT
from depth import deeper, deeper_but
from serving import until
from split import drafts_apart

import luce
from luce.decode.events import Finished, Tokens
from luce.decode.request import Request
from luce.decode.stats import Tally
from luce.files.tokenizer import Tokenizer
from luce.model.answer import Reader
from luce.model.options import How, HowChat, HowReply, Loading
from luce.native import File
from luce.text.parser import Parser
from luce.text.prompt import BoundedTemplate

# A beginning is kept to where a chunk ended: on a GPU after 2,048 tokens, which is the whole context of the box.
KEEPS = "cpu"
PROMPTS = ["def is_even(n):", "import os\n", "class Point:\n", "def merge(left, right):\n", "for name in"]
LONG = "import os\n\n" + "".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(60))
ASKED = [{"role": "user", "content": "Name a city."}]
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["days"],
    },
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}


def load(device, **options):
    return luce.load(**{"device": device, "threads": 1, "ctx": 1536} | options)


@pytest.fixture(scope="module")
def model(device):
    with load(device, parallel=3) as model:
        yield model


@pytest.fixture(scope="module")
def alone(device):
    """Gives alone(prompt, **how): the answer of a model that drafts nothing, keeps nothing and has no company."""
    with load(device, draft="off", checkpoints=0) as model:
        yield lambda prompt, **how: model.generate(prompt, **how)


def idle(model):
    return model.loaded.scheduler.idle


# ---- tokens


@pytest.mark.parametrize(
    ("flags", "how"),
    [
        ((), {}),
        *deeper((("--temp", "0.8", "--seed", "7"), {"temperature": 0.8, "seed": 7})),
        (
            ("--temp", "1", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.1"),
            {"temperature": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        ),
        *deeper((
            ("--repetition-penalty", "1.3", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5"),
            {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        )),
        *deeper((("--logit-bias", "198=-100", "--logit-bias", "258=3"), {"logit_bias": {198: -100, 258: 3}})),
        (("--stop", "return", "--stop", ":"), {"stop": ["return", ":"]}),
        (("--json-schema", json.dumps(CITY)), {"schema": CITY}),
    ],
    ids=["greedy", "seed", "filters", "penalties", "bias", "stop", "schema"],
)
def test_a_stream_has_the_tokens_of_the_command_line(luce_, model, device, flags, how):
    run = ("--device", device, *(("--threads", "1") if device.startswith("cpu") else ()), "-n", "40", "--json")
    ran = luce_("generate", "--gguf", box_model.GGUF, *run, *flags, PROMPTS[0])
    said = json.loads(ran.stdout)
    stream = model.stream(PROMPTS[0], max_tokens=40, **how)
    pieces = list(stream)
    answer = stream.answer
    assert list(answer.tokens) == said["tokens"] and answer.text == said["text"]
    assert "".join(piece.text for piece in pieces) == answer.text
    assert tuple(token for piece in pieces for token in piece.tokens) == answer.tokens
    assert answer.prompt_tokens == said["prompt_tokens"] and answer.reason == said["finish_reason"]


def test_a_batch_is_its_prompts_one_by_one(model, alone):
    answers = model.generate(PROMPTS, max_tokens=30)
    assert [each.tokens for each in answers] == [alone(prompt, max_tokens=30).tokens for prompt in PROMPTS]
    assert model.generate([]) == []


def test_token_ids_are_a_prompt_and_lists_of_them_a_batch(model):
    ids = [model.encode(prompt) for prompt in PROMPTS[:2]]
    assert model.decode(ids[0]) == PROMPTS[0]
    first, second = model.generate(ids, max_tokens=9)
    assert model.generate(ids[0], max_tokens=9).tokens == first.tokens
    assert model.generate(PROMPTS[1], max_tokens=9).tokens == second.tokens


def test_any_thread_may_ask(model, alone):
    found = {}

    def ask(n):
        prompt = PROMPTS[n % len(PROMPTS)]
        found[n] = model.generate(prompt, max_tokens=20, temperature=1, seed=n).tokens

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(8):
        expected = alone(PROMPTS[n % len(PROMPTS)], max_tokens=20, temperature=1, seed=n)
        assert found[n] == expected.tokens


@pytest.mark.long
def test_no_draft_changes_a_token(device, alone):
    for draft in ("mtp", "dflash", "lookup"):
        with load(device, draft=draft) as model:
            answer = model.generate(LONG, max_tokens=40)
            assert answer.tokens == alone(LONG, max_tokens=40).tokens and model.info.draft == draft
            assert 0 < answer.stats.accepted <= answer.stats.drafted


@pytest.mark.long
def test_drafts_on_a_device_of_their_own_change_no_token(device, alone):
    where, drafts = drafts_apart(device)
    with load(where, draft="dflash", draft_device=drafts) as model:
        assert model.info.device == f"{where},{drafts}" and model.info.plan["draft_device"]["value"] == drafts
        answer = model.generate(LONG, max_tokens=40)
        assert answer.tokens == alone(LONG, max_tokens=40).tokens and 0 < answer.stats.accepted
    with pytest.raises(luce.ArgumentError, match="draft_device is .* leave one out"):
        load(where, draft="off", draft_device=drafts)


# ---- asyncio


def test_many_streams_of_asyncio_at_once_are_those_alone(device, alone):
    async def ask(model, prompt):
        stream, text = model.stream(prompt, max_tokens=25), ""
        async for piece in stream:
            text += piece.text
        answer = await stream.answer()
        assert text == answer.text
        return answer.tokens

    async def run():
        async with luce.AsyncModel(device=device, threads=1, ctx=1536, parallel=3) as model:
            many = await asyncio.gather(*(ask(model, prompt) for prompt in PROMPTS * 4))
            batch = await model.generate(PROMPTS, max_tokens=25)
            assert many[: len(PROMPTS)] == [each.tokens for each in batch]
            return many

    expected = [alone(prompt, max_tokens=25).tokens for prompt in PROMPTS]
    assert asyncio.run(run()) == expected * 4


def test_a_task_that_is_cancelled_cancels_its_answer(device):
    async def run():
        async with luce.AsyncModel(device=device, threads=1, ctx=1536) as model:
            begun = asyncio.Event()

            async def read():
                async for _ in model.stream(PROMPTS[0], max_tokens=1400, ignore_eos=True):
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream = model.stream(PROMPTS[0], max_tokens=1400, ignore_eos=True)
            async for _ in stream:
                break
            stream.cancel()
            assert (await stream.answer()).reason == "cancelled"
            async for _ in model.stream(PROMPTS[0], max_tokens=1400, ignore_eos=True):
                break
            while not idle(model.model):  # Nobody holds the last one.
                await asyncio.sleep(0.01)
            waiting = model.stream(PROMPTS[1], max_tokens=1400, ignore_eos=True)
            await waiting.__anext__()
            left = asyncio.create_task(waiting.answer())
        with pytest.raises(luce.Cancelled, match="^the model was closed$"):
            await left
        with pytest.raises(luce.StateError, match="^the model is closed$"):
            await model.generate("a")

    asyncio.run(run())


@pytest.mark.long
def test_asyncio_has_chats_and_beginnings_too():
    async def run():
        async with luce.AsyncModel(device=KEEPS, threads=1, ctx=1536, parallel=2) as other:
            answer = await other.chat(ASKED, schema=CITY, max_tokens=60)
            async with await other.prefix(LONG) as prefix:
                assert prefix.kept_tokens >= 512
                some = await prefix.generate(["class", "import"], max_tokens=8)
                assert all(each.cached_tokens == prefix.kept_tokens for each in some)
            with pytest.raises(luce.ArgumentError, match="max_tokens is -1"):
                await other.generate("a", max_tokens=-1)
            return answer.text, [each.text for each in some], other.info.parallel, other.decode(other.encode("ä b"))

    text, some, parallel, same = asyncio.run(run())
    assert parallel == 2 and same == "ä b"
    with load(KEEPS) as model:
        assert text == model.chat(ASKED, schema=CITY, max_tokens=60).text
        assert some == [model.generate(LONG + rest, max_tokens=8).text for rest in ("class", "import")]


def test_a_model_of_asyncio_opens_as_its_block_begins():
    with pytest.raises(luce.StateError, match="the model is not open: `async with` opens it"):
        luce.AsyncModel().stream("a")
    with pytest.raises(TypeError, match="did you mean 'parallel'"):
        luce.AsyncModel(paralel=2)


# ---- ends


def test_a_cancelled_stream_ends_with_what_came(model, alone):
    stream = model.stream(PROMPTS[0], max_tokens=1400, ignore_eos=True)
    for _ in range(3):
        next(stream)
    threading.Thread(target=stream.cancel).start()
    answer = stream.answer
    assert answer.reason == "cancelled" and 3 <= len(answer.tokens) < 1400
    n = len(answer.tokens)
    assert answer.tokens == alone(PROMPTS[0], max_tokens=n, ignore_eos=True).tokens
    stream.cancel()  # It has ended: nothing happens.
    assert stream.answer is answer and list(stream) == []


def test_a_stream_that_waits_can_be_cancelled(device):
    with load(device) as model, model.stream(PROMPTS[0], max_tokens=1400, ignore_eos=True) as running:
        next(running)
        waiting = model.stream(PROMPTS[1], max_tokens=5)
        waiting.cancel()
        answer = waiting.answer
        assert (answer.reason, answer.text, answer.tokens, answer.stats.rounds) == ("cancelled", "", (), 0)


def test_an_abandoned_stream_is_cancelled(device):
    with load(device) as model:
        running = model.stream(PROMPTS[0], max_tokens=1400, ignore_eos=True)
        waiting = model.stream(PROMPTS[1], max_tokens=1400, ignore_eos=True)
        next(running)
        del waiting
        del running
        gc.collect()
        until(lambda: idle(model), "what nobody reads ends")
        for _ in model.stream(PROMPTS[0], max_tokens=1400, ignore_eos=True):
            break
        until(lambda: idle(model), "a loop that was left ends it")
        until(lambda: model.loaded.engine.native.info.sequences_free == 1, "its sequence is free")


def test_closed_in_the_middle(device):
    model = load(device)
    stream = model.stream(PROMPTS[0], max_tokens=1400, ignore_eos=True)
    next(stream)
    ended = []

    def wait(prompt):
        try:
            model.generate(prompt, max_tokens=1400, ignore_eos=True)
        except luce.Error as error:
            ended.append(error)

    threads = [threading.Thread(target=wait, args=(prompt,)) for prompt in PROMPTS[:3]]
    for thread in threads:
        thread.start()
    until(lambda: model.loaded.scheduler.waiting == 3, "all wait")
    engine = model.loaded.scheduler._thread
    model.close()
    for thread in threads:
        thread.join()
    assert not engine.is_alive()
    assert [(type(each), str(each)) for each in ended] == [(luce.Cancelled, "the model was closed")] * 3
    with pytest.raises(luce.Cancelled, match="^the model was closed$"):
        list(stream)
    with pytest.raises(luce.Cancelled):
        stream.answer  # noqa: B018
    for ask in (lambda: model.generate("a"), lambda: model.stream("a"), lambda: model.chat(ASKED),
                lambda: model.prefix("a"), lambda: model.info):  # fmt: skip
        with pytest.raises(luce.StateError, match="^the model is closed$"):
            ask()
    model.close()


def test_a_model_that_nobody_holds_is_closed(device):
    model = load(device)
    engine = model.loaded.scheduler._thread
    stream = model.stream(PROMPTS[0], max_tokens=5)
    del model
    assert len(stream.answer.tokens) == 5  # Who reads holds it.
    del stream
    gc.collect()
    until(lambda: not engine.is_alive(), "the engine's thread ends")


def test_an_error_ends_a_batch(model):
    with pytest.raises(luce.ArgumentError, match="there are 4096"):
        model.generate([PROMPTS[0], PROMPTS[1]], max_tokens=20, logprobs=100_000)
    until(lambda: idle(model), "the others are cancelled")


def test_busy_where_as_many_wait_as_may(device):
    with load(device, max_waiting=1) as model:
        running = model.stream(PROMPTS[0], max_tokens=1400, ignore_eos=True)
        next(running)
        waiting = model.stream(PROMPTS[0])
        with pytest.raises(luce.Busy, match="^the model is busy$") as busy:
            model.stream(PROMPTS[0])
        assert busy.value.retry_after >= 1
        waiting.cancel()
        running.cancel()


# ---- beginnings


@pytest.mark.long
def test_a_prefix_is_resumed_by_many():
    rests = [f"def g{n}(x):\n" for n in range(5)]
    with load(KEEPS, parallel=2, checkpoints=1) as model, model.prefix(LONG) as prefix:
        assert len(model.encode(LONG)) - 128 < prefix.kept_tokens < len(model.encode(LONG))
        for n in range(3):  # Others would take its place.
            model.generate(f"x{n} = 1\n" + LONG, max_tokens=1)
        answers = prefix.generate(rests, max_tokens=10)
        assert [each.cached_tokens for each in answers] == [prefix.kept_tokens] * 5
        assert "".join(piece.text for piece in prefix.stream(rests[0], max_tokens=10)) == answers[0].text
        assert model.generate(LONG + rests[1], max_tokens=10).cached_tokens == prefix.kept_tokens
    with load(KEEPS, draft="off", checkpoints=0) as alone:
        for rest, answer in zip(rests, answers, strict=True):
            assert answer.tokens == alone.generate(LONG + rest, max_tokens=10).tokens and answer.text


@pytest.mark.long
def test_a_prefix_that_is_closed_makes_room():
    with load(KEEPS, checkpoints=1) as model:
        prefix = model.prefix(LONG)
        kept = prefix.kept_tokens
        other = "y = 2\n" + LONG
        assert prefix.generate("def", max_tokens=1).cached_tokens == kept
        prefix.close()
        prefix.close()
        model.generate(other, max_tokens=1)
        model.generate(other, max_tokens=1)
        assert model.generate(LONG + "def", max_tokens=1).cached_tokens < kept


@pytest.mark.long
def test_a_prefix_of_a_conversation():
    system = [{"role": "system", "content": LONG}]
    with load(KEEPS) as model:
        with model.prefix(system, tools=[WEATHER]) as prefix:
            answer = prefix.chat(ASKED, max_tokens=5, temperature=0)
            assert 0 < prefix.kept_tokens == answer.cached_tokens
            for ask in (prefix.chat, prefix.chat_stream):  # It has its tools already.
                with pytest.raises(TypeError, match="there is no option 'tools'"):
                    ask(ASKED, tools=[WEATHER])
        with pytest.raises(luce.ArgumentError, match="the beginning is a conversation"):
            prefix.stream("a")
        cold = load(KEEPS, checkpoints=0)
        with cold:
            again = cold.chat([*system, *ASKED], tools=[WEATHER], max_tokens=5, temperature=0)
            assert again.tokens == answer.tokens and again.cached_tokens == 0
            with pytest.raises(luce.ArgumentError, match="load it with 1 or more checkpoints"):
                cold.prefix("a")


# ---- what is asked for


def test_logprobs_are_those_of_each_token(model, alone):
    stream = model.stream(PROMPTS[0], max_tokens=12, logprobs=3)
    pieces = list(stream)
    answer = stream.answer
    assert len(answer.logprobs) == len(answer.tokens) == 12
    assert answer.tokens == alone(PROMPTS[0], max_tokens=12).tokens
    assert tuple(each for piece in pieces for each in piece.logprobs) == answer.logprobs
    for token, found in zip(answer.tokens, answer.logprobs, strict=True):
        ranked = [logprob for _, logprob in found.top]
        assert len(ranked) == 3 and ranked == sorted(ranked, reverse=True)
        assert found.top[0] == (token, found.logprob) and found.logprob < 0  # Greedy takes the first.
    assert model.generate(PROMPTS[0], max_tokens=3).logprobs == ()


def test_a_grammar_holds_the_text(model):
    lark = 'start: "x = " ("1" | "2")+ ";"'
    text = model.generate(PROMPTS[0], grammar=lark, max_tokens=60, temperature=1, seed=3).text
    head, digits, end = text[:4], text[4:-1], text[-1:]
    assert (head, end) == ("x = ", ";") and set(digits) <= set("12") and digits
    gbnf = 'root ::= "yes" | "no"'
    assert model.generate("Is it? ", grammar=gbnf).text in ("yes", "no")


@pytest.mark.parametrize("schema", [CITY, json.dumps(CITY)], ids=["mapping", "text"])
def test_a_schema_holds_the_text(model, schema):
    for answer in (model.generate("x", schema=schema), model.chat(ASKED, schema=schema)):
        jsonschema.validate(json.loads(answer.text), CITY)
        assert answer.reason == "stop"


def test_tools_are_called(model):
    stream = model.chat_stream(ASKED, tools=[WEATHER], tool_choice="weather", max_tokens=400, temperature=0)
    pieces = list(stream)
    answer = stream.answer
    assert answer.calls and answer.calls == tuple(call for piece in pieces for call in piece.calls)
    for call in answer.calls:
        assert call.name == "weather"
        jsonschema.validate(call.arguments, WEATHER["parameters"])
    wrapped = {"type": "function", "function": WEATHER}  # As OpenAI's clients write it.
    again = model.chat(ASKED, tools=[wrapped], tool_choice="weather", max_tokens=400, temperature=0)
    assert again.tokens == answer.tokens
    said = [*ASKED, answer.message, {"role": "tool", "content": "sunny"}]
    assert model.chat(said, tools=[WEATHER], max_tokens=4).prompt_tokens > answer.prompt_tokens
    assert model.chat(ASKED, tools=[WEATHER], tool_choice="none", max_tokens=9).calls == ()


def test_arguments_of_calls_may_be_json(model):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"days": 2}'}}
    said = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    asked = [*said, {"role": "tool", "content": "sunny"}]
    first = model.chat(asked, tools=[WEATHER], max_tokens=4)
    call["function"]["arguments"] = {"days": 2}
    assert model.chat(asked, tools=[WEATHER], max_tokens=4).prompt_tokens == first.prompt_tokens


def test_what_a_chat_answers_with(tiny_gguf):
    """Reasoning, text and calls each have their place, however the text is cut."""
    call = "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    whole = f"I wonder.\n</think>\n\nSee:\n\n{call}"
    with File(tiny_gguf) as file:
        tokenizer = Tokenizer(file.kv)
    for size in (1, 7, len(whole)):
        parser = Parser({"weather": WEATHER["parameters"]}, reasoning=True)
        reader = Reader(tokenizer, Request((1,)), parser)
        pieces = []
        for at in range(0, len(whole), size):
            pieces += reader.read([Tokens((7,), whole[at : at + size])])
        stats = Tally().stats(0.0, 0)
        pieces += reader.read([Finished("stop", whole, (7,), 1, stats)])
        answer = reader.answer
        assert (answer.reasoning, answer.text, answer.reason) == ("I wonder.", "See:", "calls")
        assert answer.calls == (luce.Call("weather", {"days": 2}),)
        assert "".join(piece.reasoning for piece in pieces) == answer.reasoning
        assert "".join(piece.text for piece in pieces) == answer.text
        message = answer.message
        assert message["reasoning_content"] == "I wonder." and message["content"] == "See:"
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"days": 2}}


SWITCHED = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + ' ' + message.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"""


def test_thinking_is_turned_off_and_on(model, device, monkeypatch):
    with pytest.raises(luce.UnsupportedError, match="think is False, which the chat template .*: leave it None"):
        model.chat(ASKED, think=False)
    monkeypatch.setattr("luce.model.prompting.chat_template", lambda kv: BoundedTemplate(SWITCHED))
    with load(device) as other:
        ends = {}
        for think in (None, True, False):
            asked = other.conversation(ASKED, {"think": think})
            ends[think] = other.decode(asked.request.prompt, special=True).split()[-1], asked.parser.reasoning
        assert ends == {None: ("<think>", True), True: ("<think>", True), False: ("</think>", False)}


def test_a_chat_samples_as_the_file_asks(model):
    assert model.conversation(ASKED, {}).request.sampling.temperature == 0.6
    assert model.conversation(ASKED, {"temperature": 0}).request.sampling.temperature == 0
    assert model.text("a", None, {}).request.sampling.temperature == 0


def test_a_stop_string_is_named_and_left_out(model):
    answer = model.generate(PROMPTS[0], max_tokens=60, stop=["return", "zzz"])
    assert answer.reason == "stop" and answer.stop == "return" and "return" not in answer.text
    assert model.generate(PROMPTS[0], max_tokens=5).stop is None


def test_what_a_model_says_of_itself(model):
    info = model.info
    assert info.path == str(box_model.GGUF) and info.architecture == "qwen35"
    assert (info.ctx, info.parallel, info.n_vocab) == (1536, 3, 4096)
    assert info.memory_bytes > 0 and info.plan["ctx"]["value"] == 1536
    assert model.encode("<|im_end|>", special=True) != model.encode("<|im_end|>")


def test_warnings_of_a_file_are_pythons(device, monkeypatch):
    monkeypatch.setattr("luce.planning.opened.Files.warnings", ["box.gguf: it is odd"])
    with pytest.warns(UserWarning, match="it is odd") as caught, load(device):
        pass
    assert Path(caught[0].filename) == Path(__file__)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(device).close()


# ---- errors


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"temperature": -1}, "temperature is -1: it is a number, at least 0"),
        ({"temperature": float("nan")}, "temperature is nan: it is a number, at least 0"),
        ({"temperature": True}, "temperature is True: it is a number, at least 0"),
        ({"temperature": None}, "temperature is None: it is a number, at least 0"),
        ({"top_k": 1.5}, "top_k is 1.5: it is a whole number, at least 0, at most 2,147,483,647"),
        ({"top_p": 0}, "top_p is 0: it is a number, above 0, at most 1"),
        ({"min_p": 1}, "min_p is 1: it is a number, at least 0, below 1"),
        ({"seed": -1}, "seed is -1: it is a whole number, at least 0, at most 18,446,744,073,709,551,615"),
        ({"max_tokens": -1}, "max_tokens is -1: it is a whole number, at least 0, at most 4,294,967,295"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0: it is a number, above 0, at most 100"),
        ({"presence_penalty": 3}, "presence_penalty is 3: it is a number, at least -2, at most 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1': it is a number, at least -2, at most 2"),
        ({"logit_bias": {9999: 1}}, "logit_bias has the token 9999, which is none of the model's 4096"),
        ({"logit_bias": {1: 101}}, "logit_bias[1] is 101: it is a number, at least -100, at most 100"),
        ({"logit_bias": [1]}, "logit_bias is [1]: it is a mapping of token ids to numbers"),
        ({"stop": ""}, "a stop text is empty"),
        ({"stop": [1]}, "stop is [1]: it is a string, or a list of strings"),
        ({"logprobs": -1}, "logprobs is -1: it is a whole number, at least 0, at most 1,048,576"),
        ({"grammar": "(("}, "the grammar cannot be used: "),
        ({"grammar": 5}, "grammar is 5: it is the text of a grammar"),
        ({"grammar": " \n"}, "the grammar is empty"),
        ({"schema": "{"}, "the schema is no JSON: "),
        ({"schema": 5}, "the schema is no JSON object"),
        ({"schema": CITY, "grammar": "x"}, "schema and grammar both say what the answer has to be"),
        ({"schema": {"type": "strin"}}, "the schema's `type` at /type is 'strin', which is no type"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_is_wrong_is_named(model, how, said):
    with pytest.raises(luce.ArgumentError) as error:
        model.generate("a", **how)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("prompt", "kind", "said"),
    [
        ("", luce.ArgumentError, "the prompt is empty"),
        ([5000], luce.ArgumentError, "the prompt has the token 5000, which is none of the model's 4096"),
        (5, luce.ArgumentError, "the prompt is 5: it is a text, or token ids"),
        (None, luce.ArgumentError, "the prompt is None: it is a text, or token ids"),
        (["a", 5], luce.ArgumentError, "the prompt is ['a', 5]: it is a text, or token ids"),
        ("\ud800", luce.ArgumentError, "the text is not valid UTF-8"),
        (b"def", luce.ArgumentError, "the prompt is b'def': it is a text, or token ids"),
        (bytearray(), luce.ArgumentError, "the prompt is bytearray(b''): it is a text, or token ids"),
        ([7] * 1537, luce.ContextFull, "a prompt of at least 1537 tokens, a context of 1536: "
         "luce.load with a larger ctx has room for more"),
    ],
    ids=["empty", "token", "number", "none", "mixed", "surrogate", "bytes", "no bytes", "long"],
)
def test_a_prompt_that_is_wrong_is_said_so(model, prompt, kind, said):
    with pytest.raises(kind) as error:
        model.generate(prompt)
    assert str(error.value) == said and isinstance(error.value, luce.Error)


def test_what_is_no_text_and_no_tokens_is_said_so(model):
    with pytest.raises(luce.ArgumentError, match="the text is 5: it is a string"):
        model.encode(5)
    for tokens in ("def", 5, [1, "a"], b"".join):
        with pytest.raises(luce.ArgumentError, match="the tokens are .*: they are token ids"):
            model.decode(tokens)
    assert model.decode(iter([7, np.int64(8)])) == model.decode([7, 8])
    with pytest.raises(luce.ArgumentError, match="the messages are 5: they are a list of messages"):
        model.prefix(5)


@pytest.mark.parametrize(
    ("messages", "how", "said"),
    [
        ([], {}, "there are no messages"),
        ("hi", {}, "the messages are 'hi': they are a list of messages"),
        ([{"role": "x"}], {}, "a message is {'role': 'x'}: it is a mapping whose role is one of system, "),
        (5, {}, "the messages are 5: they are a list of messages"),
        ([{"role": "user", "content": 5}], {}, "the content of a message is 5: it is a text"),
        ([{"role": "user"}], {}, "a message is {'role': 'user'}: it has no content, which is a text"),
        ([{"role": "tool", "content": None}], {}, "it has no content, which is a text"),
        (ASKED, {"tool_choice": "a"}, "tool_choice is 'a': it is auto, none, required or a tool's name"),
        (ASKED, {"tool_choice": "required"}, "tool_choice is required, and there are no tools"),
        (ASKED, {"tools": [{"description": "d"}]}, "a tool is {'description': 'd'}: it is a mapping with a name"),
        (ASKED, {"tools": [{"name": "a", "parameters": 5}]}, "the parameters of a are no JSON schema"),
    ],
)
def test_a_chat_that_is_wrong_is_said_so(model, messages, how, said):
    with pytest.raises(luce.ArgumentError) as error:
        model.chat(messages, **how)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("path", "how", "kind", "said"),
    [
        ("/nowhere/a.gguf", {}, luce.FileError, "/nowhere/a.gguf: No such file or directory"),
        (__file__, {}, luce.FileError, "not a GGUF file"),
        (None, {"device": "gpu"}, luce.ArgumentError, "no device 'gpu'"),
        (None, {"draft": "x"}, luce.ArgumentError, "draft is 'x': it is one of auto, off, mtp, dflash, lookup"),
        (None, {"draft": "off", "gamma": 2}, luce.ArgumentError, "chains of 2 drafts were asked for (gamma)"),
        (None, {"draft": "lookup", "gamma": 2}, luce.ArgumentError, "(gamma), which the NextN head makes"),
        (5, {}, luce.ArgumentError, "path is 5: it is the path of a GGUF file"),
        (None, {"drafter": b"a.gguf"}, luce.ArgumentError, "drafter is b'a.gguf': it is the path of a GGUF file"),
        (None, {"head": True}, luce.ArgumentError, "head is True: it is the path of a GGUF file"),
        (None, {"cpu_experts": "all"}, luce.ArgumentError, "cpu_experts is 'all': it is a number of layers, or 'auto'"),
        (None, {"expert_slots": "all"}, luce.ArgumentError, "expert_slots is 'all': it is a number of experts"),
        (None, {"expert_slots": 2}, luce.ArgumentError, "slots were asked for experts, and the model has none"),
        (None, {"cpu_experts": -1}, luce.ArgumentError, "cpu_experts is -1: it is a number of layers, or 'auto'"),
        (None, {"parallel": 65}, luce.ArgumentError, "parallel is 65: it is a whole number, at least 1, at most 64"),
        (None, {"kv_type": "f8"}, luce.ArgumentError, "kv_type 'f8'"),
        (None, {"ctx": 10**6}, luce.ArgumentError, "the model was trained for 2048"),
        (None, {"ctx": 0}, luce.ArgumentError, "ctx is 0: it is a whole number, at least 1"),
        (None, {"parallel": 0}, luce.ArgumentError, "parallel is 0: it is a whole number, at least 1, at most 64"),
        (None, {"checkpoints": -1}, luce.ArgumentError, "checkpoints is -1"),
        (None, {"cpu_experts": 2}, luce.ArgumentError, "the model has none"),
        (None, {"progress": lambda done: True}, luce.Cancelled, ""),
        (box_model.DRAFTER, {}, luce.UnsupportedError, ""),
    ],
)
def test_a_model_that_cannot_be_opened_is_said_so(path, how, kind, said):
    with pytest.raises(kind) as error:
        luce.load(path, **{"device": "cpu"} | how)
    assert said in str(error.value) and isinstance(error.value, luce.Error)


def test_the_last_numbers_of_ranges_are_taken(model):
    ends = {"seed": 2**64 - 1, "top_k": 2**31 - 1, "temperature": 1e9, "top_p": 1, "max_tokens": 0}
    assert model.generate("a", **ends, min_p=0, presence_penalty=-2, frequency_penalty=2).text == ""


def test_an_option_that_there_is_not_is_a_type_error(model):
    with pytest.raises(TypeError, match="there is no option 'temprature': did you mean 'temperature'?"):
        model.stream("a", temprature=1)
    with pytest.raises(TypeError, match="there is no option 'shema': did you mean 'schema'?"):
        model.generate("a", shema={"type": "string"})
    with pytest.raises(TypeError, match="there is no option 'zzz'; there are max_tokens, temperature"):
        model.chat(ASKED, zzz=1)
    with pytest.raises(TypeError, match="there is no option 'thinks': did you mean 'think'?"):
        model.chat_stream(ASKED, thinks=True)
    for name in ("think", "tools", "tool_choice"):
        with pytest.raises(TypeError, match=f"there is no option '{name}'"):
            model.generate("a", **{name: None})
    with pytest.raises(TypeError):
        luce.load(temperature=1)


# ---- the package

DOCUMENT = ROOT / "docs" / "python-api.md"
PAGES = DOCUMENT.read_text() + (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGES, re.S | re.M)


@pytest.fixture
def example(tmp_path):
    """Gives example(n), which writes the pages' nth example beside the model in the box as model.gguf, and a
    tiny one that sees."""
    if importlib.util.find_spec("PIL"):
        from PIL import Image

        tiny_vision.write_both(tmp_path)
        (tmp_path / "model.gguf").rename(tmp_path / "qwen3.5-9b.gguf")
        Image.fromarray(tiny_vision.image(100, 40, 1)).save(tmp_path / "shot.png")
    (tmp_path / "model.gguf").symlink_to(box_model.GGUF)

    def write(n):
        path = tmp_path / "example.py"
        path.write_text(EXAMPLES[n])
        return path

    return write


@pytest.mark.parametrize("n", deeper_but(range(len(EXAMPLES)), 1))
def test_the_documents_examples_run(n, example, monkeypatch, capfd):
    path = example(n)
    monkeypatch.chdir(path.parent)
    runpy.run_path(path.name, run_name="__main__")
    gc.collect()  # A model that an example leaves open is closed.
    printed, said = capfd.readouterr()
    assert printed and not said


@pytest.mark.parametrize("n", deeper_but(range(len(EXAMPLES)), 0))
def test_each_example_is_a_program_of_its_own(n, example):
    path = example(n)
    ran = subprocess.run([sys.executable, path.name], cwd=path.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout and not ran.stderr



def test_import_luce_imports_neither_the_core_nor_numpy():
    script = """
import sys, luce
dir(luce)
print([name for name in sys.modules if name.split(".")[0] in %r or name.startswith("luce.")])
"""
    slow = ["cffi", "numpy", "tokenizers", "asyncio", "click", "rich", "jinja2"]
    ran = subprocess.run([sys.executable, "-c", script % slow], capture_output=True, text=True, check=True)
    assert ast.literal_eval(ran.stdout) == []


def test_all_public_names_are_there():
    assert {name for name in luce.__all__ if not hasattr(luce, name)} == set()
    assert set(luce.__all__) == set(dir(luce)) == {*luce._MODULES, "__version__"}
    assert not hasattr(luce, "no_such_name")
    kinds = [value for name in luce.__all__ if isinstance(value := getattr(luce, name), type)]
    errors = [kind for kind in kinds if issubclass(kind, Exception)]
    assert len(errors) == 13 and all(issubclass(kind, luce.Error) for kind in errors)


def test_the_document_names_all_that_is_public():
    text = DOCUMENT.read_text()
    named = set(re.findall(r"`(?:luce\.)?(\w+)", text))
    assert set(luce.__all__) - named == set()
    assert set(HowChat.__annotations__) - named == set()
    assert set(Loading.__annotations__) - named == set()


@pytest.mark.long
def test_a_part_of_a_prompt_is_read_and_said(device):
    with load("cpu", prefill_model=box_model.GGUF) as model:
        answer = model.generate(LONG, max_tokens=8, prefill_keep=0.3)
        kept, whole = answer.prefill, len(model.encode(LONG, bos=True))
        assert kept.total == whole and answer.prompt_tokens == kept.read < 0.4 * whole
        assert kept.as_json()["left_out"] == whole - kept.read
        assert model.generate(LONG, max_tokens=8, prefill_keep=0.3).tokens == answer.tokens
        assert model.generate(LONG, max_tokens=8).prefill is None
        said = model.chat([{"role": "user", "content": LONG}], max_tokens=4, prefill_keep=0.5)
        assert 0 < said.prefill.read < said.prefill.total
        for wrong in (0, 1.1, "a"):
            with pytest.raises(luce.errors.ArgumentError, match="prefill_keep is"):
                model.generate(LONG, prefill_keep=wrong)


@pytest.mark.long
def test_only_what_is_read_has_to_fit(device):
    with load("cpu", ctx=512, prefill_model=box_model.GGUF) as model:
        with pytest.raises(luce.errors.ContextFull):
            model.generate(LONG)
        assert model.generate(LONG, max_tokens=4, prefill_keep=0.3).prompt_tokens < 512


def test_a_part_needs_a_model_that_chooses_it(device):
    with load("cpu") as model, pytest.raises(luce.errors.ArgumentError, match="load the model with prefill_model"):
        model.generate("x = 1", prefill_keep=0.5)


def test_the_types_of_options_are_those_of_the_functions():
    taken = luce.load.__kwdefaults__
    assert set(taken) == set(Loading.__annotations__)
    documented = How.__doc__.split("\n\n")[1]
    assert all(f"{name}" in documented for name in How.__annotations__)
    assert {*How.__annotations__} < {*HowReply.__annotations__} < {*HowChat.__annotations__}
    for kind, above in ((HowReply, How), (HowChat, HowReply)):
        own = {*kind.__annotations__} - {*above.__annotations__}
        assert own and all(f"\n    {name}: " in kind.__doc__ for name in own)
    assert (Path(luce.__file__).parent / "py.typed").exists()
