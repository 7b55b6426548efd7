"""Checks which assistants' files are read, in the layouts of llama.cpp and of forks, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import drive
import gguf
import numpy as np
import pytest
import tiny
import tiny_gemma4
from gguf.gguf_writer import GGUFValue
from hollow import write_without_weights
from tiny_gemma4 import ASSISTANT, ASSISTANT_SEED, CASES, PUBLISHED

from luce.convert.gemma4_layout import CENTROIDS, ORDERING, Config, add_keys, tensor_shapes
from luce.errors import Error, FileError, UnsupportedError
from luce.native import File, Library, Model
from luce.native.structs import EngineParams

ARCH = "gemma4-assistant"
CONFIG, SEED = CASES["dense"]
U32, F32, TEXT, ARRAY = (getattr(gguf.GGUFValueType, kind) for kind in ("UINT32", "FLOAT32", "STRING", "ARRAY"))
WRITER: Any = gguf.GGUFWriter
Keys = dict[str, GGUFValue]
Weights = dict[str, np.ndarray]
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "model.gguf"
    return tiny_gemma4.write(path, CONFIG, tiny_gemma4.layout(CONFIG, SEED))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes an assistant, whose keys and tensors may be changed."""

    def written(
        c: Config = ASSISTANT,
        keys: Callable[[Keys], Any] = lambda keys: None,
        tensors: Callable[[Weights], Any] = lambda tensors: None,
    ) -> Path:
        class Writer(WRITER):
            def write_header_to_file(self, path: Path | None = None) -> None:
                keys(self.kv_data[0])
                super().write_header_to_file(path)

        monkeypatch.setattr(tiny_gemma4.gguf, "GGUFWriter", Writer)
        made = tiny_gemma4.layout(c, ASSISTANT_SEED)
        tensors(made)
        return tiny_gemma4.write(tmp_path / "assistant.gguf", c, made)

    return written


def drafts_of(native: Library, target: Path, assistant: Path, kind: str | None = None) -> list[int]:
    file = File(target, native)
    model = Model(file, "cpu", drafters=[(File(assistant, native), kind)])
    sequence = drive.open_sequence(model, n_ctx=64, n_draft=8, n_rows=9)
    drive.prefill(sequence, [7, 1, 99, 23, 5])
    drive.draft(sequence, 8, 8)
    return sequence.drafted(8)


def refused(native: Library, target: Path, assistant: Path, kind: type[Error], said: str) -> str:
    """Returns what is said of the two, by plans of memory and by opening."""
    file, head = File(target, native), File(assistant, native)
    params = EngineParams(n_draft=2)
    for opens in (lambda: file.plan_memory("cpu", params, head), lambda: Model(file, "cpu", head=head)):
        with pytest.raises(kind, match=said) as error:
            opens()
        assert assistant.name in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def as_forks(keys: Keys) -> None:
    for key in [key for key in keys if key.startswith(ARCH + ".")]:
        name = key.removeprefix(ARCH + ".").replace("embedding_length_out", "n_embd_backbone")
        keys["gemma4_assistant." + name] = keys.pop(key)
    keys.pop("gemma4_assistant.nextn_predict_layers")
    keys["general.architecture"] = GGUFValue("gemma4_assistant", TEXT)


def forks_names(tensors: Weights) -> None:
    for name in ("pre_projection.weight", "post_projection.weight"):
        tensors["mtp." + name] = tensors.pop("nextn." + name)


def test_layouts_of_forks_draft_the_same(write: Write, target: Path, native: Library) -> None:
    plain = drafts_of(native, target, write())
    assert len(set(plain)) > 2
    assert drafts_of(native, target, write(), "assistant") == plain
    assert drafts_of(native, target, write(keys=as_forks, tensors=forks_names)) == plain
    assert drafts_of(native, target, write(tensors=forks_names)) == plain

    def lists(keys: Keys) -> None:
        keys[ARCH + ".feed_forward_length"] = GGUFValue([ASSISTANT.n_ff] * 4, ARRAY, U32)
        for name in ("embedding_length_per_layer_input", "attention.shared_kv_layers", "nextn_predict_layers"):
            keys.pop(f"{ARCH}.{name}")

    assert drafts_of(native, target, write(keys=lists)) == plain


