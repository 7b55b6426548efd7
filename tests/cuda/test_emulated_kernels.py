"""Runs checks of CUDA kernels on a CPU too: the same sources are compiled as C++ over an emulation of a
block's threads and of the tensor core. This proves indices, layouts, and who waits for whom in a block. It
says nothing of a device's rounding, of memory order between blocks, or of speed. Compiling takes longest, so
the gate runs them as a stage of its own: `pytest tests/cuda`."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda.as_cpp import as_cpp, copy
from cuda.once import once, shared

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS, CHECKS = ROOT / "native/kernels", ROOT / "tests/cuda"
EMULATED = CHECKS / "emulated"
FORMS, PTX = "matmul/forms.cu", "matmul/ptx.cuh"

# A GPU refuses what is not aligned, and a CPU takes it. What lies outside of an array is another one's on both.
CHECKED_ACCESS = ["-fsanitize=alignment,bounds", "-fno-sanitize-recover=alignment,bounds"]
COMPILE = ["c++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-I", "."]
COMPILE += ["-fno-strict-aliasing"]  # CUDA's compiler takes it so.
COMPILE += ["-mf16c", "-mfma"] if platform.machine() in ("x86_64", "AMD64") else []  # luce asks for them there.
COMPILE += ["-ffunction-sections", "-fno-jump-tables", *CHECKED_ACCESS]  # A table would keep what no check reaches.
RUNTIME = "cuda_runtime.h"  # Each file begins with it, and so it is read once.


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder that all processes of a run share: an object that several checks need is compiled once."""
    folder = shared(tmp_path_factory, "emulated")
    once(folder / "sources", write_sources)
    return folder


def write_sources(folder: Path) -> None:
    """Writes headers, kernels and checks as C++, and the emulation over them. Folders stay as they are."""
    for top in (KERNELS, CHECKS):
        for source in (file for kind in ("*.h", "*.cuh", "*.cu") for file in top.rglob(kind)):
            if EMULATED not in source.parents:
                name = source.relative_to(top)
                copy(as_cpp(source.read_text()), folder / (name.with_suffix(".cpp") if name.suffix == ".cu" else name))
    for source in (source for source in EMULATED.rglob("*") if source.is_file()):
        copy(source.read_text(), folder / source.relative_to(EMULATED))
    words = [*COMPILE, "-x", "c++-header", RUNTIME, "-o", f"{RUNTIME}.gch"]
    subprocess.run(words, cwd=folder, check=True)


def reads(sources: Path, source: str, header: str) -> bool:
    """Says whether a source includes the header, or one does that it includes."""
    left, seen = [Path(source)], set()
    while left:
        path = left.pop()
        if path.as_posix() == header:
            return True
        if path not in seen and (sources / path).is_file():
            seen.add(path)
            names = re.findall(r'^#include "(.*)"', (sources / path).read_text(), flags=re.M)
            left += [Path(os.path.normpath(folder / name)) for name in names for folder in (Path(), path.parent)]
    return False


def build(workshop: Path, folder: Path, kernels: list[str], checks: list[str], check: str, *flags: str) -> Path:
    """Returns the program of `check`, a list of calls. It is of these kernels and checks. The flags are for what reads
    matmul/ptx.cuh: other objects are those without."""
    laid_out = [name.strip(" ()") for name in check.split(",") if "lay_out_" in name]
    sources = [*kernels, *checks, *(f"{name}.cpp" for name in laid_out), "without_rowmm.cpp"]
    commands = [[str(Path(source).with_suffix(".cpp"))] for source in sources if source != FORMS]
    for command in commands:
        command += flags if flags and reads(workshop / "sources", command[0], PTX) else ()
    if FORMS in sources:  # What one file lists in forms is compiled side by side.
        forms = re.findall(r"rowmm_kernel_of<(\d.*)>", (KERNELS / FORMS).read_text())
        commands += [[str(Path(FORMS).with_suffix(".cpp")), f"-DROWMM_FORM={form}", *flags] for form in forms]
    commands.append(["main.cpp", f"-DCHECK={check}"])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda words: compiled(workshop, *words), commands))
    # What the check does not reach is left out, and need not be there.
    subprocess.run(["c++", *objects, *CHECKED_ACCESS, "-Wl,--gc-sections", "-o", str(folder / "check")], check=True)
    return folder / "check"


