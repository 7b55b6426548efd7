"""Reads prompts for the log-probabilities of their tokens and for their vectors: compared with the numpy
reference, which goldens hold to transformers, and beside generations, whose tokens they do not change."""

import base64
import json
import re

import drive
import make_goldens
import numpy as np
import pytest
import ref
import tiny
from checkout import GOLDENS
from depth import deeper
from serving import serving, settings

from luce.data import BOX
from luce.decode import reading
from luce.decode.engine import Engine
from luce.decode.events import Embedded, Failed, Finished, Prefilled, Scored, Started, Tokens
from luce.decode.loop import Loop
from luce.decode.request import Request
from luce.errors import ArgumentError, StateError
from luce.native import Rows
from luce.native.structs import Sampling
from luce.planning.opened import Files
from luce.planning.plan import Options

CASES = ("base", "tied-s16", "experts", "pattern")
BOUND = 1e-3  # As test_goldens.py bounds the core's logits, with F32 weights and f32 KV.


@pytest.fixture(scope="module", params=CASES)
def known(request, native, tmp_path_factory):
    """Gives an engine of a small F32 model, a golden's prompt, and the reference's step over it."""
    config, seed = make_goldens.CASES[request.param]
    weights = tiny.layout(config, seed)
    path = tiny.write(tmp_path_factory.mktemp("known") / "f32.gguf", config, weights)
    prompt = [int(token) for token in np.load(GOLDENS / f"{request.param}.npz")["prompt"]]
    options = Options(ctx=512, threads=1, kv_type="f32", sequences=2, rows=5, spec="off")
    with Files(path, device="cpu") as files, Engine.open(files, options) as engine:
        yield engine, prompt, ref.Reference(config, weights).step(prompt)


def outcome(engine, request):
    *events, last = engine.generate(request)
    assert isinstance(last, Finished) and isinstance(events[0], Started), last
    assert not any(isinstance(event, Tokens) and event.ids for event in events)
    return events, last


def logprobs_of(step, prompt):
    """Returns the log-probabilities (n, V) after each token but the last, from the reference's logits."""
    shifted = step.logits - step.logits.max(-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))[: len(prompt) - 1]


def test_a_prompts_scores_are_the_references(known):
    engine, prompt, step = known
    events, last = outcome(engine, Request(tuple(prompt), 0, logprobs=3, reads="scores"))
    found = [each for event in events if isinstance(event, Scored) for each in event.logprobs]
    expected = logprobs_of(step, prompt)
    assert len(found) == len(prompt) - 1 and (last.reason, last.tokens) == ("length", ())
    for each, row, token in zip(found, expected, prompt[1:], strict=True):
        assert abs(each.logprob - row[token]) <= BOUND
        best = np.sort(row)[::-1][:3]
        assert np.abs(np.array([p for _, p in each.top]) - best).max() <= BOUND
        assert all(abs(p - row[id]) <= BOUND for id, p in each.top)


def test_a_vector_is_the_mean_of_the_references_hidden_states(known):
    engine, prompt, step = known
    events, _ = outcome(engine, Request(tuple(prompt), 0, reads="vector"))
    (vector,) = [np.array(event.vector) for event in events if isinstance(event, Embedded)]
    expected = step.hidden.mean(0)
    assert vector.shape == expected.shape and abs(np.linalg.norm(vector) - 1) < 1e-12
    assert np.abs(vector - expected / np.linalg.norm(expected)).max() <= BOUND


