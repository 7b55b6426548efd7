"""Plans Qwen3.5/3.6/3.8 checkpoints (dense and MoE, with mtp.*) as the tensors that a GGUF holds.

The sources are transformers' Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM, and llama.cpp's qwen35 and
qwen35moe. Published checkpoints are `Qwen3_5ForConditionalGeneration`: the language model is under
`model.language_model.`, the vision tower, which is dropped, under `model.visual.`, and the MTP head under
`mtp.`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from luce.convert.gguf_output import Planned, slabs
from luce.convert.hf_config import Section, rope_parameters, rope_theta, text_config
from luce.convert.qwen35_layout import Config, tensor_shapes
from luce.convert.safetensors_reader import Checkpoint, Source, as_f32
from luce.errors import FileError, UnsupportedError

Array = np.ndarray
PARTS = ("all", "trunk", "mtp")

TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}
NEXTN = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
OPTIONAL_NEXTN = {
    "nextn.embed_tokens.weight": "mtp.embed_tokens.weight",
    "nextn.shared_head_head.weight": "mtp.lm_head.weight",
}
EXPERTS = {"ffn_gate_exps.weight": "gate_proj", "ffn_up_exps.weight": "up_proj",
           "ffn_down_exps.weight": "down_proj"}  # fmt: skip


# ---- names and hyperparameters


def plain_names(checkpoint: Checkpoint, part: str = "all") -> dict[str, str]:
    """Maps `layers.0...`, `embed_tokens...`, `lm_head...` or `mtp...` to the checkpoint's own name. The part
    "trunk" has no `mtp...`."""
    names: dict[str, str] = {}
    for name in checkpoint.names:
        plain = re.sub(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?", "", name)
        if plain.startswith("visual.") or (part == "trunk" and plain.startswith("mtp.")):
            continue
        if plain in names:
            raise FileError(f"tensors {names[plain]} and {name} are the same tensor of the model")
        names[plain] = name
    return names


def read_hparams(config: Section, names: dict[str, str]) -> Config:
    """Reads the GGUF's hyperparameters from config.json. A missing key is an error that names it."""
    text = text_config(config)
    for key, value in (("hidden_act", "silu"), ("attention_bias", False), ("attn_output_gate", True)):
        text.only(key, value)
    rope = rope_parameters(text)
    for section, key in ((rope, "rope_type"), (rope, "type")):
        section.only(key, "default")
    text.only("rope_scaling", None)
    head_dim, n_layer = text.size("head_dim"), text.size("num_hidden_layers")
    partial = rope if "partial_rotary_factor" in rope else text
    sections = tuple(rope.get("mrope_section", list, []))
    state = text.size("linear_key_head_dim")
    text.only("linear_value_head_dim", state)
    moe = "num_experts" in text
    interval, recurrent = _pattern(text, n_layer)
    return Config(
        n_layer=n_layer,
        n_embd=text.size("hidden_size"),
        n_ff=0 if moe else text.size("intermediate_size"),
        n_head=text.size("num_attention_heads"),
        n_head_kv=text.size("num_key_value_heads"),
        head_dim=head_dim,
        rope_dim=int(head_dim * partial.get("partial_rotary_factor", float)),
        n_k_head=text.size("linear_num_key_heads"),
        n_v_head=text.size("linear_num_value_heads"),
        state_size=state,
        conv_kernel=text.size("linear_conv_kernel_dim"),
        n_vocab=text.size("vocab_size"),
        rope_base=rope_theta(text),
        eps=text.get("rms_norm_eps", float),
        tied=_is_tied(config, text, names),
        interval=interval,
        recurrent=recurrent,
        n_ctx=text.size("max_position_embeddings"),
        n_nextn=_n_nextn(text, names),
        rope_sections=(*sections, *[0] * (4 - len(sections))) if sections else None,
        n_expert=text.size("num_experts") if moe else 0,
        n_expert_used=text.size("num_experts_per_tok") if moe else 0,
        n_ff_expert=text.size("moe_intermediate_size") if moe else 0,
        n_ff_shared=text.size("shared_expert_intermediate_size") if moe else 0,
    )


