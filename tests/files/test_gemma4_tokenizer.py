"""Turns text into ids as Gemma 4's tokenizer.json does, and ids into text that streams."""

import json
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from luce.bench.oracle_tokenizer import GEMMA4_MARKS, GEMMA4_MERGES, GEMMA4_SHOWN, gemma4_vocabulary
from luce.errors import FileError
from luce.files import gemma4_vocabulary as particular
from luce.files.tokenizer import Detokenizer, Tokenizer
from luce.text.dialects import GEMMA
from luce.text.gemma import GemmaParser
from luce.text.pieces import Call, Reasoning

N_VOCAB = 384
TOKENS, TYPES = gemma4_vocabulary(N_VOCAB)
BOS, TURN_END, EOS, ANSWER = (TOKENS.index(mark) for mark in ("<bos>", "<turn|>", "<eos>", "<|tool_response>"))


def metadata(**changed):
    keys = {
        "model": "gemma4",
        "tokens": TOKENS,
        "token_type": np.array([int(kind) for kind in TYPES], np.int32).data,
        "merges": [f"{a} {b}" for a, b in GEMMA4_MERGES],
        "bos_token_id": BOS,
        "eos_token_id": TURN_END,
    } | changed
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def published(special):
    """Builds the tokenizer as tokenizer.json describes Gemma's, with the marks that are `special` as added tokens."""
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    space = {"String": "▁"}
    model = {
        "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(TOKENS)}, "merges": [list(pair) for pair in GEMMA4_MERGES],
    }  # fmt: skip
    decoders = [{"type": "Replace", "pattern": space, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    added = [
        {"id": i, "content": GEMMA4_MARKS[i], "special": True, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for i in special
    ]  # fmt: skip
    return tokenizers.Tokenizer.from_str(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, "pre_tokenizer": split,
        "decoder": {"type": "Sequence", "decoders": decoders}, "model": model,
    }))  # fmt: skip


MADE = Tokenizer(metadata())
ALL, SHOWN = published(GEMMA4_MARKS), published(GEMMA4_SHOWN)
PIECES = ["▁", " ", "  ", "\n", "\n\n", "the", "the ", "ing", "def f (", "é", "e\u0301", "日本", "🚀", "\0", "\x7f",
          "<0x41>", "<unk>", "\r\n", *GEMMA4_MARKS.values()]  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=30), st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=12).map("".join)
)


@given(text=TEXTS)
def test_ids_are_those_of_the_published_tokenizer(text):
    assert MADE.encode(text) == ALL.encode(text, add_special_tokens=False).ids


@given(text=TEXTS)
def test_marks_that_are_control_tokens_are_text_where_they_are_not_special(text):
    """Others are user-defined tokens, which any text has."""
    assert MADE.encode(text, special=False) == SHOWN.encode(text, add_special_tokens=False).ids


@given(text=TEXTS)
def test_decode_undoes_encode_but_for_the_mark_of_a_space(text):
    ids = MADE.encode(text)
    assert MADE.decode(ids, special=True) == text.replace("▁", " ")
    assert MADE.decode(ids, special=True) == ALL.decode(ids, skip_special_tokens=False)


@given(text=TEXTS)
def test_streamed_text_adds_up_and_never_shows_half_a_character(text):
    stream, shown, whole = Detokenizer(MADE), "", text.replace("▁", " ")
    for token in MADE.encode(text, special=False):
        shown += stream.push(token)
        assert whole.startswith(shown)
    assert shown == whole and stream.flush() == ""


@given(ids=st.lists(st.integers(0, N_VOCAB - 1), max_size=30))
def test_any_ids_stream_as_they_decode(ids):
    stream = Detokenizer(MADE)
    assert "".join([*map(stream.push, ids), stream.flush()]) == MADE.decode(ids)


def test_bytes_of_a_character_are_shown_once_they_are_whole():
    stream = Detokenizer(MADE)
    rocket = [TOKENS.index(f"<0x{byte:02X}>") for byte in "🚀".encode()]
    assert [stream.push(token) for token in rocket] == ["", "", "", "🚀"]
    assert stream.push(rocket[0]) == "" and stream.push(TOKENS.index("a")) == "\ufffda"
    assert stream.push(rocket[0]) == "" and stream.flush() == "\ufffd"


def test_user_defined_marks_have_text_and_control_tokens_have_none():
    for i, mark in GEMMA4_MARKS.items():
        assert MADE.decode([i]) == (mark if i in GEMMA4_SHOWN else "")
        assert MADE.decode([i], special=True) == mark


CALLING = '<|channel>thought\nhm\n<channel|><|tool_call>call:look{at:<|"|>sea<|"|>}<tool_call|>'


def all_control():
    """Returns metadata in which all of the marks are control tokens, as some files have it."""
    kinds = [3 if token in GEMMA4_MARKS.values() else int(kind) for token, kind in zip(TOKENS, TYPES, strict=True)]
    return metadata(token_type=np.array(kinds, np.int32).data)


def test_a_call_is_read_where_its_marks_are_control_tokens():
    made = Tokenizer(all_control())
    ids = made.encode(CALLING)
    assert {TOKENS.index(mark) for mark in GEMMA.guarded if mark in CALLING} <= set(ids)
    stream, parser = Detokenizer(made), GemmaParser({"look": {"type": "object"}})
    pieces = [piece for token in ids for piece in parser.push(stream.push(token))] + list(parser.flush())
    assert [each for each in pieces if isinstance(each, Call)] == [Call("look", '{"at": "sea"}')]
    assert "".join(each.text for each in pieces if isinstance(each, Reasoning)).strip() == "hm"


