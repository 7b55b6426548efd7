"""Writes Hugging Face checkpoints by hand for the converters' tests (without torch or the safetensors
package), and reads what a GGUF holds."""

from __future__ import annotations

import itertools
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
import tiny_gemma4
from click.testing import CliRunner
from compare_weights import Weights

from luce.bench.oracle_tokenizer import CONTROL, GEMMA4_MARKS, GEMMA4_MERGES, MERGES, gemma4_vocabulary
from luce.cli.commands import cli
from luce.convert.gemma4_layout import Config as Gemma4
from luce.convert.qwen35_layout import Config
from luce.files.bpe import BYTE_SYMBOLS, SPLITS
from luce.native import File

N_TOKENS = 256 + len(MERGES) + len(CONTROL)
_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "uint8": "U8"}


def bf16(x: np.ndarray) -> np.ndarray:
    """Returns BF16 (rounded towards zero) as uint16, which save_file stores as BF16."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def save_file(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, x in tensors.items():
        span = [len(body), len(body) + x.nbytes]
        header[name] = {"dtype": _DTYPES[str(x.dtype)], "shape": list(x.shape), "data_offsets": span}
        body += x.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def save(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    tokenizer: bool = True,
    shards: int = 1,
) -> Path:
    """Writes a folder as save_pretrained leaves it, with tokenizer and template."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(folder / "model.safetensors", tensors)
    else:
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = dict(list(tensors.items())[i::shards])
            save_file(folder / file, part)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer:
        save_tokenizer(folder)
    return folder


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """Maps names to dequantised weights (in numpy's order of dimensions) of a GGUF, as the core reads it."""
    with File(path) as file:
        weights = Weights(file)
        rows = {name: weights.rows(name, 0, 1 << 40) for name in weights.index}
        return {name: x.reshape(weights.shape(name)) for name, x in rows.items()}


def types_of(path: Path) -> dict[str, str]:
    with File(path) as file:
        return {tensor.name: tensor.type_name for tensor in file.tensors}


def keys_of(path: Path) -> dict[str, Any]:
    with File(path) as file:
        values = dict(file.kv)
    return {key: value.tolist() if isinstance(value, memoryview) else value for key, value in values.items()}


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# These bound ||error|| / ||weights|| of a round trip of weights that are uniform in [-h, h] (RMS h /
# sqrt(3)).
ROUND_TRIP = {
    "F32": 0.0,
    "F16": 2**-11,  # It is half a unit in the last place of 11 bits.
    "BF16": 2**-8,  # It is half a unit in the last place of 8 bits.
    "Q8_0": 0.0045,  # Steps are h/127, so the error h/127/sqrt(12) is 1/254 of the RMS; and the scale is F16.
    "Q6_K": 0.018,  # Steps are h/32, so it is 1/64; and scales have 8 bits.
    "Q5_K": 0.037,  # There are 31 steps over 2h, so it is 1/31; and scales and minima have 6 bits.
    "Q4_K": 0.078,  # There are 15 steps over 2h, so it is 1/15; and scales and minima have 6 bits.
}


