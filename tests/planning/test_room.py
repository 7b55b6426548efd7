"""Checks that what is asked of memory before a library runs is enough, and not much more than it takes: with
less, libraries in Rust end the process."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import tiny

from luce.bench import oracle_tokenizer
from luce.cli.command import IMPORTS, ROOM
from luce.data import BOX
from luce.errors import UnsupportedError
from luce.files.bpe import BYTE_SYMBOLS
from luce.files.tokenizer import Tokenizer
from luce.native import File
from luce.room import HEAP, STACK
from luce.text.grammar import Grammars, beginnings

LETTERS = "abcdefghijklmnopqrstuvwxyz"

# It prints (taken, asked for) of each: taken is by how much the process grew at most.
MEASURES = """
import gc, json, sys
from luce.text import grammar
from luce.files import tokenizer

def status(name):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return int(line.split()[1]) << 10

def taken(run):
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # The peak begins anew.
    before = status("VmRSS")
    kept.append(run())
    return status("VmHWM") - before

asked, kept = [], []
for module in (tokenizer, grammar):
    module.require = lambda n_bytes, whose: asked.append(n_bytes)
tokens, merges = json.load(open(sys.argv[1]))
keys = {"model": "gpt2", "pre": "qwen35", "tokens": tokens, "merges": merges, "eos_token_id": 0}
built = tokenizer.SPLITS["qwen35"], {token: index for index, token in enumerate(tokens)}
print(taken(lambda: tokenizer._build(built[1], merges, built[0])), *asked)
made = tokenizer.Tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
grammars = grammar.Grammars(made)
for run in (
    lambda: grammars._tokens,
    lambda: grammars.json_schema('{"type": "object"}')().mask(),
    lambda: made.encode("abc 1 2 (. " * 10_000),
    lambda: made.encode("abc def ghi " * 50_000),
    lambda: made.encode("abc def.\\n" * 50_000),
):
    asked.clear()
    print(taken(run), max(asked))
"""


def words(count, length, merged):
    """Returns a vocabulary of `count` tokens and its merges: all beginnings of random words, or no merges and
    tokens of `length` letters."""
    rng, tokens, merges = random.Random(1), list(BYTE_SYMBOLS), []
    known = set(tokens)
    while len(tokens) < count:
        word = "".join(rng.choices(LETTERS, k=length))
        for end in range(2, length + 1) if merged else (length,):
            if word[:end] not in known:
                known.add(word[:end])
                tokens.append(word[:end])
                merges += [f"{word[: end - 1]} {word[end - 1]}"] if merged else []
    return tokens, merges


@pytest.mark.long
@pytest.mark.parametrize(("length", "merged"), [(8, True), (32, False)])
def test_what_is_asked_for_a_vocabulary_suffices(tmp_path, length, merged):
    (tmp_path / "words.json").write_text(json.dumps(words(30_000, length, merged)))
    measured = [sys.executable, "-c", MEASURES, str(tmp_path / "words.json")]
    done = subprocess.run(measured, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = [[int(figure) for figure in line.split()] for line in done.stdout.splitlines()]
    for taken, asked in figures:
        assert taken <= asked, figures
    for taken, asked in figures[:2]:
        assert asked < 3 * taken + (32 << 20), figures
    for _, asked in figures[-2:]:
        assert asked < 32 << 20, "a long text is encoded in pieces, and each asks for its own"


def test_a_vocabulary_that_llguidance_cannot_take_is_refused(monkeypatch):
    """llguidance would panic, with lines of its own on stderr."""
    tokens = [bytes([first, *second]) for first in b"abc" for second in (b"", b"xy", b"xyz", b"zz")]
    assert beginnings(tokens) == len({token[:end] for token in tokens for end in range(1, len(token) + 1)})
    monkeypatch.setattr("luce.text.grammar.MAX_NODES", 256)
    with File(BOX) as box, pytest.raises(UnsupportedError, match="for grammars they are too many"):
        Grammars(Tokenizer(box.kv)).json_schema('{"type": "object"}')


@pytest.mark.parametrize("command", sorted(ROOM))
def test_commands_are_imported_in_the_room_they_ask_for(command):
    program = (
        "import importlib, luce.cli.commands\n"
        "def taken():\n"
        "    (line,) = (line for line in open('/proc/self/status') if 'VmPeak' in line)\n"
        "    return int(line.split()[1]) << 10\n"
        "before = taken()\n"
        f"importlib.import_module(luce.cli.commands.cli._later[{command!r}][0])\n"
        "print(taken() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert IMPORTS / 2 < int(done.stdout) <= IMPORTS < ROOM[command]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Makes a tiny model of 50,000 tokens, as large vocabularies are."""
    tokens, merges = words(50_000, 8, merged=True)
    tokens += oracle_tokenizer.CONTROL
    config = tiny.Config(n_vocab=len(tokens))

    def add_tokenizer(writer, n_vocab):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(oracle_tokenizer.PRE_TOKENIZER)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * (n_vocab - 3) + [3] * 3)
        writer.add_token_merges(merges)
        writer.add_eos_token_id(n_vocab - 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "add_tokenizer", add_tokenizer)
        return tiny.write(tmp_path_factory.mktemp("large") / "large.gguf", config, tiny.layout(config, 1))


