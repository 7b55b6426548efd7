"""Fixtures and options of the whole suite. The core is never optional: without libluce tests fail."""

import gc
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # As main() has it.
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # Else numpy's threads wait for each other beside another worker's.

import drive
import nan_model
import op_run
import tiny
from checkout import TESTS
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, settings
from identity import Identity

import luce
from luce import native as _native
from luce.cli.commands import cli
from luce.planning import cpus

# The command runs with the library under test, also where it is not the installed one (--luce-lib).
PROGRAM = """
import sys
from pathlib import Path
from luce import native as _native
from luce.cli.commands import main
_native.use(_native.load(Path(sys.argv.pop(1))))
main()
"""


# No test fails because the machine was busy. (Hypothesis has one more clock beside its deadline.)
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("luce", max_examples=25, **PATIENT)  # depth.py counts by it.
settings.register_profile("deep", max_examples=60, **PATIENT)  # The gate takes it, after README's 25.
settings.load_profile("luce")


def pytest_addoption(parser):
    parser.addoption(
        "--luce-lib", type=Path, metavar="DIR", help="test the libluce in DIR instead of the installed one"
    )
    parser.addoption(
        "--luce-device", default="cpu",
        help="where models run: cpu (default), cuda, cuda:N, in stages on several: cpu,cpu or cuda:0,cuda:1, or with "
        "a part of each matrix on several: cpu+cpu",
    )
    parser.addoption("--luce-device-only", action="store_true", help="only tests that run models there")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than there are cores, since many tests wait for what they started; never more than four."""
    return min(cpus.usable() + 1, 4)


def pytest_configure(config):
    config.addinivalue_line("markers", "sanitize: loader and ABI tests that sanitizer builds run as well")
    # With this profile a failure is shown as it was found, which saves hours that are dear.
    settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.reuse, Phase.generate])
    if folder := config.getoption("--luce-lib"):
        _native.use(_native.load(folder))
    worker = getattr(config, "workerinput", None)
    if worker and [Path(config.rootpath, arg) for arg in config.args] == [TESTS]:
        # Pytest compiles a file of tests at its first import. Workers begin apart, and find what others compiled.
        chapters = sorted({path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")} - {"cuda"})
        first = len(chapters) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args[:] = [str(TESTS / name) for name in (*chapters[first:], *chapters[:first])]


# `pytest -m quick` takes these, but for their long tests: files of each chapter that cost a second or two.
QUICK = {
    "native/test_abi.py", "core/ops/test_choose.py", "core/engine/test_pages.py",
    "core/engine/test_dump.py", "core/model/test_weights.py", "core/step/test_threads.py", "files/test_probe.py",
    "files/test_tokenizer.py", "planning/test_plan.py", "planning/test_cpus.py", "speculate/test_drafting.py",
    "text/test_gbnf.py", "text/test_dialect.py", "text/test_conversations.py", "decode/test_generation.py",
    "decode/test_loop.py", "prompts/test_turns.py", "cli/test_cli.py",
    "server/test_content.py", "server/test_access.py", "server/test_responses.py",
    "bench/test_figures.py", "convert/test_input.py", "tools/test_check_tree.py", "tools/test_pages.py",
}  # fmt: skip


def is_quick(path):
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).as_posix() in QUICK


def pytest_ignore_collect(collection_path, config):
    """Spares `-m` with one mark the import of files that have no such test."""
    mark, path = config.option.markexpr, collection_path
    marks = ("quick", "long", "sanitize", "references", "clients")
    if mark not in marks or path.suffix != ".py" or path.name == "conftest.py":
        return None
    if mark == "quick":
        return None if is_quick(path) else True
    text = path.read_text()
    return None if f"mark.{mark}" in text or (mark == "long" and "import deeper" in text) else True


@pytest.hookimpl(tryfirst=True)  # Before -m selects.
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.parts)  # It is the same order in each worker, wherever it began.
    for item in items:
        if is_quick(item.path) and not item.get_closest_marker("long"):
            item.add_marker(pytest.mark.quick)
    if config.getoption("--luce-device-only"):
        others = [item for item in items if "device" not in item.fixturenames]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if "device" in item.fixturenames]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skips, where devices have a part of each matrix, tests of models that are refused for that by name."""
    report = yield
    said = "" if call.excinfo is None else str(call.excinfo.value)
    if "+" in item.config.getoption("--luce-device") and "give each device layers of its own" in said:
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], f"Skipped: {said}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Looks for no garbage meanwhile: that was a sixth of the time, and hardly anything is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Thousands of collected tests live to the end: without them, Python's garbage is soon looked through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def native():
    """Gives the core under test."""
    return _native.default()


