"""Builds a core with one wrong constant, from the objects of the build that the tests run with."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import HEADER, ROOT

CPU = ROOT / "native" / "src" / "cpu"


@dataclass(frozen=True)
class Break:
    """A source of native/src/cpu in which `right` becomes `wrong`, and the check of `luce doctor` that finds it."""

    source: str
    right: str
    wrong: str
    found_by: str


def broken_core(wrong: Break, lib: Path, folder: Path) -> Path:
    """Returns a folder with a libluce, and the ggml of `lib` beside it. Skips the test where the checkout holds no
    build of these sources."""
    text = (CPU / wrong.source).read_text()
    assert text.count(wrong.right) == 1, f"{wrong.source} has changed: name its constant anew"
    source = folder / wrong.source
    source.write_text(text.replace(wrong.right, wrong.wrong))
    command, right, objects = _compiled(CPU / wrong.source)
    made = folder / "wrong.o"
    subprocess.run([*command, "-o", str(made), "-c", str(source)], check=True, cwd=folder)
    out = folder / "lib"
    shutil.copytree(lib, out)
    (folder / "include").mkdir()
    shutil.copy(HEADER, folder / "include")
    (out / "libluce.so").unlink()
    linked = [str(made if each == right else each) for each in objects]
    libraries = [f"-L{out}", "-Wl,-rpath,$ORIGIN", "-lluce-ggml", "-lluce-ggml-base", "-lluce-ggml-cpu", "-pthread"]
    subprocess.run([command[0], "-shared", "-o", str(out / "libluce.so"), *linked, *libraries], check=True)
    return out


def _compiled(source: Path) -> tuple[list[str], Path, list[Path]]:
    """Returns how the checkout's build compiles a source, without names of files; its object; all objects of luce."""
    for listed in [*ROOT.glob("build/compile_commands.json"), *ROOT.glob("build/*/compile_commands.json")]:
        for entry in json.loads(listed.read_text()):
            if Path(entry["file"]) != source:
                continue
            words = shlex.split(entry["command"])
            at = words.index("-o")
            right = (Path(entry["directory"]) / words[at + 1]).resolve()
            objects = sorted((listed.parent / "native" / "CMakeFiles" / "luce.dir").resolve().rglob("*.o"))
            if right in objects:
                rest = words[:at] + words[at + 2 :]
                return [word for word in rest if word not in ("-c", str(source))], right, objects
    pytest.skip("the checkout holds no build of its sources: pip install . leaves one")
