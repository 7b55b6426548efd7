"""Holds that no flag is ignored in silence: every option of every command is of use always, or there is a
usage error that names it where it would be of none."""

import click
import pytest

from luce.cli.commands import cli
from luce.cli.options import idle_threads
from luce.data import BOX
from luce.native.structs import Device

DRAFTER = BOX.with_name("box-dflash.gguf")  # It is a file that luce cannot run alone.
# These options of a command do something whatever else is given; "*" stands for all commands.
ALWAYS = {
    "*": "--gguf --model --device --kv-type --ctx --max-tokens --spec --modes --rounds --save"
    " --quiet",
    "generate": "--prompt --file --temp --repetition-penalty --presence-penalty --frequency-penalty"
    " --logit-bias --chat --stop --tree-budget",
    "chat": "--system --temp",
    "probe-gguf": "--tensors --json --hf",
    "devices": "--json",
    "doctor": "--mtp-gguf --draft --json",
    "convert": "--threads --type --tokenizer --target --name --force",
    "bench humaneval": "--limit --temp --md",
    "bench prompts": "--class --limit --temp --md",
    "bench oracle": "--temp --shape --type --accept --coverage --draft-head --cache --prompts "
                    "--prompt-tokens --md",
    "bench sweep": "--mtp-gguf --rows --gammas --steps --md",
    "bench batch": "--sequences --temp --md",
    "bench serve": "--lengths --more --streams --prompt-tokens --turns --md",
    "serve": "--hf --host --port --parallel --pages --queue --chunk --prefill-share --checkpoints --origin"
    " --shutdown-timeout",
}
# Each of the other options is ignored beside these words, so the command refuses it.
IGNORED = [
    ("generate", "--hf", "x --hf a/b --model m.gguf"),
    ("generate", "--json-schema", "x --json-schema {} --grammar g"),
    ("generate", "--grammar", "x --json-schema {} --grammar g"),
    ("generate", "--system", "x --system y"),
    ("generate", "--think", "x --think"),
    ("generate", "--no-think", "x --no-think"),
    ("generate", "--think", "x --think --chat"),  # The template of luce's own model does not read these.
    ("generate", "--no-think", "x --no-think --chat"),
    ("chat", "--think", "--think"),
    ("chat", "--no-think", "--no-think"),
    ("probe-gguf", "--ctx", f"{DRAFTER} --ctx 100"),
    ("probe-gguf", "--kv-type", f"{DRAFTER} --kv-type q8_0"),
    ("probe-gguf", "--mtp-gguf", f"{DRAFTER} --mtp-gguf {BOX}"),
    ("probe-gguf", "--draft", f"{DRAFTER} --draft {DRAFTER}"),
    ("generate", "--image", "x --image i.png"),
    ("generate", "--mmproj", "x --mmproj m.gguf"),
    ("generate", "--image-tokens", "x --image-tokens 100"),
    ("generate", "--image-tokens", "x --mmproj m.gguf --image i.png --image-tokens 63"),
    ("generate", "--mmproj", "x --mmproj auto --image i.png --model m.gguf"),
    ("chat", "--mmproj", "--mmproj auto --model m.gguf"),
    ("serve", "--mmproj", "--mmproj auto --gguf m=x"),
    ("chat", "--image-tokens", "--image-tokens 100"),
    ("generate", "--prefill-keep", "x --prefill-keep 0.5"),
    ("generate", "--prefill-model", "x --prefill-model m.gguf"),
    ("generate", "--prefill-model", "x --prefill-model m --prefill-keep 0.5 --mmproj m --image i.png --device cpu"),
    ("chat", "--prefill-keep", "--prefill-keep 0.5"),
    ("chat", "--prefill-model", "--prefill-model m.gguf"),
    ("serve", "--prefill-model", "--prefill-model m.gguf --gguf b=x --gguf c=y"),
    ("serve", "--prefill-model", "--prefill-model m.gguf --mmproj m.gguf --device cpu"),
    ("generate", "--special", "x --special --chat"),
    ("generate", "--json", "x --json --jsonl"),
    ("generate", "--jsonl", "x --json --jsonl"),
    ("generate", "--verbose", "x --quiet --verbose"),
    ("generate", "--prompt", "x --prompt y"),
    ("generate", "--cpu-experts", "x --cpu-experts 2 --device cpu"),
    ("chat", "--cpu-experts", "--cpu-experts auto --device cpu"),
    ("bench oracle", "--cpu-experts", "--cpu-experts 2 --device cpu"),
    ("serve", "--cpu-experts", "--cpu-experts 2 --device cpu"),
    ("generate", "--expert-slots", "x --expert-slots 2 --device cpu"),
    ("chat", "--expert-slots", "--expert-slots auto --device cpu"),
    ("bench oracle", "--expert-slots", "--expert-slots 2 --device cpu"),
    ("serve", "--expert-slots", "--expert-slots 2 --cpu-experts 2"),
    ("generate", "--prompt-copies", "x --prompt-copies off --device cpu"),
    ("chat", "--prompt-copies", "--prompt-copies auto --device cpu"),
    ("serve", "--prompt-copies", "--prompt-copies off --device cpu"),
    ("generate", "--split", "x --split 1,1 --device cpu"),
    ("chat", "--split", "--split auto --device cuda:1"),
    ("serve", "--split", "--split 1,2,3 --device cpu,cpu"),
    ("generate", "--split", "x --split tensor --device cpu"),
    ("probe-gguf", "--split", f"{BOX} --split tensors --device cpu,cpu"),
    ("probe-gguf", "--split", f"{BOX} --split 1,1 --device cpu"),
    ("generate", "--draft-device", "x --draft-device cpu --spec off"),
    ("generate", "--draft-device", "x --draft-device cuda:1 --device cuda:0,cuda:1"),
    ("chat", "--draft-device", "--draft-device cpu --spec lookup"),
    ("serve", "--draft-device", "--draft-device cpu --spec off"),
    ("serve", "--draft-device", "--draft-device cpu --device cpu --device cpu"),
    ("serve", "--draft-device", "--draft-device cpu --gguf b=x --gguf c=y"),
    ("serve", "--draft-device", "--draft-device auto"),
    ("probe-gguf", "--draft-device", f"{DRAFTER} --draft-device cpu"),
    ("probe-gguf", "--draft-device", f"{BOX} --draft-device cuda:0 --device cuda:0"),
    ("probe-gguf", "--expert-slots", f"{BOX} --expert-slots 2 --device cpu"),
    ("chat", "--hf", "--hf a/b --model m.gguf"),
    ("convert", "--no-mtp", "in out --no-mtp --mtp-only"),
    ("convert", "--mtp-only", "in out --no-mtp --mtp-only"),
    ("convert", "--mmproj", "in out --mmproj --type Q4_K_M"),
    ("serve", "--api-key", "--api-key k --no-auth"),
    ("serve", "--api-key-file", f"--api-key-file {__file__} --no-auth"),
    ("serve", "--no-auth", "--api-key k --no-auth"),
    ("serve", "--no-auth", "--no-auth"),
    ("serve", "--no-auth", "--no-auth --host localhost"),
    ("serve", "--mmproj", "--mmproj m.gguf --gguf b=x --gguf c=y"),
    ("serve", "--image-tokens", "--image-tokens 100"),
    ("serve", "--allow-image-urls", "--allow-image-urls https://example.com/"),
    ("serve", "--allow-image-urls", "--mmproj m.gguf --allow-image-urls ftp://example.com/"),
    ("serve", "--allow-image-urls", "--mmproj m.gguf --allow-image-urls /no/such/folder"),
    ("serve", "--device", "--device no=cpu"),
    ("serve", "--device", "--gguf b=x --gguf c=y --device a=cpu"),
    ("serve", "--device", "--device cpu --device box=cpu"),
    ("serve", "--device", "--device auto --device cpu"),
    ("serve", "--device", "--device cuda --device cuda:1"),
    ("serve", "--device", "--device cpu --device cuda:0"),
    ("serve", "--device", "--device cuda:0,cuda:1 --device cuda:1,cuda:2"),
    ("serve", "--device", "--device x=cuda:x"),
    ("serve", "--split", "--split 1,1 --device cpu,cpu --device cpu"),
    ("serve", "--alias", "--alias="),
    ("serve", "--cache-disk", "--cache-disk 1"),
    ("serve", "--alias", "--alias a --gguf b=x --gguf c=y"),
    ("serve", "--log-json", "--log-json --quiet"),
    ("serve", "--cache-ram", "--cache-ram 1 --checkpoints 0"),
    ("serve", "--cache-dir", "--cache-dir d --checkpoints 0"),
    ("bench oracle", "--draft-accept", "--draft-accept 0.5"),
    ("bench serve", "--conversation", "--conversation 1000 --turns 0"),
    ("bench humaneval", "--unsafe-check", "--unsafe-check --no-check"),
    ("bench humaneval", "--no-check", "--unsafe-check --no-check"),
]
SAMPLES = ["--top-k 5", "--top-p 0.5", "--min-p 0.5", "--seed 1"]  # They come without a temperature.
DRAFTS = ["--mtp-gamma 2 --spec off", "--mtp-gguf h --spec off", "--draft d --spec mtp",
          "--tree-budget 5 --spec off"]  # fmt: skip