# ---- ordered vocabularies

ORDERED = replace(ASSISTANT, n_centroid=24, n_centroid_used=4)
NAMES = {
    "llama.cpp": (CENTROIDS, ORDERING),
    "forks": ("mtp.centroids.weight", "mtp.token_ordering.weight"),
    "a fork's description": ("mtp.centroids.weight", "mtp.token_ordering"),
    "checkpoints": ("masked_embedding.centroids.weight", "masked_embedding.token_ordering"),
}


def called(centroids: str, ordering: str) -> Callable[[Weights], None]:
    def change(tensors: Weights) -> None:
        tensors[centroids], tensors[ordering] = tensors.pop(CENTROIDS), tensors.pop(ORDERING)

    return change


def having(name: str, of: Callable[[np.ndarray], np.ndarray]) -> Callable[[Weights], None]:
    def change(tensors: Weights) -> None:
        tensors[name] = of(tensors[name])

    return change


def saying(**values: Any) -> Callable[[Keys], None]:
    def change(keys: Keys) -> None:
        for name, value in values.items():
            kind = gguf.GGUFValueType.BOOL if isinstance(value, bool) else U32
            keys[f"{ARCH}.{name}"] = GGUFValue(value, kind)

    return change


@pytest.mark.parametrize("names", NAMES)
def test_an_ordered_vocabulary_has_several_names(names: str, write: Write, target: Path, native: Library) -> None:
    whole, ordered = drafts_of(native, target, write()), drafts_of(native, target, write(ORDERED))
    assert ordered != whole and len(set(ordered)) > 2
    assert drafts_of(native, target, write(ORDERED, tensors=called(*NAMES[names]))) == ordered


def test_all_clusters_give_the_drafts_of_the_whole_vocabulary(write: Write, target: Path, native: Library) -> None:
    """A file that does not say how many are looked at has 32, and no more than there are."""
    whole = drafts_of(native, target, write())
    assert drafts_of(native, target, write(ORDERED, keys=saying(centroid_top_k=24))) == whole
    assert drafts_of(native, target, write(ORDERED, keys=lambda keys: keys.pop(f"{ARCH}.centroid_top_k"))) == whole
    many = replace(ORDERED, n_centroid=96)
    of_32 = drafts_of(native, target, write(many, keys=saying(centroid_top_k=32)))
    unsaid = drafts_of(native, target, write(many, keys=lambda keys: keys.pop(f"{ARCH}.centroid_top_k")))
    assert unsaid == of_32 != whole


def test_a_file_may_say_that_its_order_is_not_used(write: Write, target: Path, native: Library) -> None:
    whole = drafts_of(native, target, write())
    assert drafts_of(native, target, write(ORDERED, keys=saying(use_ordered_embeddings=True))) != whole
    for names in NAMES.values():
        path = write(ORDERED, saying(use_ordered_embeddings=False), called(*names))
        assert drafts_of(native, target, path) == whole


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_an_ordered_head_has_the_types_of_weights(kind: str, target: Path, native: Library, tmp_path: Path) -> None:
    """All of its clusters draft as the whole vocabulary of the same file does, where no two tokens are close."""
    found = []
    for c in (ASSISTANT, replace(ORDERED, n_centroid_used=24)):
        path = tmp_path / f"{c.n_centroid}.gguf"
        tiny_gemma4.write(path, c, tiny_gemma4.layout(c, ASSISTANT_SEED), lambda name: kind if name in HEADS else "F32")
        found.append(drafts_of(native, target, path))
    assert found[0] == found[1] and len(set(found[0])) > 2


