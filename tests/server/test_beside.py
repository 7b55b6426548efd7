"""Sends requests that take long to read, to make a prompt of, or to write: the others are answered
meanwhile."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import HANG_S, Gate, serving, settings, until

from luce.data import BOX
from luce.files.template_process import Renderer
from luce.files.tokenizer import Tokenizer
from luce.server import lanes, models
from luce.server.answer import Answer
from luce.server.api import anthropic, body, ollama, openai
from luce.text.grammar import Grammars

SHORT = {"prompt": "import os", "max_tokens": 2}
STREAM = {"prompt": "import os", "max_tokens": 100, "ignore_eos": True, "stream": True}


def tiny(n):
    return {"messages": [{"role": "user", "content": "x"}] * n, "max_tokens": 1}


def tools(n):
    made = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}}
        for i in range(n)
    ]
    return {"messages": [{"role": "user", "content": "x"}], "tools": made, "max_tokens": 1}


MANY, LARGE = 700, {"prompt": "x " * lanes.SHORT}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x" * 50] * 2000}}}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(native):
    with serving({"box": BOX}, settings(sequences=4)) as running:
        yield running


def others(server):
    """Asks all that has to go on: whether it lives, a whole answer, a stream."""
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.post("/v1/completions", **SHORT).status_code == 200
    assert server.post(CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=1).status_code == 200
    with httpx.stream("POST", f"{server.url}/v1/completions", json=STREAM, timeout=HANG_S) as response:
        assert "".join(response.iter_text()).endswith("data: [DONE]\n\n")


class LargeGate(Gate):
    """Holds the calls that are made in a lane for large work, and no others."""

    def __call__(self, *args, **how):
        if threading.current_thread().name.startswith(("luce-middle", "luce-large")):
            return super().__call__(*args, **how)
        return self.inner(*args, **how)


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "asked", "owner", "name"),
    [
        (CHAT, tiny(MANY), body, "_typed"),
        (CHAT, tiny(MANY), openai, "message_of"),
        (CHAT, tiny(MANY), models, "ordered"),
        (CHAT, tiny(MANY), Renderer, "render"),
        (CHAT, tiny(MANY), Tokenizer, "encode"),
        (CHAT, tools(MANY), openai, "tool_of"),
        (CHAT, tools(MANY), Renderer, "render"),
        (CHAT, tiny(1) | {"response_format": SCHEMA}, Answer, "_grammar"),
        ("/v1/completions", LARGE, Tokenizer, "encode"),
        ("/v1/completions", {"prompt": [1] * 50_000}, body, "_typed"),
        ("/v1/messages", tiny(MANY), anthropic, "_messages"),
        ("/v1/messages", tiny(MANY), Tokenizer, "encode"),
        ("/v1/messages/count_tokens", tiny(MANY), Tokenizer, "encode"),
        ("/v1/responses", {"input": tiny(MANY)["messages"], "max_output_tokens": 1}, Tokenizer, "encode"),
        ("/api/chat", tiny(MANY), ollama, "_message"),
        ("/api/chat", tiny(MANY), Tokenizer, "encode"),
        ("/apply-template", tiny(1) | {"user": "x" * lanes.SHORT}, Tokenizer, "decode"),
        ("/tokenize", {"content": "x " * lanes.SHORT}, Tokenizer, "encode"),
        ("/detokenize", {"tokens": [300] * lanes.SHORT}, Tokenizer, "decode"),
    ],
)
def test_what_is_large_is_made_beside(server, monkeypatch, path, asked, owner, name):
    """It stands still at one place of its way, and nobody else does."""
    held = LargeGate(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *args, **how: held(*args, **how))
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(httpx.post, server.url + path, json=asked, timeout=HANG_S)
        assert held.entered.wait(HANG_S)
        others(server)
        assert not large.done()
        held.opened.set()
        assert large.result().status_code in (200, 400)  # It may be longer than the context.


@pytest.mark.long
def test_a_large_answer_is_written_beside(server, monkeypatch):
    """Twenty alternatives to each of its tokens are many objects."""
    held = LargeGate(openai.CompletionForm.whole)
    monkeypatch.setattr(openai.CompletionForm, "whole", lambda *args: held(*args))
    asked = {"prompt": "import os", "max_tokens": 200, "ignore_eos": True, "logprobs": 20}
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.post, "/v1/completions", **asked)
        assert held.entered.wait(HANG_S)
        others(server)
        assert not large.done()
        held.opened.set()
        found = large.result().json()["choices"][0]
    texts, offsets = found["logprobs"]["tokens"], found["logprobs"]["text_offset"]
    assert len(texts) == 200 and offsets == [len("".join(texts[:at])) for at in range(200)]


def test_thousands_of_tiny_messages_keep_nobody_waiting(server):
    """Nothing is held here: this is as long as it takes."""
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(httpx.post, server.url + "/apply-template", json=tiny(5000), timeout=HANG_S)
        answered = 0
        while not large.done():
            assert server.http.get("/health").status_code == 200
            assert server.post("/v1/completions", **SHORT).status_code == 200
            answered += 1
        assert large.result().status_code == 400 and answered > 2


def test_more_messages_than_tokens_are_not_even_rendered(server, monkeypatch):
    monkeypatch.setattr(models, "prompt_ids", None)
    n_ctx = server.models.slots["box"].served.info.n_ctx
    refused = server.post(CHAT, **tiny(200_000))
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert f"{n_ctx} tokens, and the prompt has at least 200000 tokens" in refused.json()["error"]["message"]


def test_agents_do_not_wait_for_what_is_larger(server, monkeypatch):
    """A conversation of an agent is in the middle."""
    held, encode = Gate(lambda: [1]), Tokenizer.encode

    def gated(self, text, **how):
        return held() if len(text) > lanes.MIDDLE else encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", gated)
    with ThreadPoolExecutor(2) as pool:
        large = [pool.submit(server.post, "/tokenize", content="x " * lanes.MIDDLE) for _ in range(2)]
        assert held.entered.wait(HANG_S)
        middle = {"content": "x " * lanes.SHORT}
        assert server.post("/tokenize", **middle).status_code == 200
        assert not any(each.done() for each in large)
        held.opened.set()
        assert [each.result().status_code for each in large] == [200, 200]


def test_what_waits_to_be_made_is_bounded(server, monkeypatch):
    monkeypatch.setattr(lanes, "MAX_WAITING", 1)
    held = Gate(lambda *args, **how: [1])
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **how: held(*args, **how))
    lane, asked = lanes.LARGE[1], {"content": "x" * (lanes.MIDDLE + 1)}
    with ThreadPoolExecutor(2) as pool:
        large = [pool.submit(server.post, "/tokenize", **asked) for _ in range(2)]
        assert held.entered.wait(HANG_S)
        until(lambda: lane._inside == 2, "one runs and one waits")
        refused = server.post("/tokenize", **asked)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        held.opened.set()
        assert [each.result().status_code for each in large] == [200, 200]
    assert lane._inside == 0 and server.post("/tokenize", **asked).status_code == 200


def test_what_waits_for_a_client_that_went_is_not_made(server, monkeypatch):
    """Its prompt waits for a larger one; meanwhile it goes."""
    rendered, render = [], Renderer.render
    held = Gate(lambda *args, **how: [1])
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **how: held(*args, **how))
    monkeypatch.setattr(Renderer, "render", lambda *args, **how: rendered.append(1) or render(*args, **how))
    lane = lanes.LARGE[0]
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(httpx.post, server.url + "/tokenize", json={"content": "x" * lanes.MIDDLE},
                            timeout=HANG_S)  # fmt: skip
        assert held.entered.wait(HANG_S)
        with server.asked(CHAT, **tiny(300)):
            until(lambda: lane._inside == 2, "it waits")
        until(lambda: lane._inside == 1, "it is forgotten")
        held.opened.set()
        assert large.result().status_code == 200
    until(lambda: lane._inside == 0, "the lane is free")
    assert not rendered


def test_bodies_are_bounded_together(server, monkeypatch):
    """A client that sends slowly holds what it has sent."""
    monkeypatch.setattr(body, "MAX_HELD", 100_000)
    slow = threading.Event()

    def parts():
        yield b"x" * 90_000
        assert slow.wait(HANG_S)
        yield b"x"

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, server.url + "/tokenize", content=parts(), timeout=HANG_S)
        until(lambda: body.Held.total == 90_000, "it has sent")
        refused = server.post("/tokenize", content="x" * 20_000)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.post("/tokenize", content="x" * 5000).status_code == 200
        slow.set()
        assert first.result().status_code == 400
    until(lambda: body.Held.total == 0, "nothing is held")


def test_an_api_makes_of_a_large_body_what_it_makes_of_a_small_one(server):
    """Cost decides where it is made, and nothing else."""
    for path, asked in (
        (CHAT, tiny(3)),
        ("/v1/responses", {"input": "x"}),
        ("/api/chat", tiny(2) | {"stream": False}),
    ):
        said = []
        for padding in (0, lanes.SHORT, lanes.MIDDLE):
            content = json.dumps(asked | {"temperature": 0, "options": {"temperature": 0, "num_predict": 3},
                                          "max_tokens": 3, "max_output_tokens": 3}).encode()  # fmt: skip
            found = server.http.post(path, content=content + b" " * padding).json()
            said.append(found.get("choices") or found.get("message") or found["output"][-1]["content"])
        assert said[0] and said == said[:1] * 3, path


def test_a_grammar_may_take_long(server, monkeypatch):
    """A small one may. Prompts without one go on, and so do those of larger ones."""
    held, lark = Gate(Grammars.lark), Grammars.lark

    def gated(self, grammar):
        return held(self, grammar) if "slow" in grammar else lark(self, grammar)

    def schema(value):
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [value]}}}

    monkeypatch.setattr(Grammars, "lark", gated)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, CHAT, **tiny(1) | {"response_format": schema("slow")})
        assert held.entered.wait(HANG_S)
        others(server)
        larger = tiny(1) | {"response_format": schema("x" * lanes.SHORT)}
        assert server.post(CHAT, **larger).status_code == 200
        assert not slow.done()
        held.opened.set()
        assert slow.result().status_code == 200
