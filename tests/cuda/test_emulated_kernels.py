"""Runs checks of CUDA kernels on a CPU too: the same sources are compiled as C++ over an emulation of a
block's threads and of the tensor core. This proves indices, layouts, and who waits for whom in a block. It
says nothing of a device's rounding, of memory order between blocks, or of speed. Compiling takes longest, so
the gate runs them as a stage of its own: `pytest tests/cuda`."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS, CHECKS = ROOT / "native/kernels", ROOT / "tests/cuda"

# A GPU refuses what is not aligned, and a CPU takes it.
ALIGNED = ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]


def as_cpp(text: str) -> str:
    """Launches and dynamic shared memory in C++; what else CUDA adds are macros."""
    shared = r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];"
    text = re.sub(shared, r"\1 *\2 = reinterpret_cast<\1 *>(emulated::dynamic_shared);", text)
    text = re.sub(r"^( *)__shared__ (.*);(?: //.*)?$", counted, text, flags=re.M)
    return re.sub(
        r"(\w+(?:<[\w, ]+>)?)\s*<<<(.*?),(.*?),([^,]*?),\s*([^,]*?)>>>\((.*?)\);",
        r"emulated::launch(\2, \3, \4, [&] { \1(\6); });",
        text,
        flags=re.S,
    )


def counted(found: re.Match[str]) -> str:
    """What a kernel declares as shared, with its bytes told to the emulated device."""
    names = re.findall(r"(\w+)(?:\[[^\]]*\])*(?=,|$)", re.sub(r"<.*?>", "", found[2]))
    told = "".join(f" emulated::declares(&{name}, sizeof({name}));" for name in names)
    return f"{found[1]}static {found[2]};{told}"


def build(folder: Path, kernels: list[str], checks: list[str], check: str, *flags: str) -> Path:
    for source in [*KERNELS.glob("*.h"), *KERNELS.glob("*.cuh"), *CHECKS.glob("*.h")]:
        (folder / source.name).write_text(as_cpp(source.read_text()))
    for source in (CHECKS / "emulated").iterdir():
        if source.stem in check or not source.name.startswith("lay_out_"):
            shutil.copy(source, folder)
    objects = []
    for source in [*(KERNELS / name for name in kernels), *(CHECKS / name for name in checks)]:
        (folder / source.name).with_suffix(".cpp").write_text(as_cpp(source.read_text()))
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


# Each check is of a file, and needs these kernels.
CHECKED = {
    "moe_check.cu": (
        "check_moe(false), lay_out_experts()",
        ["rowmm_permute.cu", "rowmm_pack.cu", "hand_over.cu", *(f.name for f in KERNELS.glob("moe_*.cu"))],
    ),
    # Blocks of one team and of two (rowmm_kernel.cuh) have ranges that begin anywhere in K.
    "rowmm_check.cu": (
        "check_rowmm_ranges(), lay_out_products()",
        ["rowmm.cu", "rowmm_permute.cu", "rowmm_pack.cu", *(f.name for f in KERNELS.glob("rowmm_rows_*.cu"))],
    ),
    "rowmm_norm_check.cu": (
        "check_rowmm_norm(false), lay_out_norms()",
        ["rowmm.cu", "rowmm_permute.cu", "rowmm_pack.cu", *(f.name for f in KERNELS.glob("rowmm_rows_*.cu"))],
    ),
    "rowmm_gated_check.cu": (
        "check_rowmm_gated(false)",
        ["rowmm.cu", "rowmm_permute.cu", "rowmm_pack.cu", *(f.name for f in KERNELS.glob("rowmm_rows_*.cu"))],
    ),
    "attention_plan_check.cu": ("check_attention_plan(false)", []),
    "attention_heads_check.cu": (
        "check_attention_heads(false)",
        ["attention_heads.cu", "norm_rope.cu", "kv_pages.cu"],
    ),
    "nextn_check.cu": ("check_nextn(false)", ["nextn.cu", "rowmm_pack.cu"]),
    "choose_check.cu": (
        "check_choose(false)",
        ["choose.cu", "choices.cu", "nextn.cu", "rowmm.cu", "rowmm_permute.cu", "rowmm_pack.cu"]
        + [f.name for f in KERNELS.glob("rowmm_rows_*.cu")],
    ),
    "topk_check.cu": ("check_topk(false)", ["topk.cu"]),
    # How work is shared out is the same for all types of cells; the tensor cores' kernels are not run.
    "attention_check.cu": (
        "check_attention_f32()",
        ["attention.cu", "attention_combine.cu", "kv_pages.cu", "rowmm_pack.cu"],
    ),
    "attention_block_check.cu": ("check_attention_block(false)", ["attention_block.cu", "kv_pages.cu"]),
    "kv_pages_check.cu": ("check_kv_pages(false)", ["kv_pages.cu"]),
    "deltanet_check.cu": ("check_deltanet_rows(), lay_out_deltanet()", ["deltanet.cu", "deltanet_conv.cu"]),
    "deltanet_layer_check.cu": (
        "check_deltanet_layer(false)",
        ["deltanet.cu", "deltanet_conv.cu", "deltanet_layer.cu"]
        + ["rowmm.cu", "rowmm_permute.cu", "rowmm_rows_norm.cu"],
    ),
    "pack_check.cu": (
        "check_pack(false), lay_out_packs()",
        ["rowmm.cu", "rowmm_pack.cu", "rowmm_permute.cu", "rowmm_rows_norm.cu", "deltanet_conv.cu"],
    ),
}


def test_what_waits_for_ever_is_stopped(tmp_path: Path) -> None:
    """Down of a mixture polls for the experts that up leaves, and up is not launched."""
    program = build(tmp_path, CHECKED["moe_check.cu"][1], ["moe_check.cu"], "moe_gives_up()")
    ran = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == -signal.SIGABRT and re.fullmatch(r"thread \d+ of block \d+ traps\n", ran.stderr)


def run(program: Path) -> None:
    ran = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("file", CHECKED)
def test_a_check_of_kernels_passes_on_the_emulated_device(file: str, tmp_path: Path) -> None:
    check, kernels = CHECKED[file]
    run(build(tmp_path, kernels, [file], check))


@pytest.mark.parametrize("file", ["rowmm_gated_check.cu", "rowmm_norm_check.cu"])
def test_products_of_few_rows_pass_where_all_lanes_of_a_warp_copy(file: str, tmp_path: Path) -> None:
    """Devices before 9.0 have no bulk copies, which one lane begins."""
    check, kernels = CHECKED[file]
    run(build(tmp_path, kernels, [file], check, "-DWITHOUT_BULK"))