THREADS = ["--threads 2 --device cuda", "--threads 1 --device cuda:7"]
FORMS = ["--json --csv", "--csv --md", "--commit abc"]
BENCH = ["--split tensor --device cpu", "--mtp-gguf h --modes plain", "--draft-device cpu --modes plain",
         "--draft d --modes plain", *SAMPLES, *FORMS, "--plot x.svg", *THREADS]  # fmt: skip
IGNORED += [
    (command, words.split()[0], f"{before}{words}")
    for command, before, several in (
        ("generate", "x --temp 0 ", SAMPLES),
        ("generate", "x ", [*DRAFTS, *THREADS]),
        ("chat", "--temp 0 ", SAMPLES),
        ("chat", "", [*DRAFTS, *THREADS]),
        ("serve", "", [*DRAFTS, *THREADS]),
        ("bench humaneval", "", BENCH),
        ("bench prompts", "", BENCH),
        ("bench batch", "", BENCH),
        ("bench oracle", "", ["--split auto --device cpu", "--draft-device cpu --modes plain", *SAMPLES, *FORMS,
                              "--plot x.svg", *THREADS]),
        ("bench sweep", "", ["--split 1,1 --device cpu", *FORMS, "--plot x.svg", *THREADS]),
        ("bench serve", "--modes off ", ["--split 1,1 --device cpu", "--mtp-gguf h", "--draft d", "--draft-device cpu",
                                         *FORMS, *THREADS]),
    )
    for words in several
]


