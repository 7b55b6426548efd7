"""Fixtures and options of the whole suite. The core is never optional: without libluce tests fail."""

from pathlib import Path

import pytest
import tiny

from luce import _native

HEADER = Path(__file__).resolve().parent.parent / "native" / "include" / "luce.h"


def pytest_addoption(parser):
    parser.addoption(
        "--luce-lib", type=Path, metavar="DIR", help="test the libluce in DIR instead of the installed one"
    )
    parser.addoption("--luce-device", default="cpu", help="where models run: cpu (default), cuda, cuda:N")


def pytest_configure(config):
    config.addinivalue_line("markers", "sanitize: loader and ABI tests that sanitizer builds run as well")
    if folder := config.getoption("--luce-lib"):
        library = _native.load(folder, HEADER)
        _native.default = lambda: library


@pytest.fixture(scope="session")
def native():
    """The core under test."""
    return _native.default()


@pytest.fixture(scope="session")
def device(request):
    """The device of --luce-device."""
    return request.config.getoption("--luce-device")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """A random Qwen3.5 of 4 blocks, F32, with a byte-level tokenizer and a chat template."""
    config = tiny.Config()
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return tiny.write(path, config, tiny.layout(config, seed=1))