@pytest.fixture(scope="session", autouse=True)
def untimed(native):
    """Opens engines on the CPU without timing their steps, which is most of an opening; what `auto` does with made-up
    costs does not depend on the machine."""
    op_run.time_steps(native, False)


@pytest.fixture(scope="session", autouse=True)
def one_thread(request):
    """Gives engines in this process one thread unless a test names more: those of workers that run beside each other
    wait for each other. Processes that tests start have as many as users'."""
    with pytest.MonkeyPatch.context() as patched:
        if request.config.getoption("--luce-device").startswith("cpu"):
            patched.setattr(cpus, "usable", lambda *root, usable=cpus.usable: usable(*root) if root else 1)
        yield


@pytest.fixture
def timed(native, untimed):
    """Opens a test's engines as users' are opened: their steps are timed."""
    op_run.time_steps(native, True)
    yield
    op_run.time_steps(native, False)


@pytest.fixture(scope="session")
def device(request):
    """Gives the device of --luce-device."""
    return request.config.getoption("--luce-device")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    """Makes a random Qwen3.5 of 4 blocks, F32, with a byte-level tokenizer and a chat template."""
    config = tiny.Config()
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return tiny.write(path, config, tiny.layout(config, seed=1))


# ---- the small random model of nan_model.py, in which one token is NaN


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory):
    return nan_model.write(tmp_path_factory.mktemp("models") / "small.gguf", seed=81)


@pytest.fixture
def model(native, small_gguf, device):
    """Opens the small model with its head. Modules with a model of their own override it, as they do engine.
    """
    return drive.open_model(native, small_gguf, device, head=True)


@pytest.fixture
def engine(model):
    return nan_model.open_engine(model)


# ---- the command line


@pytest.fixture
def luce_(native, tiny_gguf, device):
    """Gives luce_(*args, stdin=...), which runs the command in this process; {} stands for the tiny model."""

    def run(*args, stdin=None):
        args = [str(tiny_gguf) if arg == "{}" else str(arg) for arg in args]
        if args[:1] == ["generate"] and "--device" not in args:
            args += ["--device", device.replace("+", ","), *(["--split", "tensor"] if "+" in device else [])]
        return CliRunner().invoke(cli, args, input=stdin)

    return run


@pytest.fixture
def command(native):
    """Gives command(*args), which starts `luce` as a process of its own, with the tested library or that of `lib`."""

    def start(*args, env=(), lib=None, **options):
        folder = Path(luce.__file__).parent.parent
        words = [sys.executable, "-c", PROGRAM, lib or native.path.parent, *args]
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        } | options
        path = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
        return subprocess.Popen([*map(str, words)], env=os.environ | path | dict(env), **options)

    return start


@pytest.fixture
def process(command, tiny_gguf, device):
    """Gives process(*args), which starts `luce generate` of the tiny model as a process of its own."""

    def start(*args, gguf=tiny_gguf, **options):
        return command("generate", "--gguf", gguf, "--device", device, *args, **options)

    return start


@pytest.fixture(scope="session")
def endless(tmp_path_factory):
    """Makes a tiny model with a context of 250000 that never chooses an end of text."""
    config = tiny.Config(n_ctx=250_000, n_nextn=1)
    tensors = tiny.layout(config, seed=1)
    tensors["output.weight"][256:] = 0  # Its rows are (V, E). With it, greedy takes bytes only.
    return tiny.write(tmp_path_factory.mktemp("endless") / "endless.gguf", config, tensors)


@pytest.fixture
def foreground():
    """Handles SIGINT as a shell's foreground job does, also where the tests themselves were started with `&`.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def same(record_property):
    """Compares the first n tokens of two runs, same(found, plain, n), and records how many were the same."""
    counts = Identity()
    yield counts.compare
    for name, value in asdict(counts).items():
        record_property(name, value)