HEADS = {"token_embd.weight"}
NO_ORDER: dict[str, tuple[Callable[[np.ndarray], np.ndarray], type[Error], str]] = {
    "a token that comes twice": (np.zeros_like, FileError, "is no order of 384 tokens: entry 1 is 0 again"),
    "a token beyond the vocabulary": (lambda x: x + 1, FileError, r"no order of 384 tokens: entry \d+ is 384\."),
    "a token below 0": (lambda x: x - 1, FileError, r"no order of 384 tokens: entry \d+ is -1\."),
    "other tokens": (lambda x: x[:-1], FileError, r"expected shape \{384\}, found \{383\}"),
    "floats": (lambda x: x.astype(np.float32), UnsupportedError, "has type F32, expected I32"),
}


@pytest.mark.parametrize("what", NO_ORDER)
def test_what_is_no_order_is_refused(what: str, write: Write, target: Path, native: Library) -> None:
    change, kind, said = NO_ORDER[what]
    refused(native, target, write(ORDERED, tensors=having(ORDERING, change)), kind, ORDERING + ".*" + said)


def test_centroids_that_do_not_fit_are_refused(write: Write, target: Path, native: Library) -> None:
    for lacking, shape in ((CENTROIDS, "32, 1"), (ORDERING, "384")):
        path = write(ORDERED, tensors=lambda tensors: tensors.pop(lacking))  # noqa: B023
        refused(native, target, path, FileError, rf"tensor {lacking} is missing, expected \{{{shape}\}}")
    path = write(ORDERED, tensors=having(CENTROIDS, lambda x: x[:23]))
    refused(native, target, path, FileError, "has 23 centroids, which do not share out 384 tokens")
    path = write(ORDERED, tensors=having(CENTROIDS, lambda x: x[:, :31].copy()))
    refused(native, target, path, FileError, r"expected shape \{32, 24\}, found \{31, 24\}")
    many = replace(ORDERED, n_centroid=96, n_centroid_used=64)
    refused(native, target, write(many), UnsupportedError, "centroid_top_k is 64: luce looks at 63 clusters")
    refused(native, target, write(ORDERED, keys=saying(centroid_top_k=0)), FileError, "centroid_top_k is 0, expected 1")


