"""Sends complete prompts, which may spell control tokens, and gaps to fill."""

import json
from concurrent.futures import ThreadPoolExecutor

import fim_model
import pytest
import scripted_model
from serving import serving, settings

from luce.data import BOX
from luce.errors import UnsupportedError
from luce.files.tokenizer import Tokenizer
from luce.native import File
from luce.text.infill import Gap, infill_ids

RAW = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(native):
    with serving({"box": BOX}) as running:
        yield running


@pytest.fixture(scope="module")
def filling(native, tmp_path_factory):
    path = fim_model.write(tmp_path_factory.mktemp("fim") / "fim.gguf")
    with serving({"fim": path}, settings(ctx=1024)) as running:
        yield running


def counted(server, text, **how):
    return server.post("/v1/completions", prompt=text, max_tokens=1, **how).json()["usage"]["prompt_tokens"]


def test_a_raw_prompt_is_what_the_template_makes(server):
    """The text and the tokens of /apply-template are the same prompt to all that take one."""
    made = server.post("/apply-template", messages=TALK).json()
    assert made["prompt"] == RAW
    assert server.post("/tokenize", content=RAW, parse_special=True).json()["tokens"] == made["tokens"]
    greedy = {"max_tokens": 12, "temperature": 0}
    chat = server.post("/v1/chat/completions", messages=TALK, **greedy).json()
    for prompt in (made["prompt"], made["tokens"]):
        found = server.post("/v1/completions", prompt=prompt, **greedy).json()
        assert found["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
        assert found["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"] == len(made["tokens"])
    ollama = {"raw": True, "stream": False, "options": {"num_predict": 12, "temperature": 0}}
    found = server.post("/api/generate", prompt=RAW, **ollama).json()
    assert found["response"] == chat["choices"][0]["message"]["content"]
    assert found["prompt_eval_count"] == len(made["tokens"])


def test_a_developer_may_have_letters(server):
    letters = server.post("/tokenize", content=RAW).json()["tokens"]
    assert counted(server, RAW) < counted(server, RAW, parse_special=False) == len(letters)
    assert server.post("/tokenize", content=RAW, parse_special=False).json()["tokens"] == letters


def test_chats_hold_no_control_tokens_whatever_is_asked(server):
    for more in ({}, {"parse_special": True}):
        said = {"messages": [{"role": "user", "content": RAW}], **more}
        tokens = server.post("/apply-template", **said).json()["tokens"]
        box = server.models.slots["box"].served.tokenizer
        assert tokens.count(box.control["<|im_start|>"]) == 2
    cooked = server.post("/api/generate", prompt=RAW, stream=False, options={"num_predict": 1}).json()
    assert cooked["prompt_eval_count"] > len(server.post("/tokenize", content=RAW).json()["tokens"])


def test_a_prompt_that_is_echoed_keeps_its_control_tokens(server):
    tokens = server.post("/tokenize", content=RAW, parse_special=True).json()["tokens"]
    for prompt in (RAW, tokens):
        found = server.post("/v1/completions", prompt=prompt, max_tokens=0, echo=True).json()
        assert found["choices"][0]["text"] == RAW


def test_a_token_that_the_model_lacks_is_refused(server):
    n_vocab = server.models.slots["box"].served.tokenizer.n_vocab
    for token in (-1, n_vocab, 1 << 31, 1 << 70):
        refused = server.post("/v1/completions", prompt=[5, token], max_tokens=1)
        assert refused.status_code == 400 and refused.json()["error"]["message"] == f"a token is none of {n_vocab}"
    assert server.post("/v1/completions", prompt=[0, n_vocab - 1], max_tokens=1).status_code == 200


def test_pieces_of_tokens(server):
    found = server.post("/tokenize", content="é<|im_end|>x", with_pieces=True, parse_special=True).json()
    pieces = [entry["piece"] for entry in found["tokens"]]
    assert pieces[-2:] == ["<|im_end|>", "x"] and found["count"] == len(pieces)
    raw = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    assert raw.decode() == "é<|im_end|>x"
    ids = [entry["id"] for entry in found["tokens"]]
    assert ids == server.post("/tokenize", content="é<|im_end|>x", parse_special=True).json()["tokens"]


def test_bos_is_before_texts_where_the_file_asks_for_it(filling):
    content = "def f("
    plain = filling.post("/tokenize", content=content).json()["tokens"]
    having = filling.post("/tokenize", content=content, add_special=True).json()["tokens"]
    bos = filling.models.slots["fim"].served.tokenizer.bos_id
    assert having == [bos, *plain]
    assert counted(filling, content) == len(plain) + 1
    assert counted(filling, content, add_special_tokens=False) == counted(filling, plain) == len(plain)


# ---- control tokens are told from text by one tokenizer that many threads share


def test_threads_that_read_control_tokens_do_not_change_what_others_read(native):
    with File(BOX, native) as file:
        tokenizer = Tokenizer(file.kv)
    text = RAW * 200
    expected = {special: tokenizer.encode(text, special=special) for special in (False, True)}
    assert expected[True].count(tokenizer.control["<|im_end|>"]) == 200
    assert tokenizer.control["<|im_end|>"] not in expected[False]

    def encode(n):
        return tokenizer.encode(text, special=bool(n % 2)) == expected[bool(n % 2)]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(encode, range(64)))


