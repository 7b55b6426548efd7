"""tools/build_card.py compiles kernels for a card's generation, into a Hopper's instructions."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD_CARD = runpy.run_path(str(ROOT / "tools/build_card.py"))
COMMAND = (
    "nvcc -forward-unknown-to-host-compiler -DLUCE_USE_CUDA -I/k -O3 -std=c++17"
    ' "--generate-code=arch=compute_90a,code=[sm_90a]"'
    " -Xcompiler=-fPIC -fmad=false -MD -MT luce.dir/a.cu.o -MF luce.dir/a.cu.o.d -x cu -c /k/a.cu -o luce.dir/a.cu.o"
)


@pytest.fixture
def build(tmp_path: Path) -> Path:
    entries = [
        {"directory": str(tmp_path), "file": "/k/a.cu", "command": COMMAND.replace("luce.dir", "CMakeFiles/luce.dir")},
        {"directory": str(tmp_path), "file": "/g/b.cu", "command": COMMAND.replace("luce.dir", "CMakeFiles/ggml.dir")},
    ]
    (tmp_path / "compile_commands.json").write_text(json.dumps(entries))
    return tmp_path


def test_only_the_kernels_of_luce_are_compiled_anew(build: Path) -> None:
    found = BUILD_CARD["commands_of"](build)
    assert [source for source, *_ in found] == [Path("/k/a.cu")]


def test_a_command_keeps_all_but_the_generation_and_the_object(build: Path) -> None:
    _, _, command, _ = BUILD_CARD["commands_of"](build)[0]
    made = BUILD_CARD["for_card"]("RTX 3090", Path("/k/a.cu"), Path("/to/a.o"), command)
    assert made[:7] == command[:6] + ["-Xcompiler=-fPIC"]  # the generation was between
    assert "-fmad=false" in made and not any("90a" in word for word in made)
    assert made[made.index("-gencode") + 1] == "arch=compute_86,code=sm_90"
    assert made[-4:] == ["-c", "/k/a.cu", "-o", "/to/a.o"] and made.count("-o") == made.count("-c") == 1
    assert '-DLUCE_CARD="RTX 3090"' in made


def test_every_card_to_pretend_is_in_the_table_with_its_generation() -> None:
    known = runpy.run_path(str(ROOT / "bench/reckon.py"))["cards"]()
    for name, flags in BUILD_CARD["CARDS"].items():
        capability = known[name].capability
        virtual = capability if capability < 90 else 90
        assert flags[1] == f"arch=compute_{virtual},code=sm_90", name
        assert ("-DSMALL_SHARED=1" in flags) == (capability == 120), name