def save_tokenizer(folder: Path) -> None:
    """Writes an oracle's byte-level tokenizer as Hugging Face's files: N_TOKENS ids, with the control
    tokens last."""
    tokens = BYTE_SYMBOLS + [a + b for a, b in MERGES]
    special = range(len(tokens), N_TOKENS)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "special": True, "normalized": False, "single_word": False,
             "lstrip": False, "rstrip": False}
            for i, text in zip(special, CONTROL, strict=True)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLITS["qwen35"]}, "behavior": "Isolated",
                 "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [list(pair) for pair in MERGES],
        },
    }  # fmt: skip
    settings = {
        "eos_token": {"content": CONTROL[2]}, "pad_token": CONTROL[0], "bos_token": None,
        "add_bos_token": False, "chat_template": tiny.CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_qwen35(folder: Path, c: Config, seed: int = 1, **options: Any) -> Path:
    """Writes tiny.weights(c, seed) and its config."""
    return save(folder, tiny.hf_config(c), tiny.weights(c, seed), **options)


def convert_qwen35_to_gguf(folder: Path, *options: str) -> Path:
    """Writes out.gguf beside the folder."""
    out = folder.parent / "out.gguf"
    assert run(folder, out, *options) == 0
    return out


def run(*args: object) -> int:
    """Returns the exit status of `luce convert --force`, whose output is shown."""
    result = CliRunner().invoke(cli, ["convert", "--force", *map(str, args)])
    print(result.stdout, end="")
    print(result.stderr, end="", file=sys.stderr)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code


def failure(args: list[str], capsys: Any) -> str:
    """Returns the last line that a failed conversion to args[1] says; it leaves nothing behind."""
    before = sorted(Path(args[1]).parent.iterdir())
    assert run(*args) == 1
    assert sorted(Path(args[1]).parent.iterdir()) == before
    lines: list[str] = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("Error: ")
    return lines[-1]


def requantized(source, out, kind="Q4_K_M"):
    return run(source, out, "--type", kind)


GROUPED = tiny.Config(n_v_head=6, n_nextn=1)  # There are 3 v heads for each k head, so they change places.
# Every row is a multiple of 256.
WIDE = tiny.Config(
    n_embd=256, n_ff=256, head_dim=128, n_head=2, n_k_head=2, n_v_head=4, state_size=64, n_nextn=1
)


def moe(c, experts):
    """Returns (config, weights) of c with n_expert experts of width 48 and a shared one of 80, as stored
    "fused" (n, 2 FF, E), "fused.weight" or "each"."""
    n, ff, shared, e = 4, 48, 80, c.n_embd
    config = {k: v for k, v in tiny.hf_config(c).items() if k != "intermediate_size"}
    config |= {"num_experts": n, "num_experts_per_tok": 2, "moe_intermediate_size": ff,
               "shared_expert_intermediate_size": shared}  # fmt: skip
    weights = {k: v for k, v in tiny.weights(c, 1).items() if ".mlp." not in k}
    for prefix in {k.rsplit(".input_layernorm", 1)[0] for k in weights if "input_layernorm" in k}:
        rng = np.random.default_rng(len(prefix) + ord(prefix[-1]))
        draw = lambda *shape: rng.uniform(-1, 1, shape).astype(np.float32)  # noqa: B023, E731
        gate, up, down = draw(n, ff, e), draw(n, ff, e), draw(n, e, ff)
        mlp = f"{prefix}.mlp"
        weights |= {f"{mlp}.gate.weight": draw(n, e), f"{mlp}.shared_expert_gate.weight": draw(1, e)}
        weights |= {f"{mlp}.shared_expert.{p}_proj.weight": draw(shared, e) for p in ("gate", "up")}
        weights[f"{mlp}.shared_expert.down_proj.weight"] = draw(e, shared)
        if experts == "each":
            for i, (name, x) in itertools.product(range(n), {"gate": gate, "up": up, "down": down}.items()):
                weights[f"{mlp}.experts.{i}.{name}_proj.weight"] = x[i]
        else:
            end = ".weight" if experts == "fused.weight" else ""
            weights[f"{mlp}.experts.gate_up_proj{end}"] = np.concatenate([gate, up], 1)
            weights[f"{mlp}.experts.down_proj{end}"] = down
    return config, weights


def save_gemma4_tokenizer(folder: Path, n_vocab: int, ends: object = (1, 106, 50)) -> None:
    """Writes the small tokenizer of Gemma 4's kind as Hugging Face's files."""
    tokens, types = gemma4_vocabulary(n_vocab)
    unused = {i for i, kind in enumerate(types) if kind == gguf.TokenType.UNUSED}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "special": True, "normalized": False, "single_word": False,
             "lstrip": False, "rstrip": False}
            for i, text in GEMMA4_MARKS.items()
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                          "invert": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens) if i not in unused},
            "merges": [list(pair) for pair in GEMMA4_MERGES],
        },
    }  # fmt: skip
    settings = {
        "bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>", "unk_token": "<unk>",
        "mask_token": "<mask>", "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": list(GEMMA4_MARKS.values()),
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(tiny_gemma4.CHAT_TEMPLATE)
    sampling = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "do_sample": True, "eos_token_id": ends}
    (folder / "generation_config.json").write_text(json.dumps(sampling))


def save_gemma4(folder: Path, c: Gemma4, seed: int = 1, published: bool = False, **options: Any) -> Path:
    """Writes tiny_gemma4.weights(c, seed) and its config: of a text model, or as it is `published`, in which the
    language model is a part beside towers; an assistant's is in a part in any case."""
    weights, text = tiny_gemma4.weights(c, seed), tiny_gemma4.hf_config(c) | {"model_type": "gemma4_text"}
    config: dict[str, Any] = text | {"architectures": ["Gemma4ForCausalLM"]}
    if published:
        weights = {name.replace("model.", "model.language_model.", 1): x for name, x in weights.items()}
        towers = ("vision_tower.encoder.layers.0.self_attn.q_proj.linear", "embed_vision.embedding_projection",
                  "audio_tower.layers.0.feed_forward1.linear", "embed_audio.embedding_projection")  # fmt: skip
        weights |= {f"model.{tower}.weight": np.ones((4, 4), np.float32) for tower in towers}
        config = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text,
                  "vision_config": {"hidden_size": 8}, "tie_word_embeddings": c.tied}  # fmt: skip
    if c.n_embd_out:
        config = {"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"],
                  "text_config": text} | tiny_gemma4.hf_assistant_config(c)  # fmt: skip
    save(folder, config, weights, tokenizer=False, **options)
    save_gemma4_tokenizer(folder, c.n_vocab)
    return folder