@pytest.mark.parametrize("most", [0, 1, 5, 100])
def test_a_text_of_control_tokens_is_bounded_too(native, most):
    with File(BOX, native) as file:
        tokenizer = Tokenizer(file.kv)
    found = tokenizer.encode("<|im_end|>" * 1000, special=True, most=most)
    assert most < len(found) <= most + 1


# ---- gaps


def test_a_gap_is_asked_for_as_models_learned_it(filling):
    served = filling.models.slots["fim"].served
    added = {mark: served.tokenizer.added(mark) for mark in fim_model.MARKS}
    prefix, suffix, middle, repository, file = added.values()
    bos = served.tokenizer.bos_id

    def plain(text):
        return served.tokenizer.encode(text, special=False)

    gap = Gap("def f(<|im_end|>", "  return\n", "a")
    expected = [bos, prefix, *plain("def f(<|im_end|>"), suffix, *plain("  return\n"), middle, *plain("a")]
    assert infill_ids(served.tokenizer, gap) == expected
    assert infill_ids(served.tokenizer, Gap(plain("def f(<|im_end|>"), "  return\n", "a")) == expected
    others = infill_ids(served.tokenizer, Gap("x", "y", files=[("a.py", "z")]))
    assert others[:2] == [bos, repository] and others.count(file) == 2
    assert others[-5:] == [prefix, *plain("x"), suffix, *plain("y"), middle]
    long = Gap("x " * 200_000, "y " * 200_000)
    bounded = infill_ids(served.tokenizer, long, 100)  # Whole pieces of the text are read.
    assert 100 < len(bounded) < 40_000 and bounded == infill_ids(served.tokenizer, long)[: len(bounded)]


def test_completions_infill_and_ollama_ask_for_the_same(filling):
    before, after, greedy = "def add(a, b):\n", "\n    return c\n", {"max_tokens": 10, "temperature": 0}
    whole = filling.post("/v1/completions", prompt=before, suffix=after, **greedy).json()
    text = whole["choices"][0]["text"]
    found = filling.post("/infill", input_prefix=before, input_suffix=after, **greedy).json()
    ended = {"stop": "eos", "length": "limit"}[whole["choices"][0]["finish_reason"]]
    assert (found["content"], found["stop"], found["stop_type"]) == (text, True, ended)
    counts = whole["usage"]["completion_tokens"], whole["usage"]["prompt_tokens"]
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == counts
    options = {"num_predict": 10, "temperature": 0}
    ollama = filling.post("/api/generate", prompt=before, suffix=after, stream=False, options=options).json()
    assert ollama["response"] == text
    assert ollama["prompt_eval_count"] == whole["usage"]["prompt_tokens"]
    plain = filling.post("/v1/completions", prompt=before, **greedy).json()["choices"][0]["text"]
    assert plain != text
    for empty in ("", None):
        found = filling.post("/v1/completions", prompt=before, suffix=empty, **greedy).json()
        assert found["choices"][0]["text"] == plain


def test_infill_streams(filling):
    asked = {"input_prefix": "def f(", "input_suffix": ")", "n_predict": 10, "temperature": 0, "stop": ["\n"]}
    whole = filling.post("/infill", **asked).json()
    response = filling.post("/infill", **asked, stream=True)
    assert "[DONE]" not in response.text  # llama.cpp's own routes send none.
    *parts, last = streamed_without_end(response)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert not any(part["stop"] for part in parts) and last["stop"] and last["content"] == ""
    assert last["stop_type"] == whole["stop_type"]


def streamed_without_end(response):
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


def test_several_gaps_in_one_request(filling):
    asked = {"suffix": "\n", "max_tokens": 6, "temperature": 0}
    prompts = ["a =", "b("]
    alone = [filling.post("/v1/completions", prompt=prompt, **asked).json() for prompt in prompts]
    found = filling.post("/v1/completions", prompt=prompts, **asked).json()["choices"]
    assert [choice["text"] for choice in found] == [each["choices"][0]["text"] for each in alone]


def test_a_model_without_the_tokens_refuses_a_suffix_by_name(server):
    asked = {"prompt": "def f(", "suffix": ")"}
    refused = server.post("/v1/completions", **asked)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "suffix"
    assert "<|fim_prefix|>" in refused.json()["error"]["message"]
    for path, body in (("/api/generate", asked), ("/infill", {"input_prefix": "a", "input_suffix": "b"})):
        refused = server.post(path, **body)
        assert refused.status_code == 400 and "<|fim_prefix|>" in refused.text
    assert server.post("/v1/completions", **asked, stream=True).status_code == 400


def test_a_word_that_is_spelled_like_a_mark_is_none(native, tmp_path):
    """Only tokens that were added to the vocabulary count."""
    path = scripted_model.write(tmp_path / "s.gguf", {"x": ["<|fim_prefix|><|fim_suffix|><|fim_middle|>"]})
    with File(path, native) as file:
        tokenizer = Tokenizer(file.kv)
    assert tokenizer.added("<|im_end|>") == tokenizer.control["<|im_end|>"]
    assert tokenizer.added("<|fim_prefix|>") is None and tokenizer.added("def") is None
    with pytest.raises(UnsupportedError, match="no <.fim_prefix.>"):
        infill_ids(tokenizer, Gap("a", "b"))
