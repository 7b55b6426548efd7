"""Turns text into ids as llama.cpp does, and ids into text that streams."""

import gc
import importlib.util
import re
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import fake_core
import numpy as np
import pytest
from checkout import ROOT
from fake_core import EOS, N_VOCAB
from hypothesis import given
from hypothesis import strategies as st

from luce.data import BOX
from luce.errors import ArgumentError, FileError, UnsupportedError
from luce.files.bpe import SPLITS
from luce.files.known_pieces import KnownPieces
from luce.files.tokenizer import _PIECE, Detokenizer, StopStrings, Tokenizer
from luce.native import File

SEPARATOR = "\n__ggml_vocab_test__\n"
BYTES = fake_core.tokenizer()
METADATA = fake_core.metadata()


def fetched():
    """Gives the folder with llama.cpp's vocabulary and its expected ids, fetched with ggml where missing."""
    spec = importlib.util.spec_from_file_location("fetch_ggml", ROOT / "tools" / "fetch_ggml.py")
    fetch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch)
    return fetch.ensure(fetch.default_cache(), archive=None, peer=False).parent / "vocab"


@pytest.fixture(scope="module")
def vocab():
    return fetched()


@pytest.fixture(scope="module")
def qwen(native, vocab):
    with File(vocab / "ggml-vocab-qwen35.gguf", native) as file:
        yield Tokenizer(file.kv)


@pytest.fixture(scope="module")
def cases(vocab):
    """Returns (text, llama.cpp's ids); newlines are part of the texts."""
    texts = (vocab / "ggml-vocab-qwen35.gguf.inp").read_bytes().decode().split(SEPARATOR)
    ids = (vocab / "ggml-vocab-qwen35.gguf.out").read_text().split("\n")
    assert len(texts) == 51 and len(ids) in (51, 52)
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, ids, strict=False)]


def test_ids_are_those_of_llama_cpp(native, vocab, cases):
    """llama.cpp does not normalise: without NFC all 51 are the same."""
    with File(vocab / "ggml-vocab-qwen35.gguf", native) as file:
        plain = Tokenizer(file.kv)
    plain._bpe.normalizer = None
    assert [plain.encode(text, special=False) for text, _ in cases] == [ids for _, ids in cases]


def test_normalised_text_has_the_ids_of_llama_cpp(qwen, cases):
    normalised = [(text, ids) for text, ids in cases if unicodedata.is_normalized("NFC", text)]
    assert len(normalised) == 48
    for text, ids in normalised:
        assert qwen.encode(text, special=False) == ids


def test_the_vocabulary_is_left_out_of_collections():
    """A collection would else take a while beside the steps of a text."""
    made = fake_core.tokenizer()
    gc.collect()
    tracked = {name for name, part in vars(made).items() if gc.is_tracked(part) and hasattr(part, "__len__")}
    assert not {name for name in tracked if len(getattr(made, name)) >= N_VOCAB}


def test_text_is_normalised_first(qwen, cases):
    for text, _ in cases:
        composed = unicodedata.normalize("NFC", text)
        assert qwen.encode(text) == qwen.encode(composed)
        assert qwen.decode(qwen.encode(text)) == composed


