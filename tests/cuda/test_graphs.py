"""Holds what steps launch to recorded lists, on a pretended GPU (graphs/recorder.py): which ops in which order, and
all that their launchers get. It says nothing of what the kernels compute.

Where another launch is meant, the lists that graphs/recorder.py writes before and after show it line by line, and its
launches.txt replaces the one here."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cuda.graphs import recorder
from cuda.once import once, shared

LAUNCHES = Path(__file__).resolve().parent / "graphs/launches.txt"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, which is built once, in a folder of this process: it leaves models there."""
    built = once(shared(tmp_path_factory, "recorder") / "build", recorder.build)
    return Path(shutil.copy(built / "steps", tmp_path_factory.mktemp("recorder") / "steps"))


@pytest.fixture(scope="module")
def lists(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(shared(tmp_path_factory, "recorder") / "lists", partial(recorder.record, program))


def models(text: str) -> dict[str, list[str]]:
    return {part.split("\n", 1)[0]: part.splitlines() for part in text.split("==== ")[1:]}


def test_steps_launch_what_is_recorded(lists: Path) -> None:
    found, expected = models((lists / "launches.txt").read_text()), models(LAUNCHES.read_text())
    assert found.keys() == expected.keys() == recorder.CASES.keys()
    for name in expected:
        assert found[name] == expected[name], f"{name}: compare what recorder.py writes before and after"


def steps(lists: Path, name: str) -> dict[str, list[str]]:
    parts = (lists / f"{name}.launches").read_text().split("== ")[1:]
    return {part.split("\n", 1)[0]: part.splitlines()[1:] for part in parts}


def test_copies_spare_prompts_what_writes_matrices_out(lists: Path) -> None:
    without, having = steps(lists, "27b"), steps(lists, "27b-copies")
    unpacked, spared = (
        {step: sum("rowmm_unpack" in line for line in lines) for step, lines in found.items()}
        for found in (without, having)
    )
    assert without.keys() == having.keys()
    for step, lines in having.items():
        reads = sum(line.count(".f16 out=") for line in lines if "gemm_copies" in line)
        assert reads + spared[step] == unpacked[step]
        if unpacked[step] == 0:
            assert lines == without[step]
        else:
            assert 0 < reads < unpacked[step]


def test_each_layer_of_a_drafter_attends_with_its_own_sinks(lists: Path) -> None:
    blocks = [lines for step, lines in steps(lists, "small-dspark-sinks").items() if step.startswith("block")]
    for lines in blocks:
        attends = [line for line in lines if re.match(r"    (block_)?attention pool=", line)]
        found = [re.findall(r" (?:block|sinks)=(\S+)", line) for line in attends]
        # The first layer is causal; rows of the second one's blocks, seven each, see each other.
        assert found == [["0", "blk.0.attn_sinks.weight"], ["7", "blk.1.attn_sinks.weight"]]
    assert len(blocks) == 4


@pytest.mark.parametrize("name", recorder.CASES)
def test_a_launch_has_to_do_with_its_ops_tensors_alone(name: str, lists: Path) -> None:
    """Memory of others may be given to another op before."""
    text = (lists / f"{name}.launches").read_text()
    assert "NOT A SOURCE" not in text and "beyond it" not in text


@pytest.mark.parametrize(
    ("name", "stages"),
    [("27b", 2), ("27b-copies", 2), ("27b-dflash", 4), ("small-f32", 3), ("small-iq2", 3), ("small-dflash2", 3),
     ("35b", 2), ("gemma4-26b", 2)],
)  # fmt: skip
def test_a_stage_reads_what_is_its_own(name: str, stages: int, program: Path) -> None:
    recorder.check_stages(program, name, recorder.CASES[name], stages)


@pytest.mark.parametrize(
    ("name", "stages"), [("27b", 1), ("27b-dflash", 2), ("small-dflash2", 1), ("small-dspark", 3), ("35b", 1)]
)
def test_what_drafts_apart_reads_what_is_its_own(name: str, stages: int, program: Path) -> None:
    recorder.check_stages(program, name, recorder.CASES[name], stages, drafts_apart=True)


@pytest.mark.parametrize(
    ("name", "ranks", "packs"),
    [("27b", 2, True), ("27b", 4, True), ("27b-dflash", 2, True), ("small-f32", 2, True), ("35b", 2, False),
     ("35b-unshared", 2, False), ("gemma4-31b-q8", 2, False), ("gemma4-26b", 2, False)],
)  # fmt: skip
def test_a_rank_reads_what_is_its_own(name: str, ranks: int, packs: bool, program: Path) -> None:
    """Each sum is exchanged once by each rank, in steps and prompts. In a dense model's step all are packed there for
    the product behind. Logits are gathered where there are some."""
    case = recorder.CASES[name]
    a_layer = (3 if name == "gemma4-26b" else 2) * ranks  # Trials have a layer of each kind.
    sums, ends = set(), 0
    for line in recorder.check_ranks(program, name, replace(case, assistant=None), ranks):
        found = {op: int(n) for op, n in re.findall(r"\b(exchange\w*) (\d+)", line)}
        in_trunk = "verify" in line or "prefill" in line
        assert bool(found) == in_trunk and sum(found.values()) % a_layer == 0, line
        if in_trunk:
            sums.add(sum(found.values()))
            assert found.get("exchange", 0) == (0 if packs and "verify" in line else sum(found.values())), line
        gathers = [int(n) for n in re.findall(r"\bgather (\d+)", line)]
        assert gathers in ([[ranks]] if "verify" in line else [[], [ranks]] if in_trunk else [[]]), line
        ends += bool(gathers) and "prefill" in line
    assert max(sums) == case.config.n_layer * a_layer and ends > 0


def test_ranks_have_room_for_the_logits_of_all_sequences(program: Path) -> None:
    """Of a vocabulary beside which a prompt's rows are few values: a verify has rows of several sequences."""
    case = recorder.CASES["small-f32"]
    recorder.check_ranks(program, "wide", replace(case, config=replace(case.config, n_vocab=1 << 16)), 2)


# As E2B, of 8 layers, of which the last 4 read cells of layers 2 and 3; as 31B, whose assistant reads the last two's.
SHARED = replace(recorder.GEMMA4["E2B"], sliding=(True, False) * 4, n_shared_kv=4)
LAST = replace(recorder.GEMMA4["31B"], sliding=(True, False) * 2)


@pytest.mark.parametrize(
    ("name", "case"),
    [("shared", recorder.Case(SHARED, recorder.K_QUANTS)),
     ("shared-assistant", recorder.Case(SHARED, recorder.K_QUANTS, assistant=recorder.ASSISTANT_OF_E2B)),
     ("assistant", recorder.Case(LAST, recorder.K_QUANTS, assistant=recorder.ASSISTANT))])  # fmt: skip
def test_layers_that_read_cells_lie_on_one_gpu(name: str, case: recorder.Case, program: Path) -> None:
    """Where luce cuts the model; cut in halves, one whose layers share cells is refused."""
    recorder.check_stages(program, name, case, 2, alike=False)
    if case.config is SHARED:
        with pytest.raises(AssertionError, match="cut ahead of layer 4: layers 2 to 7 lie on one GPU"):
            recorder.check_stages(program, name, case, 2)


LARGE = replace(recorder.LARGE, n_embd=1024, n_ff=3072, n_v_head=16, n_head=8, n_head_kv=2)
WINDOWS = replace(recorder.GEMMA4["31B"], n_embd=1024, n_ff=3072, n_head=8, n_head_kv=2, n_head_kv_swa=4)


RECURRENT, WINDOWED = (recorder.Case(config, recorder.K_QUANTS) for config in (LARGE, WINDOWS))


@pytest.mark.parametrize(
    ("case", "n_ctx"),
    [(replace(RECURRENT, options={"head": 1}), 131072), (WINDOWED, 131072), (WINDOWED, 512), (WINDOWED, 1500)],
    ids=["recurrent", "windows", "short", "short and odd"],
)
def test_prompts_of_any_context_fit_what_an_engine_measures(case: recorder.Case, n_ctx: int, program: Path) -> None:
    """Attention of fewer rows than a chunk has may take its ranges of positions apart, which needs more memory. Several
    prompts have more positions than one where contexts are short."""
    recorder.check_fits(program, "long", case, n_ctx)


@pytest.mark.parametrize("name", ["35b", "gemma4-26b"])
def test_slots_add_tables_to_launches_and_no_launch(lists: Path, name: str) -> None:
    """Every launch that reads an expert of the trunk has its table, and every step counts; prompts do not."""
    n_layer = recorder.CASES[name].config.n_layer
    without, having = steps(lists, name), steps(lists, f"{name}-slots")
    assert without.keys() == having.keys()
    for step, lines in having.items():
        plain = [re.sub(r"(offsets|counts)=expert_\w+\.\d+(\+\d+)?", r"\1=null", line) for line in lines]
        assert plain == without[step]
        reads = [line for line in lines if re.search(r"moe_(up|down|end) dims", line)]
        for line in reads:
            for layer, table in re.findall(r"packed=blk\.(\d+)\.ffn_\w+_exps\S* expert_bytes=\d+ offsets=(\S+)", line):
                assert table.startswith(f"expert_offsets.{layer}" if int(layer) < n_layer else "null"), line
        trunk = sum("moe_up" in line and "expert_offsets" in line for line in reads)
        counted = sum("counts=expert_counts." in line for line in lines)
        assert counted == (0 if step.startswith("prefill") else trunk)