@given(text=TEXTS)
def test_files_that_call_all_marks_control_tokens_read_and_write_as_others_do(text):
    assert CONTROLLED.encode(text, special=False) == MADE.encode(text, special=False)
    assert CONTROLLED.encode(text) == MADE.encode(text)
    assert CONTROLLED.decode(MADE.encode(text)) == MADE.decode(MADE.encode(text))


CONTROLLED = Tokenizer(all_control())


def test_marks_of_turns_stay_control_tokens():
    assert CONTROLLED.control == MADE.control and "<|turn>" in MADE.control and "<|tool_call>" not in MADE.control
    assert CONTROLLED.eos_ids == {1, 106, 50}


# ---- what begins and ends a text


@pytest.mark.parametrize("keys", [{}, {"add_bos_token": False}, {"bos_token_id": None}, {"bos_token_id": EOS}])
def test_bos_is_the_first_token_once(keys):
    made = Tokenizer(metadata(**keys))
    (a,) = made.encode("a")
    assert made.bos_id == BOS and made.add_bos
    assert made.encode("a", add_bos=True) == [BOS, a]
    assert made.encode("<bos>a", add_bos=True) == [BOS, a]
    assert made.encode("", add_bos=True) == [BOS]
    assert made.encode("a<bos>", add_bos=True) == [BOS, a, BOS]
    spelled = made.encode("<bos>a", add_bos=True, special=False)
    assert spelled[0] == BOS and BOS not in spelled[1:]


@pytest.mark.parametrize("keys", [{}, {"eos_token_id": EOS}, {"eos_token_id": None}])
def test_all_three_ends_are_known_whatever_the_file_says(keys):
    assert Tokenizer(metadata(**keys)).eos_ids == {1, 106, 50} == {EOS, TURN_END, ANSWER}


def with_tokens(changes, **types):
    """Returns metadata with other tokens: by id, what takes its place."""
    tokens, kinds = list(TOKENS), [int(kind) for kind in TYPES]
    for i, token in changes.items():
        tokens[i] = token
    for i, kind in types.items():
        kinds[int(i[1:])] = kind
    return metadata(tokens=tokens, token_type=np.array(kinds, np.int32).data, eos_token_id=None, bos_token_id=None)


def test_ends_are_found_by_their_text():
    moved = with_tokens({106: "<turn>", 53: "<turn|>"}, _53=3)
    assert Tokenizer(moved).eos_ids == {1, 53, 50}


def test_ends_that_are_spelled_otherwise_are_found_by_their_ids():
    assert Tokenizer(with_tokens({106: "<end_of_turn>", 2: "<s>"})).eos_ids == {1, 106, 50}
    assert Tokenizer(with_tokens({2: "<s>"})).bos_id == 2


def test_plain_tokens_end_no_text():
    assert Tokenizer(with_tokens({}, _50=1, _1=1)).eos_ids == {106}
    assert Tokenizer(with_tokens({50: "x1", 106: "x2"}, _50=1, _106=1)).eos_ids == {1}


# ---- keys


@pytest.mark.parametrize(
    ("merge", "pair"), [("a b", ("a", "b")), ("  b", (" ", "b")), ("\n \n", ("\n", "\n")), ("▁ ▁▁", ("▁", "▁▁")),
                        ("a  ", ("a", " ")), ("ab", ("ab", ""))]
)  # fmt: skip
def test_a_merge_is_split_at_its_first_space_behind_a_character(merge, pair):
    assert particular.pairs([merge]) == [pair]


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_a_missing_key_is_named(key):
    with pytest.raises(FileError, match=f"tokenizer.ggml.{key} is missing"):
        Tokenizer(metadata(**{key: None}))


@pytest.mark.parametrize(("key", "value", "message"), [
    ("merges", ["ab cd"], "merges"), ("merges", ["nospace"], "merges"), ("merges", [""], "merges"),
    ("tokens", ["[gone]" if token == "<0x41>" else token for token in TOKENS], "byte 0x41"),
    ("bos_token_id", N_VOCAB, "bos_token_id"), ("eos_token_id", -1, "eos_token_id"),
])  # fmt: skip
def test_a_malformed_key_is_named(key, value, message):
    with pytest.raises(FileError, match=message):
        Tokenizer(metadata(**{key: value}))


def test_no_pre_tokenizer_is_asked_for():
    assert Tokenizer(metadata(pre="anything")).encode("the ing") == MADE.encode("the ing")


# ---- long texts

WHOLE, CUT = Tokenizer(metadata()), Tokenizer(metadata())
WHOLE._piece = None
CUT._piece = re.compile(CUT._piece.pattern.replace("4096", "1"), re.S)


@given(lines=st.lists(st.sampled_from([*PIECES, "a\n", "\na", "x"])))
def test_a_long_text_has_the_same_tokens_in_pieces(lines):
    text = "".join(lines)
    assert "".join(CUT._pieces(text)) == text
    assert CUT.encode(text) == WHOLE.encode(text)


def test_a_text_is_not_cut_where_a_token_spans_the_end_of_a_line():
    assert Tokenizer(with_tokens({N_VOCAB - 1: "a\n"}))._piece is None
    assert len(list(Tokenizer(metadata())._pieces(("x" * 50_000 + "\n") * 4))) > 2


def test_of_a_long_text_only_the_beginning_is_encoded():
    assert 1000 < len(MADE.encode(("x" * 100 + "\n") * 10_000, most=1000)) < 100_000