@given(text=st.text(max_size=50))
def test_decode_undoes_encode(qwen, text):
    assert qwen.decode(qwen.encode(text, special=False)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(("pre", "merged"), [("qwen2", False), ("qwen35", True)])
def test_marks_belong_to_words_in_qwen35_only(pre, merged):
    """A merge of q with the first byte of U+0302 applies only where both are in one word."""
    tokens = list(METADATA["tokenizer.ggml.tokens"])
    joined = tokens[ord("q")] + tokens[0xCC]
    tokens[N_VOCAB - 4] = joined
    merges = [f"{tokens[ord('q')]} {tokens[0xCC]}"]
    changed = {"tokens": tokens, "merges": merges, "pre": pre}
    made = Tokenizer(METADATA | {f"tokenizer.ggml.{key}": value for key, value in changed.items()})
    ids = [N_VOCAB - 4, 0x82] if merged else [ord("q"), 0xCC, 0x82]
    assert made.encode("q\u0302") == ids


def test_special_tokens_are_parsed_unless_told_otherwise(qwen):
    (end,) = qwen.encode("<|im_end|>")
    assert qwen.text_of(end) == "<|im_end|>"
    spelled = qwen.encode("<|im_end|>", special=False)
    assert len(spelled) > 1 and end not in spelled
    assert qwen.decode(spelled) == "<|im_end|>"
    assert qwen.encode("a<|im_end|>b") == [*qwen.encode("a"), end, *qwen.encode("b")]


def test_control_tokens_have_text_only_when_asked(qwen):
    ids = qwen.encode("a<|im_end|>b")
    assert qwen.decode(ids) == "ab"
    assert qwen.decode(ids, special=True) == "a<|im_end|>b"


def test_both_ends_of_text_are_known(qwen):
    assert {qwen.text_of(token) for token in qwen.eos_ids} == {"<|im_end|>", "<|endoftext|>"}


def without(key):
    return {name: value for name, value in METADATA.items() if name != key}


@pytest.mark.parametrize("key", ["model", "pre", "tokens", "merges"])
def test_a_missing_key_is_named(key):
    with pytest.raises(FileError, match=f"tokenizer.ggml.{key} is missing"):
        Tokenizer(without(f"tokenizer.ggml.{key}"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "llama", "llama/qwen35"),
        ("pre", "deepseek-llm", "gpt2/deepseek-llm"),
    ],
)
def test_another_tokenizer_is_named(key, value, message):
    with pytest.raises(UnsupportedError, match=message):
        Tokenizer(METADATA | {f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", 3, "array of strings"),
        ("merges", ["ab cd"], "merges"),
        ("merges", ["nospace"], "merges"),
        ("token_type", np.ones(3, np.int32).data, f"3 types for {N_VOCAB}"),
        ("token_type", "x", "array of numbers"),
        ("token_type", np.full(N_VOCAB, np.nan, np.float32).data, "array of whole numbers"),
        ("eos_token_id", N_VOCAB, "eos_token_id"),
        ("eos_token_id", -1, "eos_token_id"),
        ("eos_token_id", "x", "eos_token_id"),
        ("bos_token_id", N_VOCAB, "bos_token_id"),
        ("tokens", ["a", "b"], "byte 0x|types"),
    ],
)
def test_a_malformed_key_is_named(key, value, message):
    with pytest.raises(FileError, match=message):
        Tokenizer(METADATA | {f"tokenizer.ggml.{key}": value})


def test_a_missing_byte_is_named():
    tokens = list(METADATA["tokenizer.ggml.tokens"])
    tokens[0x41] = "[removed]"
    with pytest.raises(FileError, match="byte 0x41"):
        Tokenizer(METADATA | {"tokenizer.ggml.tokens": tokens})


def test_the_first_token_is_bos_where_the_file_asks_for_it():
    asked = METADATA | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 382}
    assert Tokenizer(asked).encode("Z", add_bos=True) == [382, 0x5A]
    assert Tokenizer(asked).encode("Z") == [0x5A]
    assert BYTES.encode("Z", add_bos=True) == [0x5A]
    assert Tokenizer(asked).encode("", add_bos=True) == [382]


PIECES_OF_LINES = ["x", "a b", " the", " ", "  ", "\n", "\r\n", "!", "1", "\u0338", "<|im_end|>", "é", "'s"]


@pytest.mark.parametrize("pre", SPLITS)
def test_a_long_text_has_the_same_tokens_in_pieces(native, pre):
    """It is cut where no word spans the cut, and never elsewhere."""
    with File(BOX, native) as file:
        metadata = dict(file.kv) | {"tokenizer.ggml.pre": pre}
    whole, cut = Tokenizer(metadata), Tokenizer(metadata)
    whole._piece = None
    cut._piece = re.compile(_PIECE.pattern.replace("4096", "1"), re.S)

    @given(lines=st.lists(st.sampled_from(PIECES_OF_LINES)))
    def same(lines):
        text = "".join(lines)
        assert "".join(cut._pieces(text)) == text
        assert cut.encode(text) == whole.encode(text)

    same()
    assert len(list(cut._pieces("a the b\nc"))) == 4


def test_of_a_long_text_only_the_beginning_is_encoded():
    text = ("x" * 100 + "\n") * 10_000
    assert 1000 < len(BYTES.encode(text, most=1000)) < 100_000
    assert BYTES.encode(text[:500], most=1000) == BYTES.encode(text[:500])


@pytest.mark.long
def test_others_go_on_while_a_text_is_encoded():
    """A call that kept the interpreter to itself would leave this thread a few turns before it begins."""
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(BYTES.encode, "1," * 1_000_000)
        while not encoding.done():
            time.sleep(0)  # It lets the other thread have a turn.
            turns += 1
    assert len(encoding.result()) == 2_000_000 and turns > 1000


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(ArgumentError, match="UTF-8"):
        BYTES.encode("\ud800")


