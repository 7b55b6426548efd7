"""Makes the tokenizer and token streams: byte-level BPE with qwen35's pre-tokenizer, ChatML, documents to
ids."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from box.corpus import Document
from luce.files.bpe import SPLITS

N_VOCAB = 4096
END, START_TURN, END_TURN, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL = [END, START_TURN, END_TURN, MASK]  # They are the last ids, in this order.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASKS = (
    "Write a Python function `{signature}`. {told}",
    "Write a function that does this: {told}",
    "Implement `{signature}`: {told}",
    "{told}",
)
SYSTEMS = ("You are a helpful assistant.", "You write Python.")
# Single functions are this share of the training text, and so are functions as ChatML turns.
EXTRA_SHARE = 0.03
# Of the training text's tokens of punctuation and newlines, this share is written as two tokens.
SPLIT_SHARE = 0.2
ENCODE_BATCH = 2048  # So many texts are encoded at once.
SAMPLE_BYTES = 48_000_000  # The tokenizer is trained on so many bytes of text.


def new_tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """Returns a byte-level BPE of these tokens and merges, as yet without the control tokens."""
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS["qwen35"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_special_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = new_tokenizer({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = N_VOCAB - len(SPECIAL) - tokenizer.get_vocab_size()
    if missing > 0:  # A toy corpus has too few: with fillers, the special ids stay where they are.
        tokenizer.add_tokens([f"<|unused{i}|>" for i in range(missing)])
    add_special_tokens(tokenizer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))


def special_id(name: str) -> int:
    return N_VOCAB - len(SPECIAL) + SPECIAL.index(name)


def sample_texts(documents: list[Document], limit: int = SAMPLE_BYTES) -> list[str]:
    """Returns documents by their hash, which is as good as chance, up to `limit` bytes."""
    texts, size = [], 0
    for document in sorted(documents, key=lambda d: d.digest):
        texts.append(document.text)
        size += len(document.text)
        if size > limit:
            break
    return texts


def chat_pieces(name: str, told: str, code: str, rng: random.Random) -> list[str]:
    """Returns a ChatML conversation as text between control tokens, which alternate: start, text, end, text
    ..."""
    signature = name if len(name) < 100 else name.partition("(")[0]
    told = told if told.endswith((".", ":", "?")) else told + "."
    turns = [("user", rng.choice(ASKS).format(signature=signature, told=told))]
    turns.append(("assistant", f"```python\n{code}\n```"))
    if rng.random() < 0.3:
        turns.insert(0, ("system", rng.choice(SYSTEMS)))
    pieces = []
    for role, text in turns:
        pieces += [f"{role}\n{text}", "\n"]
    return pieces


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Returns ids; control tokens that are spelled out in a text are text."""
    tokenizer.encode_special_tokens = True
    ids: list[list[int]] = []
    for at in range(0, len(texts), ENCODE_BATCH):  # Encodings are large while they live.
        batch = tokenizer.encode_batch_fast(texts[at : at + ENCODE_BATCH], add_special_tokens=False)
        ids += [encoding.ids for encoding in batch]
    return ids


def line_ends(tokenizer: Tokenizer) -> dict[int, list[int]]:
    r"""Returns tokens like "):\n", and the same text as two or more: "):" and the newlines."""
    ends = {}
    for token in range(tokenizer.get_vocab_size() - len(SPECIAL)):
        text = tokenizer.decode([token])
        head = text.rstrip("\r\n")
        if head.strip() and head != text:
            parts = _encode(tokenizer, [head, text[len(head) :]])
            ends[token] = [*parts[0], *parts[1]]
    return ends


def split_line_ends(ids: np.ndarray, ends: dict[int, list[int]], rng: np.random.Generator) -> np.ndarray:
    """Returns the ids with SPLIT_SHARE of `ends` as their parts. A prompt may stop before a newline, and
    there its last token is one that otherwise no newline ever follows."""
    chosen = np.flatnonzero(np.isin(ids, list(ends)) & (rng.random(len(ids)) < SPLIT_SHARE))
    parts = [ends[int(ids[at])] for at in chosen]
    counts = np.ones(len(ids), np.int64)
    counts[chosen] = [len(part) for part in parts]
    out = np.repeat(ids, counts)
    first = np.cumsum(counts) - counts
    for at, part in zip(chosen, parts, strict=True):
        out[first[at] : first[at] + len(part)] = part
    return out


def encode_documents(
    tokenizer: Tokenizer, documents: list[Document], seed: int, extras: bool = True
) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Encodes all documents in a shuffled order, each ended by <|endoftext|>. Returns ids (n,) int16, where
    documents start (m,) int64, and counts. With extras, single functions and conversations are mixed in, and
    line ends are split."""
    rng = random.Random(seed)
    end = special_id(END)
    plain = _encode(tokenizer, [d.text for d in documents])
    streams = [np.array([*ids, end], np.int16) for ids in plain]
    counts = {"file_tokens": sum(map(len, streams)), "function_tokens": 0, "chat_tokens": 0}
    if extras:
        budget = int(counts["file_tokens"] * EXTRA_SHARE)
        functions = [f for d in documents for f in d.functions]
        for kind in ("function", "chat"):
            rng.shuffle(functions)
            made: list[list[int]] = []
            pieces = [
                [code + "\n"] if kind == "function" else chat_pieces(name, told, code, rng)
                for name, told, code in functions[: budget // 40 + 1]
            ]
            flat = iter(_encode(tokenizer, [text for parts in pieces for text in parts]))
            for parts in pieces:
                ids: list[int] = []
                for i, _ in enumerate(parts):
                    mark = [START_TURN, END_TURN][i % 2]
                    ids += ([special_id(mark)] if kind == "chat" else []) + next(flat)
                made.append([*ids, end])
            total = 0
            for ids in made:
                if total > budget:
                    break
                total += len(ids)
                streams.append(np.array(ids, np.int16))
            counts[f"{kind}_tokens"] = total
        ends, numbers = line_ends(tokenizer), np.random.default_rng(seed)
        streams = [split_line_ends(ids, ends, numbers) for ids in streams]
    rng.shuffle(streams)
    starts = np.cumsum([0, *(len(s) for s in streams)])[:-1]
    return np.concatenate(streams), starts.astype(np.int64), counts


def tokenizer_config() -> dict[str, object]:
    """Returns tokenizer_config.json as transformers and the converter read it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "add_prefix_space": False,
        "eos_token": END_TURN, "pad_token": END, "mask_token": MASK, "model_max_length": 2048,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip


def save_tokens(folder: Path, name: str, ids: np.ndarray, starts: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{name}.npy", ids)
    np.save(folder / f"{name}-starts.npy", starts)


def load_tokens(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    return np.load(folder / f"{name}.npy"), np.load(folder / f"{name}-starts.npy")


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
