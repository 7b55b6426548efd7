#!/usr/bin/env python3
"""Writes a tiny qwen35 GGUF that says what a script holds: the model in the box cannot call tools by itself.

Its blocks add nothing, so a token follows from the one before alone, as in an oracle model. The chat template
ends in a control token that says which text of the script is due: that of the last user's message that spells
"SAY NAME", and of its texts the one after as many answers of tools as have come since. All else is real:
templates, tokens, engine, sampling, server. It speaks Qwen's dialect, or has the control tokens and the template of
Gemma 4. In Qwen's it may see: a tiny random tower fits it, whose rows change nothing of what it says.

    python tests/support/scripted_model.py script.json model.gguf     # {"NAME": ["text", "text after an answer"]}
    python tests/support/scripted_model.py script.json model.gguf gemma
    python tests/support/scripted_model.py script.json model.gguf qwen mmproj.gguf
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import gguf
import numpy as np
import templates
import tiny
import tiny_vision

from luce.bench.oracle_tokenizer import CONTROL
from luce.convert.qwen35_layout import Config, add_keys
from luce.data import BOX
from luce.files.bpe import BYTE_SYMBOLS
from luce.native import File
from luce.text.dialects import GEMMA, QWEN, THINKS, Dialect

NORMAL, MARK = int(gguf.TokenType.NORMAL), gguf.TokenType.CONTROL
# The last token ends a text, and Gemma's last but one ends one that calls.
ENDS = {
    QWEN.name: dict.fromkeys(CONTROL, MARK),
    GEMMA.name: dict.fromkeys(("<bos>", "<|turn>", "<|tool>", "<tool|>", THINKS), MARK)
    | dict.fromkeys((*(each for each in GEMMA.guarded if each != "<|tool_response>"), "<|tool_response>"),
                    gguf.TokenType.USER_DEFINED)
    | {"<turn|>": MARK},
}  # fmt: skip
N_EMBD = 256
DEFAULT = "default"  # It is said where nobody names a text, or no tools are declared for its call.

TEMPLATE = """
{%- macro call(c) %}{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for key, value in c.function.arguments|items %}{{ '<parameter=' + key + '>\\n' }}
{{- value if value is string else value|tojson }}{{ '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endmacro %}
{%- set thinks = enable_thinking is defined and enable_thinking %}{#- The script says whether it thinks. #}
{%- set at = namespace(name=DEFAULT, n=0) %}
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool|tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('late system message') }}{%- endif %}
{%- if m.role == 'user' %}{%- for name, calls in SCRIPT %}
{%- if ('SAY ' + name) in m.content and (tools or not calls) %}
{%- set at.name = name %}{%- set at.n = 0 %}{%- endif %}
{%- endfor %}{%- endif %}
{%- if m.role == 'tool' %}{%- set at.n = at.n + 1 %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- m.content }}{%- for c in m.tool_calls or [] %}{{ '\\n\\n' + call(c) }}{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- for name, n in LENGTHS %}{%- if name == at.name %}
{{- '<|say:' + name + ':' + (([at.n, n - 1]|min)|string) + '|>' }}{%- endif %}{%- endfor %}{%- endif %}
"""
CHOICE = """
{%- set at = namespace(name=DEFAULT, n=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- for name, calls in SCRIPT %}
{%- if ('SAY ' + name) in m.content and (tools or not calls) %}
{%- set at.name = name %}{%- set at.n = 0 %}{%- endif %}
{%- endfor %}{%- endif %}
{%- if m.role == 'tool' %}{%- set at.n = at.n + 1 %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{%- for name, n in LENGTHS %}{%- if name == at.name %}
{{- '<|say:' + name + ':' + (([at.n, n - 1]|min)|string) + '|>' }}{%- endif %}{%- endfor %}{%- endif %}
"""


def pieces(text: str, used: set[str]) -> list[str]:
    """Cuts the text into pieces of a few letters, of which no file has one twice."""
    found: list[str] = []
    at = 0
    while at < len(text):
        end = at + 3
        while end < len(text) and text[at:end] in used:
            end += 1
        piece = text[at:end]
        while piece in used:  # At the end of the text, the piece goes together with what comes before.
            piece = found.pop() + piece
        used.add(piece)
        found.append(piece)
        at = end
    return found


def spelled(text: str) -> str:
    """Spells a text in the byte alphabet, as vocabularies have it."""
    return "".join(BYTE_SYMBOLS[byte] for byte in text.encode())


def write(
    path: Path,
    script: Mapping[str, Sequence[str]],
    n_ctx: int = 131072,
    dialect: Dialect = QWEN,
    tower: Path | None = None,
) -> Path:
    """Writes the model of a script, whose texts are of a dialect, and a tower for it where one is asked for."""
    script = {DEFAULT: ["Fine."], **script}
    with File(BOX) as box:  # Its words keep prompts short.
        kinds, listed = box.kv["tokenizer.ggml.token_type"], box.kv["tokenizer.ggml.tokens"]
        tokens = [token for token, kind in zip(listed, kinds, strict=True) if kind == NORMAL]
        merges = list(box.kv["tokenizer.ggml.merges"])
    byte = {symbol: value for value, symbol in enumerate(BYTE_SYMBOLS)}
    used = {bytes(byte[letter] for letter in token).decode("utf-8", "replace") for token in tokens}
    first: dict[str, int] = {}
    # Each has a token and the one after it, which is -1 at the end of the text.
    follows: list[tuple[int, int]] = []
    for name, texts in script.items():
        for n, text in enumerate(texts):
            said = [spelled(piece) for piece in pieces(text, used)]
            ids = range(len(tokens), len(tokens) + len(said))
            tokens += said
            first[f"<|say:{name}:{n}|>"] = ids[0]
            follows += [*zip(ids, ids[1:], strict=False), (ids[-1], -2 if GEMMA.call[0] in text else -1)]
    if len(set(tokens)) < len(tokens):
        raise ValueError("a piece is spelled like another token")
    n_normal = len(tokens)
    follows += [(n_normal + at, token) for at, token in enumerate(first.values())]
    ends = ENDS[dialect.name]
    if tower is not None:
        ends = dict.fromkeys(tiny_vision.MARKS, MARK) | ends
        sees = replace(tiny_vision.TINY, n_out=N_EMBD)
        tiny_vision.write(tower, sees, tiny_vision.layout(sees, tiny_vision.weights(sees, 5)))
    tokens += [*first, *ends]
    types = [gguf.TokenType.NORMAL] * n_normal + [MARK] * len(first) + list(ends.values())
    config = Config(n_layer=4, n_embd=N_EMBD, n_ff=64, n_vocab=len(tokens), n_ctx=n_ctx)
    _write(path, config, (tokens, types, merges), _tensors(config, follows), _template(script, dialect))
    return path


def _tensors(config: Config, follows: Sequence[tuple[int, int]]) -> dict[str, np.ndarray]:
    """Returns random blocks that add nothing; the head's row of a token is the embedding of those that it
    follows. The row of one that follows many, as the text's end does, may come near to any embedding: the
    first seed is taken with which the script is what is said."""
    before, after = np.array(follows).T
    for seed in count(1):
        tensors = tiny.layout(config, seed=seed)
        embedding = np.sign(tensors["token_embd.weight"]).astype(np.float32)
        head = np.zeros_like(embedding)
        np.add.at(head, after, embedding[before])
        if np.array_equal(np.argmax(embedding[before] @ head.T, axis=1), after % len(head)):
            break
    for name, tensor in tensors.items():
        if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
            tensor[:] = 0
    tensors["token_embd.weight"], tensors["output.weight"] = embedding, head
    tensors["output_norm.weight"][:] = 1
    return tensors


def _template(script: Mapping[str, Sequence[str]], dialect: Dialect) -> str:
    calls = [[name, any(dialect.call[0] in text for text in texts)] for name, texts in script.items()]
    lengths = [[name, len(texts)] for name, texts in script.items()]
    known = {"SCRIPT": json.dumps(calls), "LENGTHS": json.dumps(lengths), "DEFAULT": json.dumps(DEFAULT)}
    text = TEMPLATE.strip() if dialect is QWEN else templates.gemma4() + CHOICE.strip()
    for name, value in known.items():
        text = text.replace(name, value)
    return text


def _write(
    path: Path,
    config: Config,
    words: tuple[list[str], list[gguf.TokenType], list[str]],
    tensors: tiny.Weights,
    template: str,
) -> None:
    tokens, types, merges = words
    w = gguf.GGUFWriter(path, config.arch)
    add_keys(w, config, f"scripted-{path.stem}", file_type=0)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_eos_token_id(len(tokens) - 1)
    if "<bos>" in tokens:
        w.add_bos_token_id(tokens.index("<bos>"))
        w.add_eot_token_id(len(tokens) - 2)
    w.add_add_bos_token(False)
    w.add_chat_template(template)
    for name, tensor in tensors.items():
        w.add_tensor(name, tensor)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    spoken = {each.name: each for each in (QWEN, GEMMA)}
    said, path, dialect, *tower = sys.argv[1:] if sys.argv[3:] else (*sys.argv[1:], QWEN.name)
    texts, sight = json.loads(Path(said).read_text()), Path(*tower) if tower else None
    write(Path(path), texts, dialect=spoken[dialect], tower=sight)
