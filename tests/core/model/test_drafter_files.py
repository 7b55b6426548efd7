"""Checks which drafters' files are read, in every layout, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import drive
import gguf
import numpy as np
import pytest
import tiny
import tiny_dflash
import tiny_dflash2
from tiny import Weights
from tiny_dflash import CASES

from luce.errors import Error, FileError, UnsupportedError
from luce.files.probe import probe
from luce.native import File, Form, Library, Source

CASE = CASES["yarn-own-vocabulary"]  # It has all that a file may have.
Keys = dict[str, gguf.GGUFValue]
U32, F32, TEXT = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING
MASK_KEY = "tokenizer.ggml.mask_token_id"
DEEPER = {"block_size": "dflash.block_size"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return tiny.write(path, CASE.target, tiny.layout(CASE.target, CASE.seed))


def moved(arch: str, moves: dict[str, str]) -> Callable[[Keys], None]:
    """Turns dflash.x into arch.x, or into what `moves` says of x."""

    def change(keys: Keys) -> None:
        for key in [key for key in keys if key.startswith("dflash.")]:
            name = key.removeprefix("dflash.")
            keys[f"{arch}.{moves.get(name, name)}"] = keys.pop(key)

    return change


def zero_based(keys: Keys) -> None:
    """Returns the layers whose outputs are tapped, as older files count them, and their mask token."""
    moved("qwen35-dflash-draft", DEEPER)(keys)
    taps = keys.pop("qwen35-dflash-draft.target_layers")
    layers = [layer - 1 for layer in taps.value]
    keys["qwen35-dflash-draft.dflash.target_layer_ids"] = replace(taps, value=layers)
    keys["qwen35-dflash-draft.dflash.mask_token_id"] = keys.pop(MASK_KEY)


def older_name(name: str) -> str:
    return {"fc.weight": "dflash.fc.weight", "enc.output_norm.weight": "dflash.hidden_norm.weight"}.get(
        name, name
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "dflash-draft": {"keys": moved("dflash-draft", DEEPER), "rename": older_name},
    "qwen35-dflash-draft": {"keys": zero_based, "rename": older_name},
    "gemma4-dflash-draft": {"keys": moved("gemma4-dflash-draft", {}), "rename": older_name},
}


def block_logits(native: Library, target: Path, drafter: Path, prompt: Sequence[int] = (5, 6, 7)) -> np.ndarray:
    sequence = drive.open_sequence(drive.open_model(native, target, drafter=drafter), n_ctx=64, blocks=1)
    drive.prefill(sequence, prompt)
    drive.draft(sequence, 8, 4, Source.DFLASH)
    return np.stack([sequence.logits(row) for row in range(5)])


@pytest.mark.parametrize("arch", LAYOUTS)
def test_older_layouts_draft_the_same(arch: str, native: Library, target: Path, tmp_path: Path) -> None:
    weights = tiny_dflash.weights(CASE)
    new = tiny_dflash.write(tmp_path / "new.gguf", CASE, weights)
    old = tiny_dflash.write(tmp_path / "old.gguf", CASE, weights, arch=arch, **LAYOUTS[arch])
    assert np.array_equal(block_logits(native, target, new), block_logits(native, target, old))
    told = [probe(File(path, native)).dflash for path in (new, old)]
    assert told[0] is not None and told[1] is not None
    assert told[1].target_architecture == {"qwen35-dflash-draft": "qwen35", "gemma4-dflash-draft": "gemma4"}.get(arch)
    assert told[0] == replace(told[1], target_architecture=None)


def luceboxs(keys: Keys) -> None:
    """Leaves what lucebox's files for Gemma 4 have: a window without a pattern, taps counted from 0, the mask token,
    and neither a tokenizer nor a key of causality, nor a scale of embeddings."""
    taps, mask = keys["dflash.target_layers"], keys[MASK_KEY]
    gone = ("target_layers", "attention.causal_pattern", "attention.sliding_window_pattern")
    for key in [key for key in keys if key.startswith("tokenizer.") or key in [f"dflash.{name}" for name in gone]]:
        del keys[key]
    moved("gemma4-dflash-draft", DEEPER)(keys)
    prefix = "gemma4-dflash-draft.dflash"
    keys[f"{prefix}.target_layer_ids"] = replace(taps, value=[layer - 1 for layer in taps.value])
    keys[f"{prefix}.mask_token_id"] = mask
    keys[f"{prefix}.n_target_layers"] = gguf.GGUFValue(6, U32)


def test_luceboxs_files_for_gemma_4_draft_the_same(native: Library, tmp_path: Path) -> None:
    """What they do not say is as in the checkpoints: layers but the last have the window and are causal. Embeddings are
    scaled and logits capped as the target does it, here as where a file says so."""
    case = tiny_dflash.GEMMA4["dense"]
    model, weights, c = tiny_dflash.write_target(tmp_path / "t.gguf", case), tiny_dflash.weights(case), case.target
    assert case.drafter.sliding == case.drafter.causal == (True, True, False)
    said = replace(case, drafter=replace(case.drafter, embedding_scale=c.n_embd**0.5, softcap=c.softcap))
    files = [
        tiny_dflash.write(tmp_path / "new.gguf", case, weights),
        tiny_dflash.write(tmp_path / "said.gguf", said, weights),
        tiny_dflash.write(tmp_path / "old.gguf", case, weights, arch="gemma4-dflash-draft", rename=older_name,
                          keys=luceboxs),
    ]  # fmt: skip
    logits = [block_logits(native, model, path, range(30)) for path in files]
    assert np.array_equal(logits[0], logits[1]) and np.array_equal(logits[0], logits[2])
    facts = probe(File(files[2], native))
    assert facts.kind == "drafter" and facts.dflash is not None
    assert (facts.dflash.sliding_window, facts.dflash.target_layers, facts.dflash.mask_token_id) == (9, [2, 4, 6], 300)
    assert facts.dflash.fits == "gemma4 models with embedding 64, vocabulary 384, 6 blocks or more"
    for changed in ({"sliding": (True, True, True)}, {"causal": (False, False, False)}, {"embedding_scale": 1.0}):
        other = replace(case, drafter=replace(case.drafter, **changed))
        path = tiny_dflash.write(tmp_path / "other.gguf", other, weights)
        assert not np.array_equal(logits[0], block_logits(native, model, path, range(30))), changed


def test_own_matrices_are_used_as_gemma_4_uses_its(native: Library, tmp_path: Path) -> None:
    """Embeddings of a drafter's own are scaled too, and its logits capped: files that say so draft the same. It is what
    `luce convert` writes (tests/convert/test_gemma4.py)."""
    case = tiny_dflash.GEMMA4["untied"]
    model, weights, c = tiny_dflash.write_target(tmp_path / "t.gguf", case), tiny_dflash.weights(case), case.target
    assert "token_embd.weight" in weights and case.drafter.embedding_scale is case.drafter.softcap is None
    path = tmp_path / "drafter.gguf"

    def logits(**said: float) -> np.ndarray:
        drafter = replace(case.drafter, **said)
        return block_logits(native, model, tiny_dflash.write(path, replace(case, drafter=drafter), weights), range(30))

    unsaid = logits()
    assert np.array_equal(unsaid, logits(embedding_scale=c.n_embd**0.5, softcap=c.softcap))
    assert not np.array_equal(unsaid, logits(embedding_scale=1.0))
    assert not np.array_equal(unsaid, logits(softcap=2 * c.softcap))


# ---- what is refused


def without(*names: str) -> Callable[[Keys], None]:
    def change(keys: Keys) -> None:
        for name in names:
            del keys[name]

    return change


def having(name: str, value: Any, kind: gguf.GGUFValueType | None = None) -> Callable[[Keys], None]:
    """Returns a key with another value, or one that was not there, of this type."""

    def change(keys: Keys) -> None:
        made = gguf.GGUFValue(value, kind) if kind else replace(keys[name], value=value)
        keys[name] = made

    return change


def older_taps(layers: list[int]) -> Callable[[Keys], None]:
    """Returns the layers whose outputs are tapped, as older files count them."""

    def change(keys: Keys) -> None:
        del keys["dflash.target_layers"]
        array, int64 = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT64
        keys["dflash.target_layer_ids"] = gguf.GGUFValue(layers, array, int64)

    return change


MISSING = ("block_size", "target_layers", "rope.freq_base", "attention.head_count", "attention.head_count_kv",
           "attention.key_length", "attention.layer_norm_rms_epsilon", "block_count", "feed_forward_length",
           "embedding_length", "rope.scaling.factor", "rope.scaling.original_context_length")  # fmt: skip
UNSUPPORTED = {
    "hyper_connection.count": (2, U32), "attention.value_scale": (0.5, F32), "hidden_act": ("gelu", TEXT),
    "rope.scaling.type": ("linear", TEXT), "block_size": (65, U32), "attention.value_length": (32, U32),
    "attention.head_count_kv": (4, U32),
}  # fmt: skip
WRONG: dict[str, tuple[Callable[[Keys], None], str]] = {
    "taps": (having("dflash.target_layers", [2, 3, 5, 7]), "target_layers has 7.* a target that has 6"),
    "order of taps": (having("dflash.target_layers", [2, 3, 3, 5]), "target_layers has 3: expected rising"),
    "no taps": (having("dflash.target_layers", [-1, 3, 4, 5]), "target_layers has -1"),
    "older taps": (older_taps([2**63 - 1, 1, 2, 3]), f"target_layer_ids has {2**63 - 1}"),
    "embedding": (having("dflash.embedding_length", 64), "embedding_length is 64, the model's 128"),
    "vocabulary": (having("dflash.vocab_size", 500), "has 500 tokens, the model's 512"),
    "mask": (having(MASK_KEY, 512), "mask_token_id.*512"),
    "no mask": (without(MASK_KEY), "mask_token_id is missing"),
    "no pattern": (having("dflash.attention.sliding_window", 8, U32), "sliding_window_pattern is missing"),
}


@pytest.mark.parametrize("name", MISSING)
def test_nothing_that_is_missing_is_guessed(
    name: str, native: Library, target: Path, tmp_path: Path
) -> None:
    path = tiny_dflash.write(tmp_path / "d.gguf", CASE, {}, keys=without(f"dflash.{name}"))
    refused(native, target, path, FileError, rf"key dflash\.{name} is missing")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_key_that_luce_does_not_implement_is_named(
    name: str, native: Library, target: Path, tmp_path: Path
) -> None:
    change = having(f"dflash.{name}", *UNSUPPORTED[name])
    path = tiny_dflash.write(tmp_path / "d.gguf", CASE, {}, keys=change)
    refused(native, target, path, UnsupportedError, name)


@pytest.mark.parametrize("what", WRONG)
def test_a_drafter_that_does_not_fit_is_refused_with_both_values(
    what: str, native: Library, target: Path, tmp_path: Path
) -> None:
    change, message = WRONG[what]
    path = tiny_dflash.write(tmp_path / "d.gguf", CASE, {}, keys=change)
    refused(native, target, path, FileError, message)


ZERO = np.zeros((2, 128), np.float32)
MORE = ("selector_hidden.weight", "blk.0.attn_conv_base", "conf_proj.weight",
        "markov_gate_proj.weight", "markov_joint_proj.weight", "prefix_gru.weight_ih_l0", "embed_proj.0.weight",
        "rope_freqs.weight")  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_a_tensor_that_luce_does_not_implement_is_named(
    name: str, native: Library, target: Path, tmp_path: Path
) -> None:
    path = tiny_dflash.write(tmp_path / "d.gguf", CASE, tiny_dflash.weights(CASE) | {name: ZERO})
    refused(native, target, path, UnsupportedError, f"tensor {name} is not part of the DFlash drafters")


@pytest.mark.parametrize("name", ["post_attention_norm", "post_ffw_norm", "layer_output_scale"])
def test_drafters_with_gemma_4s_own_layers_are_refused_in_one_line(
    name: str, native: Library, target: Path, tmp_path: Path
) -> None:
    """Of such a file more is unlike what luce implements, and this is named first."""
    path = tiny_dflash.write(tmp_path / "d.gguf", CASE, tiny_dflash.weights(CASE) | {f"blk.1.{name}.weight": ZERO},
                             keys=having("dflash.hidden_act", "gelu_pytorch_tanh", TEXT))  # fmt: skip
    message = rf"tensor blk\.1\.{name}\.weight: the drafter has layers like Gemma 4's own"
    refused(native, target, path, UnsupportedError, message)


def lacking(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: x for key, x in weights.items() if key != name}


TENSORS: dict[str, tuple[Callable[[Weights], Weights], type[Error], str]] = {
    "no values": (lacking("blk.0.attn_v.weight"), FileError, r"blk\.0\.attn_v\.weight is missing"),
    "no fc": (lacking("fc.weight"), FileError, r"tensor fc\.weight is missing, expected \{512, 128\}"),
    "no norm": (lacking("enc.output_norm.weight"), FileError, "enc.output_norm.weight is missing"),
    "no head": (lacking("output.weight"), FileError, "d2t names 200 tokens: expected an output.weight"),
    "a long d2t": (lambda w: w | {"d2t": np.arange(513)}, FileError, "d2t names 513 tokens"),
    "a token beyond": (lambda w: w | {"d2t": w["d2t"] + 312}, FileError, "d2t: entry .* expected 0 to 511"),
    "a token below": (lambda w: w | {"d2t": w["d2t"] - 500}, FileError, "d2t: entry 0 is -.* expected 0"),
    "narrow d2t": (lambda w: w | {"d2t": w["d2t"].astype(np.int32)}, UnsupportedError, "I32, expected I64"),
    "another shape": (lambda w: w | {"fc.weight": ZERO}, FileError, r"expected shape \{512, 128\}, found"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_a_tensor_that_is_missing_or_wrong_is_named(
    what: str, native: Library, target: Path, tmp_path: Path
) -> None:
    change, kind, message = TENSORS[what]
    path = tiny_dflash.write(tmp_path / "d.gguf", CASE, change(tiny_dflash.weights(CASE)))
    refused(native, target, path, kind, message)


# ---- DFlash2 and DSpark

OF_KEYS: dict[str, tuple[str, Callable[[Keys], None], type[Error], str]] = {
    "taps alone": ("dflash2", without("dflash.conv_group_size"), FileError,
                   r"dflash\.conv_kernel_size and dflash\.conv_group_size are 2 and 0: expected both"),
    "groups alone": ("dflash2", without("dflash.conv_kernel_size"), FileError, "are 0 and 16: expected both"),
    "groups that do not divide": ("dflash2", having("dflash.conv_group_size", 24), FileError,
                                  "2 and 24: .* divide embedding_length, 64"),
    "no number of candidates": ("dflash2", without("dflash.selector_top_k"), FileError,
                                r"key dflash\.selector_top_k is missing"),
    "too many candidates": ("dflash2", having("dflash.selector_top_k", 64), FileError, "selector_top_k.* 64"),
    "no rank": ("dflash2", without("dflash.selector_rank"), FileError,
                r"key dflash\.selector_top_k: the file has neither a selector's rank nor a Markov head"),
    "another rank": ("dflash2", having("dflash.selector_rank", 9), FileError,
                     r"selector_predecessor\.weight: expected shape \{9, 384\}, found \{8, 384\}"),
    "another rank of a head": ("dspark", having("dflash.markov_rank", 9, U32), FileError,
                               r"markov_w1\.weight: expected shape \{9, 384\}, found \{8, 384\}"),
    "both": ("dspark", having("dflash.selector_rank", 8, U32), FileError,
             r"dflash\.selector_rank and tensor markov_w1\.weight: expected one of them"),
    "a short window": ("dflash2-windows", having("dflash.attention.sliding_window", 15), UnsupportedError,
                       r"dflash\.attention\.sliding_window is 15, less than a block's 16 rows"),
    "64 drafts": ("dspark", having("dflash.block_size", 64), UnsupportedError,
                  r"dflash\.block_size is 64: luce verifies 63 drafts at most"),
}  # fmt: skip
OF_TENSORS: dict[str, tuple[str, str, tuple[int, ...] | None, str]] = {
    name: (case, name, shape, message)
    for case, name, shape, message in (
        ("dflash2", "blk.1.attn_conv_base", (2, 3, 64), r"expected shape \{64, 2, 2\}, found \{64, 3, 2\}"),
        ("dflash2", "blk.2.ffn_conv_base", None, r"is missing, expected \{64, 2, 2\}"),
        ("dflash2", "blk.0.ffn_conv_proj.weight", (8, 64), r"expected shape \{64, 16\}, found \{64, 8\}"),
        ("dflash2", "blk.0.attn_conv_proj.weight", None, r"is missing, expected \{64, 16\}"),
        ("dflash2", "selector_successor.weight", (200, 8), r"expected shape \{8, 384\}, found \{8, 200\}"),
        ("dflash2", "selector_hidden.weight", None, r"is missing, expected \{64, 8\}"),
        ("dspark", "markov_w2.weight", None, r"is missing, expected \{8, 384\}"),
        ("dspark", "markov_w1.weight", (383, 8), r"expected shape \{8, 384\}, found \{8, 383\}"),
        ("dspark-reduced", "conf_proj.weight", (1, 129), r"expected shape \{160\}, found \{129, 1\}"),
        ("dspark-reduced", "conf_proj.bias", (2,), r"expected shape \{1\}, found \{2\}"),
        ("dspark-sinks", "blk.1.attn_sinks.weight", (5,), r"expected shape \{6\}, found \{5\}"),
    )
}  # fmt: skip


def target_of(case: tiny_dflash2.More, folder: Path) -> Path:
    return tiny.write(folder / "t.gguf", case.base.target, tiny.layout(case.base.target, case.base.seed))


@pytest.mark.parametrize("what", OF_KEYS)
def test_a_key_of_a_later_generation_that_is_missing_or_wrong_is_named(
    what: str, native: Library, tmp_path: Path
) -> None:
    name, change, kind, message = OF_KEYS[what]
    case = tiny_dflash2.CASES[name]
    path = tiny_dflash2.write(tmp_path / "d.gguf", case, tiny_dflash2.weights(case), change)
    refused(native, target_of(case, tmp_path), path, kind, message)


@pytest.mark.parametrize("what", OF_TENSORS)
def test_a_tensor_of_a_later_generation_that_is_missing_or_wrong_is_named(
    what: str, native: Library, tmp_path: Path
) -> None:
    name, tensor, shape, message = OF_TENSORS[what]
    case = tiny_dflash2.CASES[name]
    weights = tiny_dflash2.weights(case)
    weights.pop(tensor)
    if shape is not None:
        weights[tensor] = np.zeros(shape, np.float32)
    path = tiny_dflash2.write(tmp_path / "d.gguf", case, weights)
    refused(native, target_of(case, tmp_path), path, FileError, rf"tensor {tensor}:? {message}")


def test_an_alignment_is_read_and_not_guessed(native: Library, tmp_path: Path) -> None:
    """A block of 7 rows makes 7 drafts where the anchor's row drafts, which a Markov head means without the key; else
    6."""
    for name, said, n_draft in (
        ("dspark", None, 7), ("dspark", True, 7), ("dspark", False, 6),
        ("dflash2", None, 7), ("dflash2", True, 8), ("dflash2", False, 7),
    ):  # fmt: skip
        case = replace(tiny_dflash2.CASES[name], from_anchor=said)
        path = tiny_dflash2.write(tmp_path / "d.gguf", case, tiny_dflash2.weights(case))
        info = drive.open_model(native, target_of(case, tmp_path), drafter=path).info.drafters[0]
        assert (info.n_draft, info.n_block) == (n_draft, case.base.drafter.block_size)
        assert (info.form, info.n_list) == (Form.CONDITIONAL, case.candidates)


def test_any_drafter_may_have_attention_sinks(native: Library, device: str, tmp_path: Path) -> None:
    """Some of its layers may be without."""
    case, plain = tiny_dflash2.CASES["dspark-sinks"], CASES["plain"]
    files = [tiny_dflash2.files(tmp_path, case)]
    sinks = {"blk.1.attn_sinks.weight": np.array([1.0, -1.0], np.float32)}
    files.append((tiny_dflash.write_target(tmp_path / "t.gguf", plain),
                  tiny_dflash.write(tmp_path / "d.gguf", plain, tiny_dflash.weights(plain) | sinks)))  # fmt: skip
    for target, drafter in files:
        assert drive.open_model(native, target, device, drafter=drafter).info.drafters[0].kind == "dflash"


def test_what_is_no_drafter_is_refused(native: Library, target: Path) -> None:
    refused(native, target, target, FileError, "architecture qwen35 is not that of a DFlash drafter")


def refused(native: Library, target: Path, drafter: Path, kind: type[Error], message: str) -> None:
    """Checks that the file is refused when it is opened, and when its memory is asked for."""
    with pytest.raises(kind, match=message):
        drive.open_model(native, target, drafter=drafter)
    with pytest.raises(kind, match=message):
        File(target, native).plan_memory("cpu", drafter=File(drafter, native))
