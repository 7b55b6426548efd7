"""luce runs GGUF models of Qwen3.5 to 3.8 and Gemma 4 by exact speculative decoding.

    with luce.load("model.gguf") as model:
        print(model.generate("def is_even(n):").text)

docs/python-api.md says all of it. Names are imported as they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luce.aio import AsyncModel, AsyncPrefix, AsyncStream
    from luce.decode.stats import Stats
    from luce.errors import (
        ArgumentError,
        Busy,
        Cancelled,
        ContextFull,
        DeviceError,
        Error,
        FileError,
        InternalError,
        NumericError,
        OutOfMemory,
        StateError,
        TemplateFailed,
        UnsupportedError,
    )
    from luce.model.answer import Answer, Call, Piece
    from luce.model.model import Info, Model, Prefix, load
    from luce.model.options import How, HowChat, HowReply, Loading
    from luce.model.stream import Stream
    from luce.native.structs import Logprobs

    __version__: str

_PUBLIC = {
    "luce.aio": ("AsyncModel", "AsyncPrefix", "AsyncStream"),
    "luce.decode.stats": ("Stats",),
    "luce.errors": (
        "ArgumentError", "Busy", "Cancelled", "ContextFull", "DeviceError", "Error", "FileError", "InternalError",
        "NumericError", "OutOfMemory", "StateError", "TemplateFailed", "UnsupportedError",
    ),
    "luce.model.answer": ("Answer", "Call", "Piece"),
    "luce.model.model": ("Info", "Model", "Prefix", "load"),
    "luce.model.options": ("How", "HowChat", "HowReply", "Loading"),
    "luce.model.stream": ("Stream",),
    "luce.native.structs": ("Logprobs",),
}  # fmt: skip
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [
    "Answer", "ArgumentError", "AsyncModel", "AsyncPrefix", "AsyncStream", "Busy", "Call", "Cancelled", "ContextFull",
    "DeviceError", "Error", "FileError", "How", "HowChat", "HowReply", "Info", "InternalError", "Loading", "Logprobs",
    "Model", "NumericError", "OutOfMemory", "Piece", "Prefix", "StateError", "Stats", "Stream", "TemplateFailed",
    "UnsupportedError", "__version__", "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a public name for those who ask for it: all of them together take a while."""
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module 'luce' has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return [*__all__]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("luce")
    except PackageNotFoundError:  # It runs from a source tree that was never installed.
        return "0+unknown"
