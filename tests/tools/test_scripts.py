"""Scripts run from a clone as they are: nothing but `pip install '.[test,clients,plot]'` is needed to read
their help."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

import luce

PYTHON = [
    path
    for folder in ("tools", "tools/box", "bench")
    for path in sorted((ROOT / folder).glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]
SHELL = [path for path in sorted((ROOT / "tools").glob("*.sh")) if path.read_text().startswith("#!")]
# It is as if the script was started, on a machine without what only some need.
PROGRAM = """
import runpy, sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
script = sys.argv.pop(1)
sys.path[0] = script.rpartition("/")[0]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run(words: list[object], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(Path(luce.__file__).parent.parent)  # It stands for what pip installs.
    before = sorted(folder.iterdir())
    how = {"cwd": folder, "env": environment, "timeout": 300}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **how)
    assert done.returncode == 0 and done.stderr == "", done
    assert sorted(folder.iterdir()) == before
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("script", PYTHON, ids=name_of)
def test_a_script_says_what_it_does(script, tmp_path):
    told = run([sys.executable, "-c", PROGRAM, script, "--help"], tmp_path)
    assert told.startswith("usage: ") and len(told.splitlines()) > 3


@pytest.mark.parametrize("script", SHELL, ids=name_of)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_a_shell_script_says_how_it_is_called(script, flag, tmp_path):
    told = run(["bash", script, flag], tmp_path)
    assert name_of(script) in told and not told.startswith("#")


@pytest.mark.parametrize("script", PYTHON, ids=name_of)
def test_a_script_finds_its_modules_itself(script):
    assert "PYTHONPATH" not in (ast.get_docstring(ast.parse(script.read_text())) or "")
