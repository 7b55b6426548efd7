"""Asks for several answers in one request: n to each of its prompts."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import serving, settings, streamed, until

from luce.data import BOX
from luce.decode.events import Failed, State
from luce.errors import DeviceError
from luce.server.answer import Answer

PROMPTS = ["import os\n", "def add(a, b):\n", "class Stack:\n"]
HOT = {"temperature": 1.0, "max_tokens": 12}
HELLO = [{"role": "user", "content": "def add(a, b):"}]


@pytest.fixture(scope="module")
def server(native):
    with serving({"box": BOX}) as running:
        yield running


def alone(server, **asked):
    found = server.post("/v1/completions", **asked).json()
    return found["choices"][0]["text"], found["usage"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 11}])
def test_each_prompt_has_the_answer_that_it_has_alone(server, sampling):
    asked = {"max_tokens": 12, **sampling}
    expected = [alone(server, prompt=prompt, **asked) for prompt in PROMPTS]
    found = server.post("/v1/completions", prompt=PROMPTS, **asked).json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in found["choices"]] == [text for text, _ in expected]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][count] == sum(usage[count] for _, usage in expected)


def test_prompts_may_be_tokens(server):
    tokens = [server.post("/tokenize", content=prompt).json()["tokens"] for prompt in PROMPTS]
    expected = server.post("/v1/completions", prompt=PROMPTS, temperature=0).json()["choices"]
    for prompts in (tokens, [[float(token) for token in each] for each in tokens], [PROMPTS[0], *tokens[1:]]):
        found = server.post("/v1/completions", prompt=prompts, temperature=0).json()["choices"]
        assert found == expected


def test_n_answers_have_seeds_one_after_the_other(server):
    """And their prompt counts once."""
    expected = [alone(server, prompt=PROMPTS[1], seed=seed, **HOT) for seed in (40, 41, 42)]
    found = server.post("/v1/completions", prompt=PROMPTS[1], n=3, seed=40, **HOT).json()
    assert [choice["text"] for choice in found["choices"]] == [text for text, _ in expected]
    assert len({text for text, _ in expected}) == 3
    usage = found["usage"]
    assert usage["prompt_tokens"] == expected[0][1]["prompt_tokens"]
    assert usage["completion_tokens"] == sum(each["completion_tokens"] for _, each in expected)


def test_n_answers_to_several_prompts_come_prompt_by_prompt(server):
    found = server.post("/v1/completions", prompt=PROMPTS[:2], n=2, seed=40, **HOT).json()["choices"]
    expected = [alone(server, prompt=p, seed=s, **HOT)[0] for p in PROMPTS[:2] for s in (40, 41)]
    assert [(choice["index"], choice["text"]) for choice in found] == [*enumerate(expected)]


def test_chats_have_choices_too(server):
    asked = {"messages": HELLO, "seed": 5, **HOT}
    alone = [server.post("/v1/chat/completions", **asked | {"seed": seed}).json() for seed in (5, 6)]
    found = server.post("/v1/chat/completions", **asked, n=2).json()
    expected = [each["choices"][0]["message"] for each in alone]
    assert [choice["message"] for choice in found["choices"]] == expected
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    without = server.post("/v1/chat/completions", messages=HELLO, n=2, temperature=2.0, max_tokens=20).json()
    assert len({choice["message"]["content"] for choice in without["choices"]}) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_have_the_choices_by_index(server, path):
    chat = "chat" in path
    asked = {"messages": HELLO} if chat else {"prompt": PROMPTS[:2], "echo": True}
    asked |= {"n": 2, "seed": 3, "stream_options": {"include_usage": True}, **HOT}
    whole = server.post(path, **{**asked, "stream_options": None}).json()
    *events, last = streamed(server.post(path, stream=True, **asked))
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"] and last["choices"] == []
    assert len({event["id"] for event in [*events, last]}) == 1
    texts, reasons = {}, {}
    for event in events:
        (choice,) = event["choices"]
        assert choice["index"] not in reasons, "it had ended"
        said = (choice["delta"].get("content") if chat else choice["text"]) or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + said
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    for choice in whole["choices"]:
        assert texts[choice["index"]] == (choice["message"]["content"] if chat else choice["text"])
        assert reasons[choice["index"]] == choice["finish_reason"]
    assert len(texts) == len(whole["choices"]) == (2 if chat else 4)


def test_they_run_together_and_as_many_as_there_are_wait_for_none(native):
    """One request is one in the queue, however many answers it has: those wait that find it full."""
    with serving({"box": BOX}, settings(sequences=2, max_waiting=0)) as server:
        most, step = [0], server.post  # The scheduler is there after the first request.
        assert step("/v1/completions", prompt="a", max_tokens=1).status_code == 200
        scheduler, run = server.scheduler, server.scheduler._loop.step

        def seen():
            most[0] = max(most[0], scheduler.running)
            return run()

        scheduler._loop.step = seen
        prompts = [f"# {n}\n" for n in range(9)]
        found = server.post("/v1/completions", prompt=prompts, max_tokens=6, temperature=0)
        assert found.status_code == 200 and len(found.json()["choices"]) == 9
        assert most[0] == 2
        until(lambda: scheduler.idle, "all have ended")


def test_one_prompt_that_cannot_be_read_refuses_the_request(server):
    before = server.scheduler.running
    for prompts in (["a", "word " * 40000], [[1, 2], [1 << 20]]):
        refused = server.post("/v1/completions", prompt=prompts, stream=True)
        assert refused.status_code == 400 and refused.json()["error"]["message"]
    assert server.scheduler.running == before == 0 and server.scheduler.idle


def test_who_goes_away_frees_all_of_them(server):
    asked = {"prompt": ["x = 1\n"] * 6, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=asked) as response:
        next(response.iter_lines())
    until(lambda: server.scheduler.idle, "the answers have ended")
    (slot,) = server.models.slots.values()
    until(lambda: slot.served.users == 0, "nobody holds the model")


def test_an_error_within_one_ends_the_request(server, monkeypatch):
    """It is told once, in the form of a stream's errors or as a status, and nothing goes on."""
    read = Answer._read

    def failing(self, events):
        if self.ask.prompt == "boom":
            return [], Failed(DeviceError("the device is gone"), State.VERIFY)
        return read(self, events)

    monkeypatch.setattr(Answer, "_read", failing)
    asked = {"prompt": ["x = 1\n", "boom"], "max_tokens": 2000, "ignore_eos": True}
    assert server.post("/v1/completions", **asked).status_code == 500
    *events, last = streamed(server.post("/v1/completions", **asked, stream=True))
    assert last["error"]["message"] == "the device is gone" and not any("error" in event for event in events)
    until(lambda: server.scheduler.idle, "nothing goes on")


def test_company_of_such_requests_changes_no_token(server):
    asked = {"max_tokens": 30, "temperature": 0}
    expected = [alone(server, prompt=prompt, **asked)[0] for prompt in PROMPTS]
    begin = threading.Barrier(3)

    def ask(_):
        begin.wait()
        return [c["text"] for c in server.post("/v1/completions", prompt=PROMPTS, **asked).json()["choices"]]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, range(3))) == [expected] * 3