def _pattern(text: Section, n_layer: int) -> tuple[int, tuple[bool, ...] | None]:
    """Returns (interval, None) where every interval-th block has full attention, else 1 and for each block
    whether it is a DeltaNet."""
    if "layer_types" not in text:
        return text.size("full_attention_interval"), None
    kinds = text.strings("layer_types", n_layer)
    unknown = set(kinds) - {"linear_attention", "full_attention"}
    if unknown:
        raise UnsupportedError(f"{text.where}: key layer_types has {sorted(unknown)}")
    recurrent = tuple(kind == "linear_attention" for kind in kinds)
    for interval in range(1, n_layer + 1):
        if recurrent == tuple((i + 1) % interval != 0 for i in range(n_layer)):
            return interval, None
    return 1, recurrent


def _is_tied(config: Section, text: Section, names: dict[str, str]) -> bool:
    for section in (config, text):
        if "tie_word_embeddings" in section:
            return section.get("tie_word_embeddings", bool)
    return "lm_head.weight" not in names


def _n_nextn(text: Section, names: dict[str, str]) -> int:
    """Counts the NextN blocks that the checkpoint holds; there are 0 where the config has one that was not
    saved."""
    layers = {name.split(".")[2] for name in names if name.startswith("mtp.layers.")}
    if layers and (len(layers) > 1 or text.get("mtp_num_hidden_layers", int, 1) > 1):
        raise UnsupportedError(
            f"{text.where}: more than one MTP layer, but one mtp.fc: luce implements a single layer"
        )
    own = text.get("mtp_use_dedicated_embeddings", bool, False)
    if layers and own and "mtp.embed_tokens.weight" not in names:
        raise FileError(f"tensor mtp.embed_tokens.weight is missing: {text.where} says that there is one")
    return len(layers)


# ---- the plan


@dataclass(frozen=True)
class _Builder:
    c: Config
    checkpoint: Checkpoint
    names: dict[str, str]

    def source(self, name: str, plain: str, shape: tuple[int, ...]) -> Source:
        """Returns the checkpoint's tensor, which has to have this shape."""
        if plain not in self.names:
            raise FileError(f"tensor {plain} is missing in {self.checkpoint.path}: {name} is made from it")
        source = self.checkpoint[self.names[plain]]
        if source.shape != shape:
            raise FileError(f"tensor {source.name}: expected shape {shape} ({name}), found {source.shape}")
        return source

    def tensor(self, name: str, shape: tuple[int, ...]) -> Planned:
        """Returns the plan of one GGUF tensor. Shapes are checked now, and numbers are read later."""
        top = TOP.get(name)
        if top is not None:
            return self.one(name, top, shape, shape)
        _, block, local = name.split(".", 2)
        i = int(block)
        if local in NEXTN or local in OPTIONAL_NEXTN:
            return self.one(name, (NEXTN | OPTIONAL_NEXTN)[local], shape, shape)
        prefix = f"layers.{i}." if i < self.c.n_layer else f"mtp.layers.{i - self.c.n_layer}."
        if local in EXPERTS:
            return self.experts(name, prefix + "mlp.experts.", EXPERTS[local], shape)
        found = shape
        if local == "ssm_conv1d.weight":
            found = (shape[0], 1, shape[1])
        elif local == "ffn_gate_inp_shexp.weight":
            found = (1, *shape)
        return self.one(name, prefix + BLOCK[local], shape, found)

    def one(self, name: str, plain: str, shape: tuple[int, ...], found: tuple[int, ...]) -> Planned:
        source = self.source(name, plain, found)
        local = name.split(".", 2)[-1] if name.startswith("blk.") else name

        def rows() -> Iterator[Array]:
            stored = _reorder(self.c, local, source.read().reshape(shape))
            return slabs(stored, lambda part: _compute(local, as_f32(part)))

        return Planned(name, shape, (source.name,), rows)

    def experts(self, name: str, prefix: str, projection: str, shape: tuple[int, ...]) -> Planned:
        """Returns (n_expert, out, in), from one matrix for each expert or from all stacked, gate over up."""
        n, out, inner = shape
        fused = prefix + ("down_proj" if projection == "down_proj" else "gate_up_proj")
        fused = fused if fused in self.names else f"{fused}.weight"
        if fused in self.names:
            half = projection != "down_proj"
            source = self.source(name, fused, (n, 2 * out if half else out, inner))
            start = out if projection == "up_proj" else 0
            sources = [source]
        else:
            plain = [f"{prefix}{i}.{projection}.weight" for i in range(n)]
            start = 0
            sources = [self.source(name, each, (out, inner)) for each in plain]
        dtype = sources[0].dtype
        if any(each.dtype != dtype for each in sources):
            raise FileError(f"{name}: its experts differ in type")

        def rows() -> Iterator[Array]:
            for each in sources:
                for expert in each.read().reshape(-1, *each.shape[-2:]):
                    yield from slabs(expert[start : start + out], as_f32)

        return Planned(name, shape, tuple(each.name for each in sources), rows)


