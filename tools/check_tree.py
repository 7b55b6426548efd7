#!/usr/bin/env python3
"""Checks what may stand where, and what the core may not do. It counts no lines.

What Python may import, and how complex it may be, are ruff's rules (pyproject.toml).

Prints one line for each breach, `path:line: what`, and exits 1 if there is any.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

TOP_LEVEL = {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "NOTICE"}
TOP_LEVEL |= {"native", "luce", "tests", "bench", "tools", "docs"}
C_SUFFIXES = {".c", ".h", ".cpp", ".cu", ".cuh"}
SOURCE_SUFFIXES = C_SUFFIXES | {".py", ".sh"}
# What an engine waits for is counted in one file. The others upload weights, run one op for tests, end a step that
# failed, which is counted too, and compare products when an engine opens.
WAITER = "native/src/step/step.cpp"
OTHER_WAITERS = {
    "native/src/model/device.cpp",
    "native/src/abi/test_hooks.cpp",
    "native/src/graph/vision.cpp",  # A tower is no engine.
    "native/src/graph/vision_qwen.cpp",
    "native/src/graph/vision_gemma4.cpp",
    "native/src/graph/vision_gemma4_unified.cpp",
    "native/kernels/common/capture.cu",
    "native/kernels/matmul/prompt_algorithms.cuh",
}
_WAIT = re.compile(
    r"\bggml_backend_(?:(?:event_)?synchronize|graph_compute|tensor_[gs]et(?:_2d)?)\b"
    r"|\bcuda(?:(?:Device|Stream|Event)Synchronize|Memcpy|Memset)\b|\bcuda::finish(?:_event)?\b"
)

# What kernels of several chapters include, and what stands in for it on a CPU.
SHARED = {PurePosixPath("native/kernels/common"), PurePosixPath("tests/cuda/emulated/common")}

# An architecture NAME has native/src/graph/NAME.cpp, and NAME.h, which the table of them includes.
ARCHITECTURE_TABLE = "native/src/graph/architecture.cpp"
# A kind of tokenizer may have a model's name too, and the converter knows the layouts of each.
TOKENIZERS = {"luce/files/bpe.py", "luce/files/tokenizer.py", "luce/bench/oracle_tokenizer.py"}
CONVERTER = "luce/convert/"
# The table of drafters includes theirs in the same way. What goes over their list names none.
DRAFTER_TABLE, OVER_DRAFTERS = "native/src/graph/drafter.cpp", ("native/src/engine/", "native/src/step/")
# What an engine has on one device is a stage's, which alone asks on which devices a model lies and for their streams.
STAGES = {"native/src/engine/cache.cpp", "native/src/engine/stage.cpp", "native/src/step/cuda_stream.cu"}
OVER_STAGES = ("native/src/graph/", "native/src/step/", "native/src/engine/")
_DEVICES = re.compile(r"\b(?:placements|find_device|devices|luce_cuda_stream)\s*\(")
_TEST_MODULE = re.compile(r"^[ \t]*(?:from|import)[ \t].*?\btest_\w+", re.MULTILINE)
_INCLUDED = re.compile(r'^#include "graph/(\w+)\.h"', re.MULTILINE)

Breach = tuple[str, int, str]  # It has the path, the line, and what is wrong there.


def tree_files(root: Path) -> list[str]:
    """Returns the files that git tracks or would; without git, every file."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        return sorted({name for name in names if name and (root / name).is_file()})
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


# ---- names -----------------------------------------------------------------------------------------


def check_names(name: str) -> Iterator[Breach]:
    path = PurePosixPath(name)
    first = path.parts[0]
    if first not in TOP_LEVEL and not first.startswith("."):
        yield name, 1, f"{first} does not belong at the top level"
    vague = any(part == "common" or part.startswith("utils") for part in path.parts)
    if path.name == "internal.h" or (vague and path.parent not in SHARED):
        yield name, 1, "no common/, utils or internal.h: name it after what it is"


# ---- C, C++, CUDA ----------------------------------------------------------------------------------

_SKIPPED = re.compile(
    r"//[^\n]*"
    r"|/\*.*?\*/"
    r'|R"(?P<mark>[^()\\ ]*)\(.*?\)(?P=mark)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'",  # A ' within a number separates digits.
    re.S,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)


