"""luce runs Qwen3.5 and Qwen3.6 GGUF models by exact speculative decoding."""


def __getattr__(name: str) -> str:
    """Finds __version__ only for those who ask for it, since that takes a while."""
    if name != "__version__":
        raise AttributeError(f"module 'luce' has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("luce")
    except PackageNotFoundError:  # It runs from a source tree that was never installed.
        return "0+unknown"
