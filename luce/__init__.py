"""luce: exact speculative decoding of Qwen3.5/3.6 GGUF models."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("luce")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