def _tile(c: Config, x: Array, axis: int, width: int) -> Array:
    """Reorders v heads of `width` entries each along `axis`, from grouped by k head (Hk, r) to tiled (r, Hk).
    """
    grouped = (*x.shape[:axis], c.n_k_head, c.n_v_head // c.n_k_head, width, *x.shape[axis + 1 :])
    return x.reshape(grouped).swapaxes(axis, axis + 1).reshape(x.shape)


def _reorder(c: Config, local: str, x: Array) -> Array:
    """Changes the order of v heads: transformers has them grouped by k head, GGUF tiled."""
    if c.n_k_head == c.n_v_head:
        return x
    s = c.state_size
    if local in ("attn_qkv.weight", "ssm_conv1d.weight"):  # Its rows are those of q, k and v.
        q_and_k = 2 * c.key_dim
        return np.concatenate([x[:q_and_k], _tile(c, x[q_and_k:], 0, s)])
    if local == "attn_gate.weight":
        return _tile(c, x, 0, s)
    if local in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias", "ssm_a"):
        return _tile(c, x, 0, 1)
    return _tile(c, x, 1, s) if local == "ssm_out.weight" else x


def _compute(local: str, x: Array) -> Array:
    """Applies what the file stores otherwise: transformers' norms are stored less 1, but for DeltaNet's, and
    A enters as -exp(A_log)."""
    if local == "ssm_a":
        return -np.exp(x)
    zero_centred = local.endswith("norm.weight") and local != "ssm_norm.weight"
    return x + np.float32(1) if zero_centred else x


def wanted_shapes(c: Config, part: str, names: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of the file, in file order. The part "mtp" has the head's blocks, and the
    embedding, the last norm and the output matrix that it shares with the trunk, so that llama.cpp opens it
    alone."""
    shapes = dict(tensor_shapes(c))
    if c.n_nextn:
        shapes |= {
            f"blk.{c.n_layer}.{local}": (c.n_vocab, c.n_embd)
            for local, plain in OPTIONAL_NEXTN.items()
            if plain in names
        }
    if part != "mtp":
        return shapes
    first = c.n_layer
    return {k: v for k, v in shapes.items() if not k.startswith("blk.") or int(k.split(".")[1]) >= first}


def plan(c: Config, part: str, checkpoint: Checkpoint, names: dict[str, str]) -> list[Planned]:
    """Returns every tensor of the file with where it comes from. FileError names one that is missing or has
    another shape, and UnsupportedError one of the checkpoint that has no place in the file."""
    if c.n_v_head % c.n_k_head:
        raise FileError(f"linear_num_value_heads {c.n_v_head} is no multiple of {c.n_k_head} key heads")
    builder = _Builder(c, checkpoint, names)
    tensors = [builder.tensor(name, shape) for name, shape in wanted_shapes(c, part, names).items()]
    used = {source for tensor in tensors for source in tensor.sources}
    left = [plain for plain, own in names.items() if own not in used and not _left_out(c, part, plain)]
    if left:
        more = f" (and {len(left) - 1} more)" if left[1:] else ""
        raise UnsupportedError(f"tensor {names[left[0]]}{more} is not part of the qwen35 that luce knows")
    return tensors


def _left_out(c: Config, part: str, plain: str) -> bool:
    """Says whether a tensor is rightly not in the file: the trunk beside the head, the copy of a tied
    embedding, constants."""
    if plain.endswith("rotary_emb.inv_freq") or (c.tied and plain == "lm_head.weight"):
        return True
    return part == "mtp" and not plain.startswith("mtp.")
