"""Declares luce.h to cffi. Nothing of luce is imported here, since the build runs this file:

    python luce/native/declare.py native/include/luce.h OUT/luce_abi.py

writes what cffi's parser finds in the header. It is installed beside the header, and luce starts sooner
with it: the parser takes longer than a small model takes to load. Where it is missing, or was written for
another header, the parser runs at the start.
"""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from zlib import crc32

NAME = "luce_abi"


def declared(header: Path) -> Any:
    """Returns cffi's FFI of a luce.h, from what was written beside it or else from the header itself."""
    written = header.with_name(f"{NAME}.py")
    spec = spec_from_file_location(NAME, written) if written.exists() else None
    if spec and spec.loader:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        if module.header_crc == crc32(header.read_bytes()):
            return module.ffi
    return parsed(header)


def write(header: Path, out: Path) -> None:
    """Writes what the header declares as a Python module, which needs no parser."""
    ffi = parsed(header)
    ffi.set_source(NAME, None)
    ffi.emit_python_code(str(out))
    with out.open("a", encoding="utf-8") as file:
        file.write(f"\nheader_crc = {crc32(header.read_bytes())}\n")


def parsed(header: Path) -> Any:
    """Returns cffi's FFI of a luce.h, from the header itself."""
    import cffi  # type: ignore[import-untyped]  # with its parser, which what was written does not need

    ffi = cffi.FFI()
    ffi.cdef(_declarations(header.read_text(encoding="utf-8")))
    return ffi


def _declarations(header: str) -> str:
    """Returns luce.h as cffi parses it: without comments, C++ guards and directives other than integer
    constants."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    text = re.sub(r"^#ifdef __cplusplus$.*?^#endif$", "", text, flags=re.S | re.M)
    text = re.sub(r"^#(?!define[ \t]+\w+[ \t]+\d+[ \t]*$).*$", "", text, flags=re.M)
    return text.replace("LUCE_API", "")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