def test_hidden_states_are_of_the_last_verify(known):
    engine, prompt, step = known
    with engine.native.sequence() as sequence, engine.native.sequence() as other:
        both = [Rows(other, prompt[3:5]), Rows(sequence, prompt[:5], [-1, 0, 1, 2, 3])]
        engine.native.verify(both)
        found = np.array([sequence.hidden(row) for row in range(5)])
        assert np.abs(found - step.hidden[:5]).max() <= BOUND
        assert np.abs(other.hidden(0) - found[0]).max() > 0.1, "each has its own rows"
        with pytest.raises(ArgumentError, match="row 5: the last step had 5"):
            sequence.hidden(5)
        sequence.commit(range(5))
        assert np.array_equal(sequence.hidden(4), found[4])  # Until the next step.
        drive.verify(other, prompt[:1])
        with pytest.raises(StateError, match="run another step since"):
            sequence.hidden(0)
    with engine.native.sequence() as sequence:
        sequence.prefill(prompt[:4])
        with pytest.raises(StateError, match="no verify of it"):
            sequence.hidden(0)


def test_the_width_of_steps_changes_no_score(known, monkeypatch):
    engine, prompt, _ = known
    found = []
    for most in (1, 2, 5):
        monkeypatch.setattr(reading, "MAX_READ", most)
        events, _ = outcome(engine, Request(tuple(prompt), 0, logprobs=2, reads="scores"))
        steps = [event.done for event in events if isinstance(event, Prefilled)]
        assert steps == [*range(most, len(prompt), most), len(prompt)]
        found.append([each for event in events if isinstance(event, Scored) for each in event.logprobs])
    assert found[0] == found[1] == found[2]


# ---- beside generations


@pytest.fixture(scope="module", params=[*deeper("off"), "auto"])
def box(request, native):
    options = Options(ctx=512, threads=1, sequences=4, spec=request.param)
    with Files(BOX, device="cpu") as files, Engine.open(files, options) as engine:
        yield engine, files.tokenizer


def test_company_that_is_read_changes_no_token(box):
    engine, tokenizer = box
    texts = ["def add(a, b):\n", "class Stack:\n    def push("]
    ids = [tuple(tokenizer.encode(text)) for text in texts]
    asked = [Request(each, 40, Sampling(temperature=0.8, seed=3)) for each in ids]
    expected = [list(engine.generate(request))[-1].tokens for request in asked]
    text = tuple(tokenizer.encode("import os\nfor x in range(3):\n    print(x)\n" * 4))
    reads = [Request(text, 0, logprobs=1, reads="scores"), Request(text, 0, reads="vector")]
    alone = [[e for e in engine.generate(r) if isinstance(e, Scored | Embedded)] for r in reads]
    told = {at: [] for at in range(4)}
    for at, event in engine.run([asked[0], reads[0], asked[1], reads[1]]):
        told[at].append(event)
    assert [told[at][-1].tokens for at in (0, 2)] == expected
    for at, before in ((1, alone[0]), (3, alone[1])):
        found = [event for event in told[at] if isinstance(event, Scored | Embedded)]
        flat = [x for event in found for x in event[0]]
        assert flat == [x for event in before for x in event[0]]


def test_others_go_on_between_its_steps(box):
    """A long prompt is read beside a generation, in steps of a bounded number of rows."""
    engine, tokenizer = box
    loop = Loop(engine.native)
    short = Request(tuple(tokenizer.encode("def f(")), 30, ignore_eos=True)
    long = Request(tuple(tokenizer.encode("x = 1\n" * 60)), 0, reads="scores")
    one, other = engine.generation(short), engine.generation(long)
    loop.add(one)
    loop.add(other)
    order = []
    while loop.running:
        for of, event in loop.step():
            order += ["token"] * (of is one and isinstance(event, Tokens))
            order += ["read"] * (of is other and isinstance(event, Prefilled))
    assert re.search("(token,read,){3}|(read,token,){3}", ",".join(order))


def test_what_is_read_can_be_cancelled(box):
    engine, tokenizer = box
    going = [True]
    request = Request(tuple(tokenizer.encode("x = 1\n" * 60)), 0, reads="vector")
    events = []
    for event in engine.generate(request, lambda: not going[0]):
        events.append(event)
        going[0] = not isinstance(event, Prefilled)
    assert isinstance(events[-1], Finished) and events[-1].reason == "cancelled"
    assert len([event for event in events if isinstance(event, Prefilled)]) == 1
    assert not any(isinstance(event, Embedded | Failed) for event in events)
    assert engine.native.info.sequences_free == 4


