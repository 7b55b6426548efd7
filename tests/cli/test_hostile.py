"""Gives prompts, files and machines that nobody means well with: one line each, and no time lost."""

import json
import os
import subprocess
import sys

import pytest
import tiny
from command_line import one_line

import luce
from luce.files.tokenizer import Tokenizer
from luce.native.metadata import Metadata

CONFIG = tiny.Config()
PACKAGE = os.path.dirname(os.path.dirname(luce.__file__))
# Root reads everything. This runs the command without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, of which
# open() asks for the effective rights, and access() for root's permitted ones.
ORDINARY_USER = """
import ctypes, os
from luce.__main__ import main
if os.geteuid() == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # It is version 3 of the interface, for this thread.
    rights = (ctypes.c_uint32 * 6)()  # They are the effective, permitted and inheritable ones, twice.
    assert libc.capget(header, rights) == 0
    for kind in (0, 1):
        rights[kind] &= ~(1 << 1 | 1 << 2)
    assert libc.capset(header, rights) == 0
main()
"""


def test_control_tokens_that_a_prompt_spells_are_text(luce_):
    """They are text in a chat too, where the template spells some; --special takes the user's as such."""
    asked = ("generate", "--gguf", "{}", "-n", "1", "--json")
    counts = {}
    for text in ("x", "<|im_end|>", "a<|im_start|>system"):
        for how in ("--raw", "--chat", "--special"):
            counts[text, how] = json.loads(luce_(*asked, how, text).stdout)["prompt_tokens"]
    for text in ("<|im_end|>", "a<|im_start|>system"):
        assert counts[text, "--raw"] == len(text)
        assert counts[text, "--chat"] - counts["x", "--chat"] == len(text) - 1
    assert counts["<|im_end|>", "--special"] == 1
    assert luce_(*asked, "--chat", "--special", "x").exit_code == 2


@pytest.mark.parametrize("how", ["--raw", "--chat"])
def test_endless_stdin_is_refused(process, how):
    with open("/dev/zero", "rb") as endless:
        running = process(how, "--ctx", "2048", stdin=endless)
        _, stderr = running.communicate(timeout=60)
    assert running.returncode == 1
    (line,) = stderr.decode().splitlines()
    assert line.startswith("Error: stdin gives more than ") and "context" in line


def test_a_prompt_far_beyond_the_context_is_not_tokenised_whole(luce_, monkeypatch):
    """It is tokenised piece by piece (4,096 characters and the rest of the line), up to the first beyond it."""
    encoded = []
    pieces = Tokenizer._pieces

    def counted(self, text):
        for piece in pieces(self, text):
            encoded.append(len(piece))
            yield piece

    monkeypatch.setattr(Tokenizer, "_pieces", counted)
    line = "x = 1\n"
    monkeypatch.setattr("luce.cli.commands.NFC_SHRINKS", 10_000)
    result = luce_("generate", "--gguf", "{}", "--ctx", "64", stdin=line * 100_000)
    assert result.exit_code == 1 and "a context of 64: a larger --ctx has room for more" in one_line(result)
    assert sum(encoded) < 100_000


@pytest.fixture(params=["folder", "fifo", "device", "missing", "below a file", "too long"])
def no_file(request, tmp_path):
    path = tmp_path / "odd.gguf"
    if request.param == "folder":
        path.mkdir()
    elif request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "device":
        return "/dev/null"
    elif request.param == "below a file":
        path.write_text("x")
        return path / "odd.gguf"
    elif request.param == "too long":
        return tmp_path / ("odd.gguf" * 1000)
    return path


FILE_COMMANDS = [
    ("probe-gguf",),
    ("generate", "x", "--gguf"),
    ("generate", "x", "--gguf", "{}", "--mtp-gguf"),
    ("bench", "prompts"),
    ("bench", "sweep", "--gguf"),
    ("bench", "batch", "--gguf"),
    ("generate", "x", "--gguf", "{}", "--draft"),
    ("chat", "--gguf"),
    ("serve", "--port", "0", "--gguf"),
]


@pytest.mark.parametrize("words", FILE_COMMANDS, ids=" ".join)
def test_what_is_no_file_is_one_line_that_names_it(luce_, no_file, words):
    result = luce_(*words, no_file)
    assert result.exit_code == 1 and result.stdout == "" and str(no_file)[-8:] in one_line(result)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "--no-auth", "--port", "0", "--host", "x" * 64), "Name or service not known"),
        (("bench", "oracle", "--shape", "mini", "--cache", "/proc/x"), "/proc/x: No such file or directory"),
        (("convert", "/proc/x", "out.gguf", "--target", "target.gguf"), "/proc/x: No such file or directory"),
        (("generate", "x", "--gguf", "/proc"), "/proc: a folder, not a GGUF file"),
    ],
    ids=["host", "cache", "checkpoint", "folder"],
)
def test_a_place_that_is_not_there_is_named_in_words(luce_, words, said):
    result = luce_(*words)
    assert result.exit_code == 1 and said in one_line(result)


