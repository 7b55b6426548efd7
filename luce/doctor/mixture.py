"""The small model as a mixture of experts that computes the same: its known answers hold for a mixture's kernels too.

The routed experts are copies of the first hidden units of the dense FFN, and the weights of those that are used add up
to 1. The shared expert has the other units, and down weights twice as large: its gate is sigmoid(0), a half. Which
experts are chosen makes no difference, so that no check of it can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

from luce.bench.oracle_tokenizer import add_tokenizer
from luce.convert.gguf_output import Planned, tensor_bytes, write
from luce.convert.qwen35_layout import ARCH, Config, add_keys, tensor_shapes
from luce.data import BOX
from luce.native import File

N_EXPERT, N_USED, N_FF = 8, 3, 128


def write_mixture(path: Path, threads: int) -> None:
    """Writes it with F32 weights."""
    with File(BOX) as file:
        dense = {tensor.name: values(file, index) for index, tensor in enumerate(file.tensors)}
        config = config_of(file, dense)
        writer = gguf.GGUFWriter(None, config.arch)
        add_keys(writer, config, "the small model as a mixture", 0)
        add_tokenizer(writer, config.n_vocab)
        plan = [planned(name, tensor_of(config, dense, name)) for name in tensor_shapes(config)]
        write(path, writer, plan, {each.name: "F32" for each in plan}, file.library, threads=threads)


def values(file: File, index: int) -> np.ndarray:
    """Returns a tensor as F32, in numpy's order."""
    tensor = file.tensors[index]
    rows = tensor_bytes(file, index).reshape(int(np.prod(tensor.shape[1:])), -1)
    return dequantize(rows, gguf.GGMLQuantizationType(tensor.type)).reshape(tensor.shape[::-1])


def config_of(file: File, dense: dict[str, np.ndarray]) -> Config:
    """Returns the mixture's hyperparameters: the file's, and experts."""
    of: dict[str, Any] = {key.removeprefix(f"{ARCH}."): file.kv[key] for key in file.kv if key.startswith(f"{ARCH}.")}
    n_vocab, n_embd = dense["token_embd.weight"].shape
    return Config(
        n_layer=of["block_count"] - of["nextn_predict_layers"], n_embd=n_embd, n_head=of["attention.head_count"],
        n_head_kv=of["attention.head_count_kv"], head_dim=of["attention.key_length"],
        rope_dim=of["rope.dimension_count"], n_k_head=of["ssm.group_count"], n_v_head=of["ssm.time_step_rank"],
        state_size=of["ssm.state_size"], conv_kernel=of["ssm.conv_kernel"], n_vocab=n_vocab,
        rope_base=of["rope.freq_base"], eps=of["attention.layer_norm_rms_epsilon"], tied="output.weight" not in dense,
        interval=of["full_attention_interval"], n_ctx=of["context_length"], n_nextn=of["nextn_predict_layers"],
        rope_sections=tuple(of["rope.dimension_sections"]), n_expert=N_EXPERT, n_expert_used=N_USED, n_ff_expert=N_FF,
        n_ff_shared=of["feed_forward_length"] - N_FF,
    )  # fmt: skip


def tensor_of(config: Config, dense: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Returns a tensor of the mixture: of its FFN made of the dense one's, else the same."""
    if name in dense:
        return dense[name]
    block, _, what = name.partition(".ffn_")
    gate, up, down = (dense[f"{block}.ffn_{each}.weight"] for each in ("gate", "up", "down"))  # (FF, E), .., (E, FF)

    def copies(part: np.ndarray) -> np.ndarray:
        return np.broadcast_to(part, (N_EXPERT, *part.shape))

    return {
        "gate_inp.weight": np.random.default_rng(len(name)).standard_normal((N_EXPERT, config.n_embd)),
        "gate_exps.weight": copies(gate[:N_FF]), "up_exps.weight": copies(up[:N_FF]),
        "down_exps.weight": copies(down[:, :N_FF]),
        "gate_inp_shexp.weight": np.zeros(config.n_embd),
        "gate_shexp.weight": gate[N_FF:], "up_shexp.weight": up[N_FF:], "down_shexp.weight": 2 * down[:, N_FF:],
    }[what].astype(np.float32)  # fmt: skip


def planned(name: str, array: np.ndarray) -> Planned:
    flat = array.reshape(-1, array.shape[-1])
    return Planned(name, array.shape, (name,), lambda: iter([flat]))
