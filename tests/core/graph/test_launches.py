"""Counts in a step's graph what it launches: it is what the head of native/src/graph/lower_gpu.cpp lists."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import box_model
import drive
import pytest
import tiny
import tiny_dflash
import tiny_gemma4
from checkout import ROOT

from luce.native import Library

LOWER_GPU = ROOT / "native" / "src" / "graph" / "lower_gpu.cpp"
CONFIG = tiny.Config(n_embd=256, n_ff=256, n_v_head=8, state_size=128, head_dim=128)
MOVED = {"GET_ROWS", "SET_ROWS", "CONCAT"}
FFN = Counter({"rowmm_parts": 2, "rowmm_parts_glu": 1, "rowmm_parts_rms": 1})
OUT = FFN + Counter({"rowmm_parts": 1, "rowmm_parts_rms": 1})
# A mixture's router takes the rows as they are, which a product of few rows leaves at once.
MIXTURE = Counter({"rowmm_add": 1, "moe_route": 1, "moe_up": 1, "moe_down": 1, "moe_sum": 1})
# Of one row down and sum are one launch, and the product behind it packs the row itself.
ONE_ROW = Counter({"moe_end": 1, "rowmm_parts_norm": 1})
OF_MORE = Counter({"moe_down": 1, "moe_sum": 1, "rowmm_parts": 1})
DELTANET = OUT + Counter({"rowmm_parts": 1, "deltanet_parts": 1, "rowmm_pack_gated": 1})
ATTENTION = OUT + Counter({"rowmm_parts": 1, "attention_heads": 1, "attention_packed": 1})

Steps = dict[str, tuple[Counter[str], Counter[str]]]  # A step ("verify of 1") has luce's ops and ggml's.


@pytest.fixture
def steps(native: Library, device: str) -> Callable[..., Steps]:
    """Counts the ops of all steps of an engine that drafts where it can."""

    def count(path: Path, head: drive.Head = False, drafter: Path | None = None) -> Steps:
        model = drive.open_model(native, path, device, head=head, drafter=drafter)
        said: list[str] = []
        native.set_log(lambda level, text: said.append(text))
        try:
            drive.open_engine(
                model, n_ctx=64, n_rows=4, n_draft=int(bool(head)), blocks=int(drafter is not None)
            ).close()
        finally:
            native.set_log(None)
        found = {}
        for text in said:
            if step := re.fullmatch(r"a (.*) rows: (.*), of ggml: (.*)", text):
                listed = (
                    [part.rsplit(" ", 1) for part in ops.split(", ") if part] for ops in step.groups()[1:]
                )
                ours, theirs = (Counter({name: int(n) for name, n in ops}) for ops in listed)
                found[step[1]] = (ours, theirs)
        return found

    return count


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_layers_launches_are_those_that_are_listed(
    experts: bool, rows: int, steps: Callable[..., Steps], native: Library, device: str, tmp_path: Path
) -> None:
    def of(*recurrent: bool) -> tuple[Counter[str], Counter[str]]:
        c = replace(CONFIG, n_layer=len(recurrent), recurrent=recurrent)
        c = tiny.with_experts(c) if experts else c
        path = tmp_path / f"{recurrent}.gguf"
        tiny.write(path, c, tiny.layout(c, 1), "Q8_0", quantize=native.quantize)
        return steps(path)[f"verify of {rows}"]

    ours, theirs = of(True, False)
    for added, expected in ((True, DELTANET), (False, ATTENTION)):
        more, more_theirs = of(added, True, False)
        if device.startswith("cpu"):
            # There is one for the weights of each input; the router and the shared expert's gate share one.
            assert (more - ours)["rows_matmul"] == (5 if experts else 4)
            assert (more - ours)["deltanet" if added else "attention"] == 1
        else:
            mixture = expected - OUT + MIXTURE
            mixture = mixture - OF_MORE + ONE_ROW if rows == 1 else mixture
            assert more - ours == (mixture if experts else expected)
            assert more_theirs == theirs  # No layer launches one.
    assert DELTANET.total() == 9
    assert ATTENTION.total() + 1 == 10  # Attention itself is two kernels.


@pytest.mark.parametrize(
    ("files", "drafts"),
    [("box", {"draft of 1", "block of 16"}), ("drafter", {"block of 5"}), ("IQ3_S", {"draft of 1"}),
     ("assistant", {"draft of 1"}), ("ordered", {"draft of 1"})],  # fmt: skip
)
def test_what_is_kept_of_ggml_is_listed(
    files: str, drafts: set[str], steps: Callable[..., Steps], native: Library, device: str, tmp_path: Path
) -> None:
    kept = LOWER_GPU.read_text().split("keeps of ggml-cuda")[1].split("test_launches.py")[0]
    listed = set(re.findall(r"\b[A-Z][A-Z_]{2,}\b", kept))
    if files == "box":
        found = steps(box_model.GGUF, True, box_model.DRAFTER)
    elif files == "drafter":
        target, drafter = tiny_dflash.files(tmp_path, tiny_dflash.CASES["yarn-own-vocabulary"])
        found = steps(target, False, drafter)
    elif files in ("assistant", "ordered"):
        case, own = ("per-layer", tiny_gemma4.ORDERED) if files == "ordered" else ("dense", tiny_gemma4.ASSISTANT)
        config, seed = tiny_gemma4.CASES[case]
        target = tiny_gemma4.write(tmp_path / "target.gguf", config, tiny_gemma4.layout(config, seed))
        found = steps(target, tiny_gemma4.write(tmp_path / "assistant.gguf", own, tiny_gemma4.layout(own, 1)))
        clusters = {name: ours["cluster_logits"] for name, (ours, _) in found.items()}
        assert {name for name, n in clusters.items() if n} == (drafts if files == "ordered" else set())
    else:
        c = replace(CONFIG, n_layer=2, recurrent=(True, False), n_nextn=1)
        type_of, quantize = drive.type_of(files), partial(drive.quantize, native)
        found = steps(tiny.write(tmp_path / "x.gguf", c, tiny.layout(c, 1), type_of, quantize=quantize), True)
    assert {"verify of 1", *drafts} <= found.keys()
    for name, (ours, theirs) in found.items():
        chooses = 0 if name.startswith("feed") else 1  # Tokens are chosen, and sampled, where logits are.
        assert ours["choose"] == chooses, name
        looks_up = name.startswith(("draft", "feed"))  # The op nextn_pack does, of a type that it knows.
        assert theirs.keys() & MOVED or looks_up, name
        assert device.startswith("cpu") or theirs.keys() <= listed, name
    assert MOVED <= listed
