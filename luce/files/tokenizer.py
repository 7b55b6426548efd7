"""Turns text into token ids and back: a GGUF's BPE (byte-level, or Gemma 4's), streaming text, and stop strings."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from luce.errors import ArgumentError, FileError, UnsupportedError
from luce.files import gemma4_vocabulary
from luce.files.bpe import BYTE_SYMBOLS, SPLITS
from luce.files.known_pieces import KnownPieces
from luce.files.probe import fact, whole_numbers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # They are values of tokenizer.ggml.token_type.
_ADDED = (_CONTROL, _USER_DEFINED)  # They are matched in the text before it is cut into words.
_ENDS = ("<|im_end|>", "<|endoftext|>")  # These control tokens end a text whatever the keys say.


_BYTES = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}
_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}  # Text can contain these bytes.
NFC_SHRINKS = 3  # NFC makes a text at most so many times shorter: three jamo are one syllable.
# A text may be cut there: no word spans the end of a line that is followed by what is no blank, or goes on
# with a blank after a letter.
_PIECE = re.compile(r".{4096,}?(?:\n(?=[!-~])|(?<=[A-Za-z])(?= [A-Za-z]))", re.S)


class Tokenizer:
    """This is a tokenizer that is built from a file's metadata. UnsupportedError names a tokenizer that luce
    lacks, and FileError a key that is missing or malformed.

    `n_vocab` is the number of ids. `eos_ids` end a text. `bos_id` is put before a text where `add_bos` is
    set, as it always is of Gemma 4. `control` gives the control tokens' ids by their spelling. `longest` is the
    number of bytes of the token that has most.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        kind = fact(metadata, "tokenizer.ggml.model", str)
        self._spells = kind == "gemma4"  # Tokens are spelled in characters, not in symbols of bytes.
        pre = "" if self._spells else fact(metadata, "tokenizer.ggml.pre", str)
        if not self._spells and (kind != "gpt2" or pre not in SPLITS):
            raise UnsupportedError(f"tokenizer {kind}/{pre}: luce has gemma4, and gpt2 with {', '.join(SPLITS)}")
        # Python's collector looks through large lists each time, which takes 20 ms beside a text's steps. It
        # leaves such tuples out.
        self._tokens: tuple[str, ...] = tuple(fact(metadata, "tokenizer.ggml.tokens", list))
        types = _token_types(metadata, len(self._tokens))
        if self._spells:  # A control token has no text, and calls would be lost without a word.
            said = {i for i, token in enumerate(self._tokens) if token in gemma4_vocabulary.SAID}
            types = [_USER_DEFINED if i in said and kind == _CONTROL else kind for i, kind in enumerate(types)]
        self._types = tuple(types)
        self._bytes = dict[int, bytes]()  # These tokens were printed before.
        self._known = KnownPieces()
        self.n_vocab = len(self._tokens)
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        byte_tokens = {f"<0x{byte:02X}>": byte for byte in range(256)} if self._spells else _BYTES
        lacking = [byte for token, byte in byte_tokens.items() if token not in vocabulary and byte in _UTF8_BYTES]
        if lacking:
            raise FileError(f"tokenizer.ggml.tokens has no token for byte 0x{lacking[0]:02x}")
        merges = fact(metadata, "tokenizer.ggml.merges", list)
        if self._spells:
            self._bpe = gemma4_vocabulary.build(vocabulary, merges)
        else:
            self._bpe = _build(vocabulary, merges, SPLITS[pre])
        self._bpe.add_tokens(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token, kind in zip(self._tokens, self._types, strict=True)
                if token and kind in _ADDED
            ]
        )
        self.control = {
            token: index
            for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if token and kind == _CONTROL
        }
        # Where a thread changed it, others would read control tokens out of text, or miss them.
        self._bpe.encode_special_tokens = True
        longest_first = sorted(self.control, key=len, reverse=True)
        self._spelled = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self.longest = max(len(token.encode()) for token in self._tokens)
        spelled = [token for token, kind in zip(self._tokens, self._types, strict=True) if kind in _ADDED]
        if self._spells:
            self._piece = None if any("\n" in token for token in spelled) else gemma4_vocabulary.piece(self._tokens)
        else:
            self._piece = None if any(blank in token for token in spelled for blank in "\n ") else _PIECE
        self.bos_id = self._token_id(metadata, "bos")
        self.add_bos = fact(metadata, "tokenizer.ggml.add_bos_token", bool, False)
        if self._spells:  # Without it such a model's text is worthless, whatever the keys say.
            named = self._marked(vocabulary, *gemma4_vocabulary.BOS)
            self.bos_id, self.add_bos = named if named is not None else self.bos_id, True
        self.add_bos = self.add_bos and self.bos_id is not None
        self.eos_ids = self._ends(metadata, vocabulary)

    def _token_id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token: int | None = fact(metadata, key, int, None)
        if token is not None and not 0 <= token < self.n_vocab:
            raise FileError(f"key {key}: {token} is not one of {self.n_vocab} tokens")
        return token

    def _marked(self, vocabulary: Mapping[str, int], spelled: str, usual: int) -> int | None:
        """Returns the id of one of Gemma 4's marks: the token that is spelled so, else a control token at its usual
        id."""
        token = vocabulary.get(spelled)
        if token is not None:
            return token if self._types[token] in _ADDED else None
        return usual if usual < self.n_vocab and self._types[usual] == _CONTROL else None

    def _ends(self, metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> frozenset[int]:
        keyed = (self._token_id(metadata, name) for name in ("eos", "eot", "eom"))
        ends = {token for token in keyed if token is not None}
        if self._spells:
            marked = (self._marked(vocabulary, *mark) for mark in gemma4_vocabulary.ENDS.items())
            return frozenset(ends | {token for token in marked if token is not None})
        named = (vocabulary[token] for token in _ENDS if token in vocabulary)
        return frozenset(ends | {token for token in named if self._types[token] == _CONTROL})

    def text_of(self, token: int) -> str:
        """Returns the vocabulary's own spelling of an id: "<|im_end|>", "Ġthe"."""
        return str(self._tokens[self._checked(token)])

    @property
    def added_ids(self) -> list[int]:
        """Returns the ids of control and user-defined tokens, which no text is cut into."""
        return [index for index, kind in enumerate(self._types) if kind in _ADDED]

    def added(self, spelled: str) -> int | None:
        """Returns the id of a control or user-defined token, or None where there is none spelled so."""
        token = self._bpe.token_to_id(spelled)
        return token if token is not None and self._types[token] in _ADDED else None

    def encode(
        self, text: str, *, special: bool = True, add_bos: bool = False, most: int | None = None
    ) -> list[int]:
        """Returns the ids of text, of NFC(text) where the tokenizer is byte-level. Control tokens that are spelled out
        in it are taken as such if `special`. `add_bos` begins with bos_id where the file asks for it, and the text
        does not begin so itself. Of a text of many more tokens than `most`, only the first are returned, which are
        more than `most`. Raises ArgumentError where the text is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError("the text is not valid UTF-8") from error
        ids = list[int]()
        parts = self._spelled.split(text) if special else [text]
        for piece in chain.from_iterable(map(self._pieces, parts)):
            if special and piece in self.control:
                ids.append(self.control[piece])
            else:
                ids += self._ids_of(piece)
            if most is not None and len(ids) > most:
                break  # The next piece is not even looked for.
        if add_bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _ids_of(self, piece: str) -> list[int]:
        if (known := self._known.get(piece)) is not None:
            return known
        # A batch, even of one, lets other threads of Python's run meanwhile.
        ids: list[int] = self._bpe.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        self._known.put(piece, ids)
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        """Yields `text` in pieces that have its tokens."""
        at = 0
        while self._piece and (match := self._piece.match(text, at)):
            yield match.group()
            at = match.end()
        if at < len(text) or not at:
            yield text[at:]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Returns the text of ids; control tokens have none unless `special`. Bytes that are not UTF-8
        become U+FFFD. Raises ArgumentError for an id that is not in the vocabulary."""
        return b"".join(self.bytes_of(token, special=special) for token in ids).decode("utf-8", "replace")

    def bytes_of(self, token: int, *, special: bool = False) -> bytes:
        """Returns the bytes that one id adds to the text."""
        if (known := self._bytes.get(token)) is not None:
            return known
        spelled, kind = self._tokens[self._checked(token)], self._types[token]
        if self._spells and kind in (_NORMAL, _USER_DEFINED, _BYTE):
            self._bytes[token] = found = gemma4_vocabulary.bytes_of(spelled)
            return found
        if kind == _NORMAL:
            try:
                found = bytes(_BYTES[char] for char in spelled)
            except KeyError:
                # It is not spelled in the byte alphabet, so its own UTF-8 counts, as in the tokenizers
                # package.
                found = bytes(spelled.encode())
            self._bytes[token] = found
            return found
        printed = kind == _USER_DEFINED or (special and kind in (_CONTROL, _UNKNOWN))
        return spelled.encode() if printed else b""

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise ArgumentError(f"token {token} is not one of {self.n_vocab}")
        return token


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Says where the tokenizers of two files differ, in what decides which ids a text has; None where they do not."""
    for name in ("model", "pre", "tokens", "token_type", "merges"):
        key = f"tokenizer.ggml.{name}"
        a, b = ours.get(key), theirs.get(key)
        if a == b:
            continue
        if isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                return f"key {key} has {len(b)} entries, and {len(a)} in the model's file"
            at = next(at for at, (one, other) in enumerate(zip(a, b, strict=True)) if one != other)
            return f"entry {at} of key {key} is {b[at]!r:.40}, and {a[at]!r:.40} in the model's file"
        return f"key {key} is {b!r:.40}, and {a!r:.40} in the model's file"
    return None


def _token_types(metadata: Mapping[str, Any], count: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    types: list[int] = whole_numbers(metadata, key, [_NORMAL] * count)
    if len(types) != count:
        raise FileError(f"key {key}: {len(types)} types for {count} tokens")
    return types


def _build(vocabulary: dict[str, int], merges: Sequence[str], split: str) -> tokenizers.Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        bpe = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:  # The tokenizers package raises bare Exceptions.
        raise FileError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


class Detokenizer:
    """Takes ids and returns text, never half a character: what push() and flush() return adds up to
    decode(). Invalid bytes become U+FFFD once nothing can complete them."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.bytes_of(token))

    def flush(self) -> str:
        """Returns what is left of an incomplete character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Takes text and returns it up to the stop string that is completed first. Text that may be the
    beginning of one is held back, so the result does not depend on how the text is cut into pieces."""

    def __init__(self, stops: Sequence[str]):
        if not all(stops):
            raise ArgumentError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that may be shown, and whether a stop string was met. Nothing may follow a stop.
        """
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = undecided(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Returns the text held back, which turned out not to be a stop."""
        held, self._held = self._held, ""
        return held


def undecided(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the text's end that may be the beginning of a mark, which the text does not hold."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    ends = ((n, text[-n:]) for n in range(longest, 0, -1))
    return next((n for n, end in ends if any(mark.startswith(end) for mark in marks)), 0)