# ---- over HTTP


@pytest.fixture(scope="module")
def server(native):
    with serving({"box": BOX}, settings(ctx=512)) as running:
        yield running


def test_echo_with_logprobs_scores_the_prompt(server):
    """As lm-eval's local-completions asks: tokens, and log-probabilities of all but the first of them."""
    text = "def add(a, b):\n    return"
    tokens = server.post("/tokenize", content=text).json()["tokens"]
    for prompt in (text, tokens):
        found = server.post("/v1/completions", prompt=prompt, max_tokens=0, echo=True, logprobs=2).json()
        (choice,) = found["choices"]
        told = choice["logprobs"]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert "".join(told["tokens"]) == text and len(told["tokens"]) == len(tokens)
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        for piece, at in zip(told["tokens"], told["text_offset"], strict=True):
            assert text[at : at + len(piece)] == piece
        assert all(p < 0 for p in told["token_logprobs"][1:])
        assert all(len(top) == 2 for top in told["top_logprobs"][1:])
        assert found["usage"] | {"prompt_tokens_details": 0, "completion_tokens_details": 0} == {
            "prompt_tokens": len(tokens), "completion_tokens": 0, "total_tokens": len(tokens),
            "prompt_tokens_details": 0, "completion_tokens_details": 0}  # fmt: skip
    one = server.post("/v1/completions", prompt=[tokens[0]], max_tokens=0, echo=True, logprobs=0).json()
    assert one["choices"][0]["logprobs"]["token_logprobs"] == [None]


def test_what_follows_an_echo_is_what_follows_without(server):
    asked = {"prompt": "def add(a, b):\n", "max_tokens": 8, "logprobs": 1, "temperature": 0}
    plain = server.post("/v1/completions", **asked).json()["choices"][0]
    whole = server.post("/v1/completions", **asked, echo=True).json()["choices"][0]
    assert whole["text"] == asked["prompt"] + plain["text"]
    n = len(plain["logprobs"]["tokens"])
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert whole["logprobs"][key][-n:] == plain["logprobs"][key]
    offsets = whole["logprobs"]["text_offset"]
    assert offsets[0] == 0
    assert offsets[-n:] == [at + len(asked["prompt"]) for at in plain["logprobs"]["text_offset"]]


def test_streams_echo_with_the_same_logprobs(server):
    asked = {"prompt": "def add(a, b):\n", "max_tokens": 8, "logprobs": 1, "temperature": 0, "echo": True}
    whole = server.post("/v1/completions", **asked).json()["choices"][0]
    lines = server.post("/v1/completions", **asked, stream=True).text.split("\n\n")
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for key in ("tokens", "token_logprobs", "text_offset"):
        told = [part["logprobs"][key] for part in parts if part["logprobs"]]
        assert [each for some in told for each in some] == whole["logprobs"][key]


def test_a_likely_text_scores_higher(server):
    def score(text):
        found = server.post("/v1/completions", prompt=text, max_tokens=0, echo=True, logprobs=0).json()
        return sum(found["choices"][0]["logprobs"]["token_logprobs"][1:])

    assert score("for i in range(10):\n") > score("for i in rango(10):\n")