def compiled(workshop: Path, source: str, *flags: str) -> Path:
    """Returns the object of a source with these flags. Who needs it first compiles it, others wait."""
    made = workshop / f"{Path(source).stem}-{hashlib.sha256(' '.join((source, *flags)).encode()).hexdigest()[:16]}.o"
    command = [*COMPILE, *flags, "-include", RUNTIME, "-c", source]
    return once(made, lambda part: subprocess.run([*command, "-o", str(part)], cwd=workshop / "sources", check=True))


# All forms of the product's kernel, and those of few rows.
ROWS = [FORMS, "matmul/norm_first.cu", "matmul/whole_k.cu"]

MOE = [f"moe/{f.name}" for f in (KERNELS / "moe").glob("*.cu")]

# Each check is of a file, and needs these kernels.
CHECKED = {
    "moe_check.cu": (
        "check_moe(false), lay_out_experts()",
        ["matmul/permute.cu", "matmul/pack.cu", "common/h2d.cu", *MOE],
    ),
    # Blocks of one team and of two (matmul/kernel.cuh) have ranges that begin anywhere in K.
    "rowmm_check.cu": (
        "check_rowmm_ranges(), lay_out_products()",
        ["matmul/quantised.cu", "matmul/permute.cu", "matmul/pack.cu", *ROWS],
    ),
    "rowmm_norm_check.cu": (
        "check_rowmm_norm(false), lay_out_norms()",
        ["matmul/quantised.cu", "matmul/permute.cu", "matmul/pack.cu", *ROWS],
    ),
    "attention_plan_check.cu": ("check_attention_plan(false)", []),
    "attention_heads_check.cu": (
        "check_attention_heads(false)",
        ["attention/heads.cu", "attention/norm_rope.cu", "attention/kv_pages.cu"],
    ),
    "nextn_check.cu": ("check_nextn(false)", ["sampling/nextn.cu", "matmul/pack.cu"]),
    "choose_check.cu": ("check_choose(false)", ["sampling/choose.cu", "sampling/choices.cu"]),
    "topk_check.cu": ("check_topk(false)", ["sampling/topk.cu"]),
    "clusters_check.cu": ("check_clusters(false)", ["sampling/clusters.cu"]),
    "draft_block_check.cu": ("check_draft_block(false)", ["sampling/draft_block.cu", "sampling/topk.cu"]),
    # Wgmma is not emulated: the device is one of before Hopper.
    "attention_check.cu": (
        "emulated::kind = &emulated::KINDS[2], check_attention_f32(), check_attention_tiles()",
        ["attention/attention.cu", "attention/combine.cu", "attention/kv_pages.cu", "matmul/pack.cu"],
    ),
    "attention_block_check.cu": (
        "check_attention_block(false)",
        ["attention/block.cu", "attention/kv_pages.cu"],
    ),
    "exchange_check.cu": (
        "check_exchange(false)",
        ["exchange/exchange.cu", "exchange/norm.cu", "exchange/gather.cu"]
        + ["matmul/quantised.cu", "matmul/pack.cu", "matmul/permute.cu", "matmul/norm_first.cu"],
    ),
    "copies_check.cu": ("check_copies(true)", ["common/copies.cu"]),
    "image_rows_check.cu": ("check_image_rows(false)", ["common/image_rows.cu"]),
    "row_scores_check.cu": ("check_row_scores(false)", ["attention/row_scores.cu", "attention/kv_pages.cu"]),
    "kv_pages_check.cu": ("check_kv_pages(false)", ["attention/kv_pages.cu"]),
    "deltanet_check.cu": (
        "check_deltanet_rows(), check_deltanet_prompts(), check_deltanet_chunks(), lay_out_deltanet()",
        ["deltanet/deltanet.cu", "deltanet/conv.cu", "deltanet/chunks.cu"],
    ),
    "attention_prefill_check.cu": ("check_attention_prompts()", ["attention/prefill.cu"]),
    "deltanet_layer_check.cu": (
        "check_deltanet_layer(false)",
        ["deltanet/deltanet.cu", "deltanet/conv.cu", "deltanet/layer.cu"]
        + ["matmul/quantised.cu", "matmul/permute.cu", "matmul/norm_first.cu"],
    ),
    "pack_check.cu": (
        "check_pack(false), lay_out_packs()",
        ["matmul/quantised.cu", "matmul/pack.cu", "matmul/permute.cu"]
        + ["matmul/norm_first.cu", "deltanet/conv.cu", "moe/post.cu"],
    ),
}