@pytest.mark.parametrize("token", [-1, N_VOCAB])
def test_an_id_that_is_not_in_the_vocabulary_is_refused(token):
    with pytest.raises(ArgumentError, match=str(N_VOCAB)):
        BYTES.decode([token])


TOKENS = st.lists(st.one_of(st.integers(0, 255), st.integers(0, N_VOCAB - 1)), max_size=40)
TEXT = st.text(max_size=12).map(lambda text: list(text.encode()))


@given(parts=st.lists(st.one_of(TOKENS, TEXT), max_size=4))
def test_streamed_text_adds_up_to_decode(parts):
    ids = [token for part in parts for token in part]
    stream = Detokenizer(BYTES)
    pieces = [stream.push(token) for token in ids] + [stream.flush()]
    assert "".join(pieces) == BYTES.decode(ids)


@given(text=st.text())
def test_streamed_text_never_shows_half_a_character(text):
    stream, shown = Detokenizer(BYTES), ""
    for byte in text.encode():
        shown += stream.push(byte)
        assert text.startswith(shown)
    assert shown == text and stream.flush() == ""


def test_invalid_bytes_are_replaced_once_nothing_can_complete_them():
    stream = Detokenizer(BYTES)
    assert [stream.push(byte) for byte in b"\xe2\x82A"] == ["", "", "\ufffdA"]
    assert [stream.push(byte) for byte in b"\xf0\x9f"] == ["", ""]
    assert stream.flush() == "\ufffd"


def test_an_end_of_text_has_no_text():
    assert Detokenizer(BYTES).push(EOS) == ""


PIECES = st.lists(st.text("ab#", max_size=4), max_size=8)
STOPS = st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3)


def stopped(pieces, stops):
    stream, shown = StopStrings(stops), ""
    for piece in pieces:
        text, met = stream.push(piece)
        shown += text
        if met:
            return shown, True
    return shown + stream.flush(), False


@given(pieces=PIECES, stops=STOPS)
def test_nothing_of_a_stop_is_shown(pieces, stops):
    shown, met = stopped(pieces, stops)
    whole = "".join(pieces)
    assert whole.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert met == any(stop in whole for stop in stops)
    if met:
        assert any(whole.startswith(stop, len(shown)) for stop in stops)
    else:
        assert shown == whole


@given(pieces=PIECES, stops=STOPS)
def test_how_text_is_cut_does_not_matter(pieces, stops):
    assert stopped(pieces, stops) == stopped(list("".join(pieces)), stops)


@given(pieces=PIECES, stops=STOPS)
def test_text_is_held_back_only_where_it_may_become_a_stop(pieces, stops):
    stream, shown, seen = StopStrings(stops), "", ""
    for piece in pieces:
        text, met = stream.push(piece)
        shown, seen = shown + text, seen + piece
        if met:
            break
        held = seen[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_an_empty_stop_is_refused():
    with pytest.raises(ArgumentError, match="empty"):
        StopStrings(["a", ""])


class Counted:
    """The tokenizers package's tokenizer, which counts the letters that it is given."""

    def __init__(self, bpe):
        self.bpe, self.letters = bpe, 0

    def encode_batch_fast(self, texts, **how):
        self.letters += sum(map(len, texts))
        return self.bpe.encode_batch_fast(texts, **how)

    def __getattr__(self, name):
        return getattr(self.bpe, name)


def test_what_was_tokenized_is_not_tokenized_again(native):
    """A text that grows costs what is new of it, and the end of what was there."""
    with File(BOX, native) as file:
        tokenizer, other = Tokenizer(file.kv), Tokenizer(file.kv)
    tokenizer._bpe = counted = Counted(tokenizer._bpe)
    text = "".join(f"line {n} of words, as long as others are\n" for n in range(2000))
    first = tokenizer.encode(text)
    assert counted.letters == len(text) and first == other.encode(text)
    grown = text + "and what is new\n"
    found = tokenizer.encode(grown)
    assert counted.letters <= len(text) + 4200 and found == other.encode(grown)
    found.append(-1)
    assert tokenizer.encode(grown) == found[:-1], "who was given ids may change them"


def test_what_is_remembered_of_texts_is_bounded():
    known = KnownPieces(1000)
    for n in range(20):
        known.put(f"{n:100}", [n] * 3)
        known.put(f"{n:100}", [n] * 3)
        assert known.get(" " * 99 + "0") == [0, 0, 0], "it was asked for a moment ago"
    there = [n for n in range(20) if known.get(f"{n:100}") == [n] * 3]
    assert there == [0, *range(11, 20)]
    known.put("x" * 1001, [1])
    assert known.get("x" * 1001) is None