def commands(group=cli, path=()):
    """Yields the name and command of all that take options, also of those that are imported later."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_option_is_in_the_table():
    missing = []
    for name, command in commands():
        known = {flag for where, flag, _ in IGNORED if where == name}
        known |= set(f"{ALWAYS['*']} {ALWAYS.get(name, '')}".split())
        for option in command.params:
            if isinstance(option, click.Option) and not known & {*option.opts, *option.secondary_opts}:
                missing.append(f"{name} {option.opts[-1]}")
    assert missing == []


@pytest.fixture
def refusing(monkeypatch):
    """Ends a command that accepts its flags where its work would begin: a server would listen forever."""

    def begins(*args, **options):
        raise AssertionError("the flags were accepted")

    monkeypatch.setattr("luce.server.listener.Listener.run", begins)
    monkeypatch.setattr("luce.decode.engine.Engine.open", begins)


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("command", ["serve --port 0", "generate x"])
def test_a_command_that_accepts_its_flags_ends(luce_, command):
    result = luce_(*command.split())
    assert str(result.exception) == "the flags were accepted"


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(("command", "flag", "args"), IGNORED)
def test_a_flag_that_would_be_ignored_is_named_in_a_usage_error(luce_, command, flag, args):
    result = luce_(*command.split(), *args.split())
    assert result.exit_code == 2 and flag in result.stderr, result.stderr


def test_threads_are_refused_where_auto_takes_a_gpu(luce_, native, monkeypatch):
    gpu = Device("cuda:0", "a GPU", 1 << 34, 1 << 34, is_gpu=1)
    monkeypatch.setattr(type(native), "devices", lambda self: [gpu])
    result = luce_("generate", "x", "--threads", "2", "--device", "auto")
    assert result.exit_code == 2 and "cuda:0 uses none: --device cpu does" in result.stderr
    with_experts = {"threads": 2, "device": None, "cpu_experts": "auto"}
    assert idle_threads(with_experts) is None, "the CPU multiplies these"
