"""Stage weights takes the files of luce/data as checkpoints: trunk, NextN head, DFlash drafter and tokenizer.

It is for going on without the training's own state, and the inverse of `luce convert`: Q8_0 is dequantised, what the
converter computes and reorders is undone. Tensors are F32, so that an export of them is the same file again.
"""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from box import tokens
from box.dflash import Drafter
from box.model import Config
from box.store import Store, say
from luce.convert import hf_dflash, hf_qwen35

Arrays = dict[str, np.ndarray]


def read(path: Path) -> Arrays:
    """Returns the tensors of a GGUF, F32, with numpy's order of dimensions."""
    reader = gguf.GGUFReader(path)
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(shapes[t.name]) for t in reader.tensors}


def _grouped(c: Config, x: np.ndarray, axis: int, width: int) -> np.ndarray:
    """Reorders v heads of `width` entries each along `axis`, from tiled (r, Hk) to grouped by k head (Hk, r)."""
    tiled = (*x.shape[:axis], c.n_v_head // c.n_k_head, c.n_k_head, width, *x.shape[axis + 1 :])
    return x.reshape(tiled).swapaxes(axis, axis + 1).reshape(x.shape)


def _restored(c: Config, local: str, x: np.ndarray) -> np.ndarray:
    """Returns a trunk's tensor as transformers has it."""
    s = c.state_size
    if local in ("attn_qkv.weight", "ssm_conv1d.weight"):  # Its rows are those of q, k and v.
        q_and_k = 2 * c.n_k_head * s
        x = np.concatenate([x[:q_and_k], _grouped(c, x[q_and_k:], 0, s)])
    elif local == "attn_gate.weight":
        x = _grouped(c, x, 0, s)
    elif local in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias", "ssm_a"):
        x = _grouped(c, x, 0, 1)
    elif local == "ssm_out.weight":
        x = _grouped(c, x, 1, s)
    if local == "ssm_a":
        return np.log(-x)
    if local == "ssm_conv1d.weight":
        return x[:, None]
    return x - np.float32(1) if local.endswith("norm.weight") and local != "ssm_norm.weight" else x


def trunk_and_head(c: Config, file: Arrays) -> tuple[Arrays, Arrays]:
    """Returns the state dicts of Trunk and NextN."""
    trunk: Arrays = {}
    head: Arrays = {}
    for name, x in file.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match is None:
            trunk["model." + hf_qwen35.TOP[name]] = _restored(c, name, x)
            continue
        block, local = int(match[1]), match[2]
        if local in hf_qwen35.NEXTN:  # Only here "norm" may end a name without "_norm": enorm, hnorm.
            head[hf_qwen35.NEXTN[local].removeprefix("mtp.")] = _restored(c, local, x)
        elif block == c.n_layer:
            head["layers.0." + hf_qwen35.BLOCK[local]] = _restored(c, local, x)
        else:
            trunk[f"model.layers.{block}.{hf_qwen35.BLOCK[local]}"] = _restored(c, local, x)
    return trunk, head


def drafter(file: Arrays) -> Arrays:
    """Returns the state dict of a DFlash drafter."""
    return {hf_dflash.source_name(name): x for name, x in file.items()}


def write(store: Store, c: Config, data: Path) -> None:
    """Writes the state of box.gguf and box-dflash.gguf in the folder `data`. A tokenizer that is there stays, since
    a corpus may be made of it."""
    trunk, head = trunk_and_head(c, read(data / "box.gguf"))
    made = {"trunk": trunk, "nextn": head, Drafter.kind: drafter(read(data / "box-dflash.gguf"))}
    for name, arrays in made.items():
        tensors = {key: torch.from_numpy(np.array(x, np.float32)) for key, x in arrays.items()}
        save_file(tensors, store.state / f"{name}.safetensors", metadata={"format": "pt"})
    path = store.state / "tokenizer.json"
    if not path.exists():
        tokenizer(data / "box.gguf").save(str(path))
    say(f"took {', '.join(made)} and the tokenizer of {data}")


def tokenizer(path: Path) -> tokens.Tokenizer:
    """Returns the tokenizer of box.gguf."""
    fields = gguf.GGUFReader(path).fields
    words = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    n = tokens.N_VOCAB - len(tokens.SPECIAL)
    if words[n:] != tokens.SPECIAL:
        raise ValueError(f"{path}: its last tokens are {words[n:]}, not {tokens.SPECIAL}")
    made = tokens.new_tokenizer({word: i for i, word in enumerate(words[:n])}, merges)
    tokens.add_special_tokens(made)
    return made
