"""Runs tools/build_identity.py: the same sources, compiled in the same way, are one build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import build_identity
import pytest

SETTINGS = "CXX 12.2.0\nCXX FLAGS -O3\n"
SOURCES = {"luce/a.cpp": "int a;\n", "luce/b/a.cpp": "int b;\n", "ggml/ggml.c": "int c;\n"}


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., str]:
    """Gives build(settings, sources, folder), which writes the header and returns it."""

    def write(
        settings: str = SETTINGS, sources: dict[str, str] | None = None, folder: str = "one", turn: int = 1
    ) -> str:
        root = tmp_path / folder
        lines = []
        for name, text in (SOURCES if sources is None else sources).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            lines.append(f"{name}\t{path}\n")
        (root / "settings").write_text(settings)
        (root / "sources").write_text("".join(lines[::turn]))
        command = [sys.executable, build_identity.__file__]
        subprocess.run([*command, root / "settings", root / "sources", root / "build.h"], check=True)
        return (root / "build.h").read_text()

    return write


def test_the_same_sources_are_one_build(build: Callable[..., str], tmp_path: Path) -> None:
    """In another folder, at another time, listed in another order."""
    first = build()
    assert first.startswith('#define LUCE_BUILD "') and len(first.split('"')[1]) == 16
    header = tmp_path / "one" / "build.h"
    os.utime(header, ns=(1, 1))
    assert build() == first and header.stat().st_mtime_ns == 1, "what includes it is not compiled again"
    assert build(folder="two") == build(turn=-1) == first
    assert build("".join(reversed(SETTINGS.splitlines(keepends=True)))) == first
    shutil.rmtree(tmp_path / "one")
    assert build() == first


@pytest.mark.parametrize(
    "sources",
    [
        SOURCES | {"luce/a.cpp": "int a; \n"},
        SOURCES | {"luce/c.h": ""},
        {name: text for name, text in SOURCES.items() if name != "ggml/ggml.c"},
        SOURCES | {"luce/a.cpp": SOURCES["luce/b/a.cpp"], "luce/b/a.cpp": SOURCES["luce/a.cpp"]},
    ],
    ids=["changed", "more", "fewer", "exchanged"],
)
def test_other_sources_are_another_build(build: Callable[..., str], sources: dict[str, str]) -> None:
    assert build(sources=sources, folder="two") != build()


@pytest.mark.parametrize("settings", ["", SETTINGS.replace("-O3", "-O2"), SETTINGS + "CUDA 13.0\n"])
def test_other_settings_are_another_build(build: Callable[..., str], settings: str) -> None:
    assert build(settings) != build()