OTHERS: dict[str, tuple[Config, str]] = {
    "width": (replace(ASSISTANT, n_embd_out=128), "its embedding_length_out is 128, and the model has 64"),
    "vocabulary": (replace(ASSISTANT, n_vocab=512), "its vocabulary is 512, and the model has 384"),
    "global heads": (replace(ASSISTANT, head_dim=256), "its key_length is 256, and the model has 128"),
    "sliding heads": (replace(ASSISTANT, head_dim_swa=128), "its key_length_swa is 128, and the model has 64"),
    "global KV heads": (
        replace(ASSISTANT, n_head_kv=2), "its head_count_kv in global layers is 2, and the model has 1"),
    "sliding KV heads": (
        replace(ASSISTANT, n_head_kv_swa=4), "its head_count_kv in sliding layers is 4, and the model has 2"),
    "a wider window": (replace(ASSISTANT, window=13), "its sliding_window is 13, and the model has 12"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_an_assistant_of_another_model_is_refused_with_both_values(
    what: str, write: Write, target: Path, native: Library
) -> None:
    config, said = OTHERS[what]
    text = refused(native, target, write(config), FileError, said)
    assert f"does not draft for {target}" in text and "Take the assistant that was made for this model" in text


def test_models_that_have_no_such_layers_or_are_others(write: Write, tmp_path: Path, native: Library) -> None:
    slides = replace(CONFIG, sliding=(True, True))
    path = tiny_gemma4.write(tmp_path / "slides.gguf", slides, tiny_gemma4.layout(slides, 1))
    refused(native, path, write(), FileError, "it has global layers, and the model has none")
    qwen = tiny.write(tmp_path / "qwen.gguf", tiny.Config(), tiny.layout(tiny.Config(), 1))
    refused(native, qwen, write(), FileError, "an assistant of Gemma 4, and the model is one of qwen35")


LACKING = {
    "nextn.pre_projection.weight": r"nextn\.pre_projection\.weight is missing, expected \{128, 32\}",
    "nextn.post_projection.weight": r"nextn\.post_projection\.weight is missing, expected \{32, 64\}",
    "token_embd.weight": r"token_embd\.weight is missing, expected \{32, 384\}",
    "output_norm.weight": r"output_norm\.weight is missing",
    "rope_freqs.weight": r"rope_freqs\.weight is missing, expected \{64\}",
    "blk.3.attn_q.weight": r"blk\.3\.attn_q\.weight is missing",
    "blk.0.layer_output_scale.weight": r"blk\.0\.layer_output_scale\.weight: expected F32 \{1\}, found none",
    "blk.2.post_ffw_norm.weight": r"blk\.2\.post_ffw_norm\.weight is missing",
}


@pytest.mark.parametrize("tensor", LACKING)
def test_a_tensor_that_is_missing_is_named(tensor: str, write: Write, target: Path, native: Library) -> None:
    refused(native, target, write(tensors=lambda tensors: tensors.pop(tensor)), FileError, LACKING[tensor])


def test_what_no_assistant_has_is_refused(write: Write, target: Path, native: Library) -> None:
    def more(tensors: Weights) -> None:
        tensors["blk.0.attn_q.bias"] = np.zeros(8, np.float32)

    said = r"tensor blk\.0\.attn_q\.bias is not part of the assistants that luce runs"
    refused(native, target, write(tensors=more), UnsupportedError, said)

    def experts(keys: Keys) -> None:
        for name in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
            keys[f"{ARCH}.{name}"] = GGUFValue(2, U32)

    refused(native, target, write(keys=experts), UnsupportedError, "luce has no assistants with experts")
    per_layer = {f"{ARCH}.embedding_length_per_layer_input": GGUFValue(32, U32)}
    refused(native, target, write(keys=lambda keys: keys.update(per_layer)), UnsupportedError, "per-layer embeddings")
    scaled = {f"{ARCH}.rope.scaling.type": GGUFValue("yarn", TEXT)}
    refused(native, target, write(keys=lambda keys: keys.update(scaled)), UnsupportedError, "luce has no RoPE scaling")
    without = f"{ARCH}.embedding_length_out"
    refused(native, target, write(keys=lambda keys: keys.pop(without)), FileError, "embedding_length_out")


def test_an_assistant_is_no_model(write: Write, native: Library) -> None:
    with pytest.raises(UnsupportedError, match="an assistant"):
        File(write(), native).plan_memory("cpu")


def hollow(path: Path, c: Config) -> Path:
    w = gguf.GGUFWriter(path, c.arch)
    add_keys(w, c, "hollow", file_type=0)
    write_without_weights(w, tensor_shapes(c), lambda name: "Q8_0" if tiny_gemma4.quantizable(name) else "F32")
    return path


def test_published_sizes_fit_each_other_and_no_others(tmp_path: Path, native: Library) -> None:
    target, assistant = (hollow(tmp_path / f"{name}.gguf", PUBLISHED[name]) for name in ("31B", "31B-assistant"))
    file, head = File(target, native), File(assistant, native)
    params = EngineParams(n_ctx=4096, n_chunk=256, n_threads=1)
    plain = file.plan_memory("cpu", params)
    drafting = file.plan_memory("cpu", replace(params, n_draft=4), head)
    assert drafting.kv == plain.kv and 300 << 20 < drafting.weights - plain.weights < 700 << 20
    other = hollow(tmp_path / "26B-A4B.gguf", PUBLISHED["26B-A4B"])
    refused(native, other, assistant, FileError, "its embedding_length_out is 5376, and the model has 2816")