def test_prompt_logprobs_of_a_chat_are_vllms(server):
    asked = {"messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 2, "temperature": 0}
    plain = server.post("/v1/chat/completions", **asked).json()
    found = server.post("/v1/chat/completions", **asked, prompt_logprobs=2).json()
    assert found["choices"] == plain["choices"] and "prompt_logprobs" not in plain
    tokens = server.post("/apply-template", messages=asked["messages"]).json()["tokens"]
    listed = found["prompt_logprobs"]
    assert listed[0] is None and len(listed) == len(tokens)
    for token, entry in zip(tokens[1:], listed[1:], strict=True):
        assert 2 <= len(entry) <= 3 and entry[str(token)]["logprob"] <= 0
        assert {1, 2} <= {each["rank"] for each in entry.values()}


def test_several_prompts_are_scored_in_one_request(server):
    prompts = ["import os\n", "def f(x):\n    return x\n"]
    asked = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    expected = [server.post("/v1/completions", prompt=p, **asked).json()["choices"][0] for p in prompts]
    found = server.post("/v1/completions", prompt=prompts, **asked).json()["choices"]
    assert [choice["logprobs"] for choice in found] == [choice["logprobs"] for choice in expected]


def test_a_prompt_that_is_scored_has_to_fit(server):
    refused = server.post("/v1/completions", prompt="a 1\n" * 600, max_tokens=0, echo=True, logprobs=1)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


# ---- vectors over HTTP


def test_embeddings_are_openais(server):
    found = server.post("/v1/embeddings", input="def add(a, b):", model="mine").json()
    assert (found["object"], found["model"]) == ("list", "mine")
    (entry,) = found["data"]
    assert (entry["object"], entry["index"]) == ("embedding", 0)
    assert abs(np.linalg.norm(entry["embedding"]) - 1) < 1e-9
    tokens = server.post("/tokenize", content="def add(a, b):").json()["tokens"]
    assert found["usage"] == {"prompt_tokens": len(tokens), "total_tokens": len(tokens)}
    packed = server.post("/v1/embeddings", input="def add(a, b):", encoding_format="base64").json()
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert np.abs(vector - entry["embedding"]).max() < 1e-7
    assert server.post("/v1/embeddings", input=tokens).json()["data"] == found["data"]


def test_several_texts_have_the_vectors_that_they_have_alone(server):
    texts = ["import os", "class Stack:", "x = 1", "def f(a):\n    return a\n" * 9, "y"]
    alone = [server.post("/v1/embeddings", input=text).json() for text in texts]
    found = server.post("/v1/embeddings", input=texts).json()
    assert [each["index"] for each in found["data"]] == [0, 1, 2, 3, 4]
    assert [each["embedding"] for each in found["data"]] == [each["data"][0]["embedding"] for each in alone]
    assert found["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)


def test_control_tokens_in_a_text_are_letters(server):
    tokens = server.post("/tokenize", content="<|im_end|>").json()["tokens"]
    assert len(tokens) > 1
    both = (server.post("/v1/embeddings", input=each).json()["data"] for each in (tokens, "<|im_end|>"))
    assert next(both) == next(both)


def test_texts_that_are_alike_are_near(server):
    texts = ["def add(a, b):\n    return a + b", "def plus(x, y):\n    return x + y", "# MIT License\n#"]
    found = server.post("/v1/embeddings", input=texts).json()["data"]
    add, plus, other = (np.array(each["embedding"]) for each in found)
    assert add @ plus > add @ other


def test_ollamas_routes_have_the_same_vectors(server):
    texts = ["import os", "x = 1"]
    expected = [each["embedding"] for each in server.post("/v1/embeddings", input=texts).json()["data"]]
    found = server.post("/api/embed", model="box", input=texts).json()
    assert found["embeddings"] == expected and found["model"] == "box" and found["prompt_eval_count"] > 0
    assert server.post("/api/embed", model="box", input=texts[0]).json()["embeddings"] == expected[:1]
    assert server.post("/api/embeddings", model="box", prompt=texts[1]).json() == {"embedding": expected[1]}
    for path, key, empty in (("embed", "input", ""), ("embed", "input", []), ("embeddings", "prompt", "")):
        loaded = server.post(f"/api/{path}", model="box", **{key: empty})
        assert loaded.status_code == 200 and [] in loaded.json().values()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [1 << 20]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a 1\n" * 600}, "messages"),
        ({}, "input"),
    ],
)
def test_bad_requests_for_vectors_get_one_clear_error(server, asked, param):
    refused = server.post("/v1/embeddings", **asked)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