def test_what_waits_for_ever_is_stopped(workshop: Path, tmp_path: Path) -> None:
    """Down of a mixture polls for the experts that up leaves, and up is not launched."""
    program = build(workshop, tmp_path, CHECKED["moe_check.cu"][1], ["moe_check.cu"], "moe_gives_up()")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == -signal.SIGABRT and re.fullmatch(r"thread \d+ of block \d+ traps\n", ran.stderr)


def run(program: Path) -> None:
    # The longest took 554 seconds on two cores that did other work too. What hangs is stopped at last.
    ran = subprocess.run([program], capture_output=True, text=True, timeout=1800, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("file", CHECKED)
def test_a_check_of_kernels_passes_on_the_emulated_device(file: str, workshop: Path, tmp_path: Path) -> None:
    check, kernels = CHECKED[file]
    run(build(workshop, tmp_path, kernels, [file], check))


@pytest.mark.parametrize("file", ["rowmm_check.cu", "rowmm_norm_check.cu"])
@pytest.mark.parametrize("kind", [1, 2], ids=["8.0", "8.6"])
def test_products_of_few_rows_pass_where_all_lanes_of_a_warp_copy(
    file: str, kind: int, workshop: Path, tmp_path: Path
) -> None:
    """Devices before 9.0 have no bulk copies, which one lane begins. 8.6 has a block a multiprocessor, and of up to 32
    rows beside Q8_0 fewer stages of activations than the shape."""
    check, kernels = CHECKED[file]
    check = check.split(",")[0]  # launches are laid out on every kind elsewhere
    check += ", check_rowmm_kind()" if (file, kind) == ("rowmm_check.cu", 2) else ""
    check = f"emulated::kind = &emulated::KINDS[{kind}], {check}"
    run(build(workshop, tmp_path, kernels, [file], check, "-DWITHOUT_BULK"))


def test_attention_of_prompts_passes_where_blocks_have_one_head(workshop: Path, tmp_path: Path) -> None:
    """8.6 has no wgmma."""
    check = "emulated::kind = &emulated::KINDS[2], check_attention_prompts()"
    run(build(workshop, tmp_path, CHECKED["attention_prefill_check.cu"][1], ["attention_prefill_check.cu"], check))


def test_the_delta_rule_passes_where_few_states_are_saved(workshop: Path, tmp_path: Path) -> None:
    """8.6 has no room for three saved states beside as many blocks as a step needs."""
    check = "emulated::kind = &emulated::KINDS[2], check_deltanet_rows()"
    run(build(workshop, tmp_path, CHECKED["deltanet_check.cu"][1], ["deltanet_check.cu"], check))


def test_experts_have_the_same_bits_where_an_item_has_fewer_rows(workshop: Path, tmp_path: Path) -> None:
    """8.6 has no room for eight rows of 4096 values beside the weights."""
    check = "emulated::kind = &emulated::KINDS[2], check_items_of_fewer_rows()"
    run(build(workshop, tmp_path, CHECKED["moe_check.cu"][1], ["moe_check.cu"], check))
