"""Runs checks of CUDA kernels on a CPU too: the same sources are compiled as C++ over an emulation of a
block's threads and of the tensor core. This proves indices, layouts, and who waits for whom in a block. It
says nothing of a device's rounding, of memory order between blocks, or of speed. Compiling takes longest, so
the gate runs them as a stage of its own: `pytest tests/cuda`."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
from cuda.as_cpp import as_cpp, copy

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS, CHECKS = ROOT / "native/kernels", ROOT / "tests/cuda"

# A GPU refuses what is not aligned, and a CPU takes it.
ALIGNED = ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]


def build(folder: Path, kernels: list[str], checks: list[str], check: str, *flags: str) -> Path:
    headers = [(KERNELS, "*.h"), (KERNELS, "*.cuh"), (CHECKS, "*.h")]
    for root, source in ((top, each) for top, kind in headers for each in top.rglob(kind)):
        if CHECKS / "emulated" not in source.parents:
            copy(as_cpp(source.read_text()), folder / source.relative_to(root))
    emulated = CHECKS / "emulated"
    for source in (source for source in emulated.rglob("*") if source.is_file()):
        if source.stem in check or not source.name.startswith("lay_out_"):
            copy(source.read_text(), folder / source.relative_to(emulated))
    objects = []
    for source in [*(KERNELS / name for name in kernels), *(CHECKS / name for name in checks)]:
        text = as_cpp(source.read_text())
        # What one file lists in forms is compiled side by side.
        forms = re.findall(r"rowmm_kernel_of<(\d.*)>", text) if source.name == "forms.cu" else [None]
        for i, form in enumerate(forms):
            defined = "" if form is None else f"#define ROWMM_FORM {form}\n"
            (folder / f"{source.stem}_{i}.cpp").write_text(defined + text)
    commands = []
    for source in folder.glob("*.cpp"):
        objects.append(str(source.with_suffix(".o")))
        command = ["c++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-I", str(folder)]
        command += ["-fno-strict-aliasing"]  # CUDA's compiler takes it so.
        command += ["-ffunction-sections", "-fno-jump-tables"]  # A table would keep what no check reaches.
        command += [*ALIGNED, *flags]
        command += ["-include", "cuda_runtime.h", f"-DCHECK={check}", "-c", str(source)]
        commands.append(subprocess.Popen([*command, "-o", objects[-1]], cwd=folder))
    assert all(command.wait() == 0 for command in commands)
    # What the check does not reach is left out, and need not be there.
    subprocess.run(["c++", *objects, *ALIGNED, "-Wl,--gc-sections", "-o", str(folder / "check")], check=True)
    return folder / "check"


# All forms of the product's kernel, and those of few rows.
ROWS = ["matmul/forms.cu", "matmul/norm_first.cu", "matmul/whole_k.cu"]

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
    # How work is shared out is the same for all types of cells; the tensor cores' kernels are not run.
    "attention_check.cu": (
        "check_attention_f32()",
        ["attention/attention.cu", "attention/combine.cu", "attention/kv_pages.cu", "matmul/pack.cu"],
    ),
    "attention_block_check.cu": (
        "check_attention_block(false)",
        ["attention/block.cu", "attention/kv_pages.cu"],
    ),
    "kv_pages_check.cu": ("check_kv_pages(false)", ["attention/kv_pages.cu"]),
    "deltanet_check.cu": (
        "check_deltanet_rows(), lay_out_deltanet()",
        ["deltanet/deltanet.cu", "deltanet/conv.cu"],
    ),
    "deltanet_layer_check.cu": (
        "check_deltanet_layer(false)",
        ["deltanet/deltanet.cu", "deltanet/conv.cu", "deltanet/layer.cu"]
        + ["matmul/quantised.cu", "matmul/permute.cu", "matmul/norm_first.cu"],
    ),
    "pack_check.cu": (
        "check_pack(false), lay_out_packs()",
        ["matmul/quantised.cu", "matmul/pack.cu", "matmul/permute.cu"]
        + ["matmul/norm_first.cu", "deltanet/conv.cu"],
    ),
}


def test_what_waits_for_ever_is_stopped(tmp_path: Path) -> None:
    """Down of a mixture polls for the experts that up leaves, and up is not launched."""
    program = build(tmp_path, CHECKED["moe_check.cu"][1], ["moe_check.cu"], "moe_gives_up()")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == -signal.SIGABRT and re.fullmatch(r"thread \d+ of block \d+ traps\n", ran.stderr)


def run(program: Path) -> None:
    # The longest took 554 seconds on two cores that did other work too. What hangs is stopped at last.
    ran = subprocess.run([program], capture_output=True, text=True, timeout=1800, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("file", CHECKED)
def test_a_check_of_kernels_passes_on_the_emulated_device(file: str, tmp_path: Path) -> None:
    check, kernels = CHECKED[file]
    run(build(tmp_path, kernels, [file], check))


@pytest.mark.parametrize("file", ["rowmm_check.cu", "rowmm_norm_check.cu"])
def test_products_of_few_rows_pass_where_all_lanes_of_a_warp_copy(file: str, tmp_path: Path) -> None:
    """Devices before 9.0 have no bulk copies, which one lane begins."""
    check, kernels = CHECKED[file]
    check = check.split(",")[0]  # launches are laid out on every kind elsewhere
    run(build(tmp_path, kernels, [file], f"emulated::kind = &emulated::KINDS[1], {check}", "-DWITHOUT_BULK"))