def _blank(match: re.Match[str]) -> str:
    newlines = "\n" * match.group().count("\n")
    return f'""{newlines}' if match.group().startswith(('"', "R")) else f" {newlines}"


def plain_code(text: str) -> str:
    """Returns the code with comments, strings and directives blanked, and every line where it was."""
    return _DIRECTIVE.sub(_blank, _SKIPPED.sub(_blank, text))


def line_of(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def check_c(name: str, text: str) -> Iterator[Breach]:
    code = plain_code(text)
    if not name.startswith("native/"):
        return
    for match in re.finditer(r"\b(?:(?:secure_)?getenv|setenv|putenv|unsetenv)\b", code):
        yield name, line_of(code, match), "the core neither reads nor writes environment variables"
    for match in re.finditer(r"\b(?:printf|fprintf|puts|fputs|cout|cerr|exit|abort)\b", code):
        yield name, line_of(code, match), f"the core prints nothing and never exits: {match.group()}"
    waits = [match for match in _WAIT.finditer(code) if name not in OTHER_WAITERS]
    for match in waits[3:] if name == WAITER else waits:
        yield name, line_of(code, match), f"{match.group()}: an engine waits in {WAITER}, where it is counted"
    if name.startswith(OVER_STAGES) and name not in STAGES:
        for match in _DEVICES.finditer(code):
            yield name, line_of(code, match), f"{match.group()}..): devices and streams are a stage's (engine/stage.h)"
    if name.startswith("native/kernels/"):
        for match in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)', text, re.M):
            if re.search(r"ggml|gguf", match.group(1)):
                yield name, line_of(text, match), f"kernels include no ggml headers: {match.group(1)}"


def check_architecture(name: str, text: str, architectures: set[str]) -> Iterator[Breach]:
    """Finds names of architectures outside their own files, the core's table of them, and lines that include
    or import what is named after one. What begins with such a name and a dash is a drafter's."""
    if not name.startswith(("native/", "luce/")) or name.startswith(CONVERTER):
        return
    if name == ARCHITECTURE_TABLE or name in TOKENIZERS:
        return
    for architecture in architectures:
        if architecture in PurePosixPath(name).name:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            named = re.search(rf"{architecture}(?!-)", line.lower())
            if named and not re.match(r"\s*(#\s*include|import|from)\b", line):
                yield name, number, f"{architecture} outside its own files: see {ARCHITECTURE_TABLE}"


def check_tests(name: str, text: str) -> Iterator[Breach]:
    """Finds test modules that are imported: what tests share is in tests/support."""
    for match in _TEST_MODULE.finditer(text if name.startswith("tests/") else ""):
        yield name, line_of(text, match), "a test module is imported: what tests share is in tests/support"


def check_drafters(name: str, text: str, drafters: set[str]) -> Iterator[Breach]:
    """Finds names of drafters in the engine and its steps."""
    for number, line in enumerate(text.splitlines() if name.startswith(OVER_DRAFTERS) else (), 1):
        if found := [drafter for drafter in sorted(drafters) if drafter in line.lower()]:
            yield name, number, f"{found[0]} where all drafters are a list: see {DRAFTER_TABLE}"


# ---- all -------------------------------------------------------------------------------------------


def included(table: Path) -> set[str]:
    """Returns the names that a table's file includes the headers of."""
    found = _INCLUDED.findall(table.read_text(encoding="utf-8")) if table.exists() else []
    return set(found) - {table.stem}


def check_tree(root: Path) -> list[Breach]:
    breaches: list[Breach] = []
    names = tree_files(root)
    architectures, drafters = (included(root / table) for table in (ARCHITECTURE_TABLE, DRAFTER_TABLE))
    for name in names:
        breaches += check_names(name)
        suffix = PurePosixPath(name).suffix
        if suffix not in SOURCE_SUFFIXES:
            continue
        text = (root / name).read_text(encoding="utf-8")
        if suffix in C_SUFFIXES:
            breaches += check_c(name, text)
        breaches += check_architecture(name, text, architectures)
        breaches += check_drafters(name, text, drafters)
        breaches += check_tests(name, text)
    return breaches


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check luce's rules of layout and of what the core may do.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args(argv).root
    breaches = check_tree(root)
    for name, line, what in breaches:
        print(f"{name}:{line}: {what}")
    print(f"check_tree: {len(breaches)} breaches" if breaches else "check_tree: OK", file=sys.stderr)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