def ask(url, **fields):
    """Returns the status and the text of an answer."""
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "temperature": 0} | fields
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_server_refuses_a_grammar_that_memory_lacks_and_goes_on(command, large):
    """llguidance would end the server as it reads a large vocabulary, in the first request with a schema."""
    words = ("--gguf", large, "--port", "0", "--threads", "1", "--ctx", "512", "--spec", "off")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    running = command("serve", "--device", "cpu", *words)
    try:
        url = re.search(r"http://\S+", running.stderr.readline().decode()).group()
        assert ask(url)[0] == 200  # All threads have their heaps.
        with open(f"/proc/{running.pid}/status") as status:
            (line,) = (line for line in status if line.startswith("VmSize"))
        taken = int(line.split()[1]) << 10
        for spare in range(8, 32, 6):
            limit = (taken + (spare << 20), resource.RLIM_INFINITY)
            resource.prlimit(running.pid, resource.RLIMIT_AS, limit)
            code, said = ask(url, response_format=schema)
            assert code == 503 and "of address space for" in said, said
            assert ask(url)[0] == 200
        resource.prlimit(running.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        assert ask(url, response_format=schema)[0] == 200
    finally:
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
    assert running.returncode == 130


# It starts threads in copies of itself that have so many KiB to spare, and prints the statuses they end with:
# 0 where the thread ran, 3 where it was refused.
STARTS = """
import os, resource, signal, sys
from luce.errors import OutOfMemory
from luce.threads import Pool, started

def start(how):
    if how == "pool":
        return Pool(1, "of one").submit(int).result(5)
    started(int, "alone").join(5)

(line,) = (line for line in open("/proc/self/status") if line.startswith("VmSize"))
taken = int(line.split()[1])
for spare in map(int, sys.argv[2:]):
    child = os.fork()
    if not child:
        signal.alarm(5)
        resource.setrlimit(resource.RLIMIT_AS, (taken + spare << 10, resource.RLIM_INFINITY))
        try:
            start(sys.argv[1])
        except OutOfMemory:
            os._exit(3)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("how", ["pool", "alone"])
def test_a_thread_starts_or_is_refused(how):
    """Python would wait for ever for one whose stack, or stack and heap, leave it nothing."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = (STACK if stack == resource.RLIM_INFINITY else stack) >> 10
    spares = [
        taken + more
        for taken in (stack, stack + (HEAP >> 10))
        for more in (*range(-8, 64, 8), 128, 512, 2048, 4096)
    ]
    done = subprocess.run(
        [sys.executable, "-c", STARTS, how, *map(str, spares)], capture_output=True, text=True
    )
    statuses = dict(zip(spares, map(int, done.stdout.split()), strict=True))
    assert set(statuses.values()) <= {0, 3} and not done.stderr, (statuses, done.stderr)
    assert statuses[stack - 8] == 3 and statuses[stack + 4096] == statuses[spares[-1]] == 0, statuses


# It runs `luce serve` where there is room for so many threads, and no more.
SERVES = """
import sys
from luce import __main__
from luce import room
from luce import threads

def refuse():
    if not left:
        room.require(1 << 62, "a thread")
    left.pop()

left = [None] * int(sys.argv.pop(1))
threads.require_thread = refuse
__main__.main()
"""


@pytest.mark.long
@pytest.mark.parametrize("threads", range(3))
def test_a_server_that_lacks_room_for_a_thread_ends_with_a_line(threads, tmp_path):
    """They load the model, run the engine and read prompts: without any of them nothing would be answered."""
    words = ("serve", "--port", "0", "--threads", "1", "--ctx", "512", "--spec", "off", "--device", "cpu")
    command = [sys.executable, "-c", SERVES, str(threads), *words]
    # Beside the checkout -c would import luce from there; it is to be the luce that these tests import.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1 and "for a thread are needed" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