@pytest.mark.parametrize("flag", ["-f", "--grammar", "--json-schema"])
def test_text_that_is_no_file_is_one_line_that_names_it(luce_, no_file, flag):
    """A pipe that nobody writes to is empty, and is not waited for."""
    result = luce_("generate", "--gguf", "{}", *([] if flag == "-f" else ["x"]), flag, no_file)
    assert result.exit_code == 1 and result.stdout == "" and str(no_file)[-8:] in one_line(result)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        *FILE_COMMANDS,
        ("generate", "--gguf", "{}", "-f"),
        ("generate", "x", "--gguf", "{}", "--grammar"),
        ("generate", "x", "--gguf", "{}", "--json-schema"),
        ("convert", "--type", "F16", "out.gguf"),
        ("probe-gguf", "{}", "--draft"),
    ],
    ids=" ".join,
)
def test_an_unreadable_file_is_one_line_that_names_it(tiny_gguf, tmp_path, words):
    """It is the same line whoever opens it: the core, a command, or the server."""
    path = tmp_path / "unreadable.gguf"
    path.write_text("GGUF")
    path.chmod(0)
    given = [str(tiny_gguf) if word == "{}" else word for word in words]
    given.insert(1 if words[0] == "convert" else len(given), str(path))
    done = run(ORDINARY_USER, *given)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: {path}: Permission denied\n"


def test_text_may_come_from_a_pipe(luce_, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    os.write(writer, b"seven b")
    os.close(writer)
    result = luce_("generate", "--gguf", "{}", "-f", pipe, "-n", "1", "--json")
    os.close(reader)
    assert json.loads(result.stdout)["prompt_tokens"] == len("seven b")


@pytest.mark.parametrize("flag", ["--grammar", "--json-schema"])
def test_an_endless_grammar_is_refused(luce_, flag):
    result = luce_("generate", "--gguf", "{}", "x", flag, "/dev/zero")
    assert result.exit_code == 1 and "/dev/zero: more than 16 MiB" in one_line(result)


EMPTY = [
    *FILE_COMMANDS,
    ("bench", "prompts", "--save"),
    *(("generate", "--gguf", "{}", "x", flag) for flag in ("--grammar", "--json-schema")),
]


@pytest.mark.parametrize("words", EMPTY, ids=" ".join)
def test_an_empty_path_is_a_usage_error(luce_, words):
    result = luce_(*words, "")
    assert result.exit_code == 2 and "the path is empty" in result.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.model", 3),
        ("tokenizer.ggml.tokens", 3),
        ("tokenizer.ggml.merges", ["ab cd"]),
        ("tokenizer.ggml.token_type", [float("nan")]),
        ("tokenizer.ggml.eos_token_id", -1),
        ("tokenizer.ggml.bos_token_id", 1.5),
        ("tokenizer.ggml.add_bos_token", "yes"),
    ],
)
def test_a_malformed_tokenizer_is_one_line_that_names_file_and_key(luce_, tmp_path, key, value, monkeypatch):
    original = Metadata.__getitem__
    monkeypatch.setattr(
        Metadata, "__getitem__", lambda self, name: value if name == key else original(self, name)
    )
    path = tiny.write(tmp_path / "odd.gguf", CONFIG, tiny.layout(CONFIG, 1))
    line = one_line(luce_("generate", "--gguf", path, "x"))
    assert line.startswith(f"Error: {path}: ") and key in line


def test_a_lack_of_memory_is_one_line(luce_, monkeypatch):
    def lacks(*args, **options):
        raise MemoryError

    for place in ("luce.planning.opened.Tokenizer", "luce.decode.scheduler.Loop", "luce.cli.commands.probe"):
        with monkeypatch.context() as patched:
            patched.setattr(place, lacks)
            result = luce_(*(("probe-gguf", "{}") if "cli" in place else ("generate", "--gguf", "{}", "x")))
        assert result.exit_code == 1 and one_line(result) == "Error: out of memory"


def run(program, *words, **variables):
    """Runs Python code on the luce that is tested: `python -c` looks into the working directory first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=PACKAGE)


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (RuntimeError("can't start new thread"), True),
        (ImportError("x.so: failed to map segment from shared object"), True),
        (ModuleNotFoundError("No module named 'x'"), False),
        (RuntimeError("x"), False),
    ],
    ids=str,
)
def test_a_library_that_cannot_be_mapped_is_no_missing_package(luce_, monkeypatch, error, lacks):
    def fails(*args, **options):
        raise error

    monkeypatch.setattr("luce.cli.commands.probe", fails)
    result = luce_("probe-gguf", "{}")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit if lacks else type(error))
    assert not lacks or one_line(result) == "Error: out of memory"


@pytest.mark.long
def test_a_thread_that_lacks_memory_is_an_error():
    """Parts of an op on several threads: what one throws reaches the caller when all have ended."""
    program = (
        "import resource\n"
        "import numpy as np\n"
        "from op_run import op_run\n"
        "from step_ctl import Seq, step_ctl\n"
        "from luce import native as _native\n"
        "from luce.errors import OutOfMemory\n"
        "def run(n):\n"
        "    lists, ctl = np.zeros((2, 2), np.int32), step_ctl(Seq(parents=[-1, -1], keep=[0, 1]))\n"
        "    arrays = [np.ones((2, n), np.float32), ctl, lists]\n"
        "    op_run(_native.default(), 'cpu', 'topk', arrays, [1], shape=(2, 256), dtype=np.int32)\n"
        "run(1 << 10)\n"
        "(line,) = (line for line in open('/proc/self/status') if 'VmSize' in line)\n"
        "taken = int(line.split()[1]) << 10\n"
        "n = 16 << 20\n"  # They take 128 MiB twice, and then 64 MiB for each of two rows.
        "resource.setrlimit(resource.RLIMIT_AS, (taken + 16 * n + (n << 1),) * 2)\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        run(n)\n"
        "    except OutOfMemory as error:\n"
        "        print(error)\n"
        "run(1 << 10)\n"
    )
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out of host memory\n" * 2, "")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """This is a model whose choices by top-p take megabytes."""
    config = tiny.Config(n_vocab=1 << 18)
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    return tiny.write(path, config, tiny.layout(config, 1), tokenizer=False)


WIDE = """
import os, resource, sys
import drive
from luce import native as _native
from luce.errors import DeviceError, StateError
from luce.native.structs import Sampling

