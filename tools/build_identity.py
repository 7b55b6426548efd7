#!/usr/bin/env python3
"""Writes a header that says which build of luce a library is: on a build the bits of a prompt depend.

CMake calls it where a source or a setting has changed. The identity is one hash over the settings and the
sources, by name: neither folders nor times are part of it, so that the same sources, compiled in the same
way, are one build. The header is written only where it would change.

    build_identity.py SETTINGS SOURCES HEADER

SETTINGS is a file of compilers, flags and versions. SOURCES is a file of lines `NAME<tab>PATH`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path


def identity(settings: str, sources: Sequence[tuple[str, Path]]) -> str:
    """Returns 16 hexadecimal digits. The order of lines and of sources does not matter, nor where a source
    is: its name says which one it is."""
    digest = hashlib.sha256("".join(f"{line}\n" for line in sorted(settings.splitlines())).encode())
    for name, path in sorted(sources):
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def main(settings: Path, sources: Path, header: Path) -> int:
    pairs = [line.split("\t") for line in sources.read_text(encoding="utf-8").splitlines()]
    found = identity(settings.read_text(encoding="utf-8"), [(name, Path(path)) for name, path in pairs])
    text = f'#define LUCE_BUILD "{found}"\n'
    if not header.exists() or header.read_text(encoding="utf-8") != text:
        header.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("settings", "sources", "header"):
        parser.add_argument(name, type=Path)
    sys.exit(main(**vars(parser.parse_args())))