def open_sequence(n_threads):
    model = drive.open_model(_native.default(), sys.argv[1])
    sequence = drive.open_sequence(model, n_threads=n_threads)
    sequence.set_sampling(Sampling(temperature=1.0, top_p=0.99))
    return sequence
"""


@pytest.mark.long
def test_a_step_that_lacks_memory_fails_its_sequence(wide):
    """It is no OutOfMemory, of which callers know that nothing was done."""
    program = WIDE + """
sequence = open_sequence(2)
(line,) = (line for line in open("/proc/self/status") if "VmSize" in line)
resource.setrlimit(resource.RLIMIT_AS, (int(line.split()[1]) << 10, resource.RLIM_INFINITY))
held, size = [], 1 << 24  # what malloc has left, too: a step may find room in it
while size >= 1 << 18:
    try:
        held.append(bytearray(size))
    except MemoryError:
        size //= 2
taken = resource.getrlimit(resource.RLIMIT_AS)[0]  # Python needs a little, a choice two megabytes at once
resource.setrlimit(resource.RLIMIT_AS, (taken + (17 << 16), resource.RLIM_INFINITY))
for call in (lambda: sequence.prefill([1, 2, 3]), lambda: drive.verify(sequence, [1])):
    try:
        call()
    except (DeviceError, StateError) as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
held.clear()
sequence.reset()
drive.decode(sequence, [1, 2, 3], 4)
"""
    done = run(program, wide, MALLOC_ARENA_MAX="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "a step found no host memory",
        "the sequence has failed (a step did not end): reset, resume or close it",
    ]


@pytest.mark.long
def test_threads_that_cannot_be_had_are_no_error(wide):
    """Each thread would want a stack of more than the address space, so fewer threads do the work."""
    program = WIDE + """
if len(sys.argv) == 2:
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 34, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, resource.RLIM_INFINITY))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.execv(sys.executable, [*sys.orig_argv, "again"])
many, one = (drive.decode(open_sequence(n), [1, 2, 3], 4).tokens for n in (8, 1))
print(many == one)
print(len(os.listdir("/proc/self/task")))
model = drive.open_model(_native.default(), sys.argv[1])
sequence = drive.open_sequence(model, n_ctx=512, n_chunk=256, n_checkpoints=1)
sequence.prefill([1] * 256, last=False)
checkpoint = sequence.checkpoint()
checkpoint.to_host()
print(checkpoint.info.on_device, sequence.engine.info.checkpoints_free)
"""
    done = run(program, wide)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n1\n0 1\n", "")


def test_a_generation_needs_neither_numpy_nor_a_parser_nor_http(tiny_gguf):
    """To load numpy, cffi's parser or jinja2 would take longer than all else that a start does; HTTP takes a sixth."""
    program = (
        "import sys\n"
        "from luce.cli.commands import cli\n"
        "cli(['generate', '-n', '3', '--gguf', sys.argv[1], '--json', 'ab'], standalone_mode=False)\n"
        "slow = {'numpy', 'cffi', 'pycparser', 'rich', 'jinja2', 'http.client', 'ssl', 'luce.text.structured'}\n"
        "print(*sorted(slow & set(sys.modules)), file=sys.stderr)\n"
    )
    done = run(program, str(tiny_gguf))
    assert (done.returncode, done.stderr) == (0, "\n"), done


LACKS = "lambda *a: (1 for _ in ()).throw(MemoryError)"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("sys.modules['luce.cli.commands'] = None", "luce cannot start: import of luce.cli.commands halted"),
        ("sys.modules['click'] = None", "luce cannot start: import of click halted"),
        (f"sys.meta_path.insert(0, type('F', (), {{'find_spec': {LACKS}}}))", "out of memory"),
    ],
    ids=range(3),
)  # fmt: skip
def test_what_fails_at_the_start_is_one_line(broken, said):
    program = f"import sys; from luce.__main__ import main; {broken}; main()"
    done = run(program)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {said}")
