"""No flag is ignored in silence: every option of every command is of use always, or there is a usage error
that names it where it would be of none."""

import click
import pytest

from luce.cli import cli

# Options that do something whatever else is given, by command; "*" for all.
ALWAYS = {
    "*": "--gguf --model --threads --device --kv-type --ctx --max-tokens --spec --modes --rounds --save"
    " --quiet",
    "generate": "--prompt --file --temp --repetition-penalty --presence-penalty --frequency-penalty"
    " --logit-bias --chat --stop --tree-budget",
    "chat": "--system --think --temp --mtp-gguf",
    "probe-gguf": "--tensors --json --mtp-gguf --draft --hf",
    "devices": "--json",
    "convert": "--type --tokenizer --target --name",
    "bench humaneval": "--limit --temp --md",
    "bench prompts": "--class --temp --md",
    "bench oracle": "--shape --accept --draft-accept --cache --prompts --prompt-tokens --md",
    "bench sweep": "--mtp-gguf --draft --rows --gammas --steps --md",
    "bench batch": "--sequences --temp --md",
    "bench serve": "--lengths --streams --prompt-tokens --turns --conversation --md",
    "serve": "--hf --host --port --parallel --pages --queue --chunk --prefill-share --checkpoints --cache-ram"
    " --cache-dir --log-json --mtp-gguf",
}
# What each of the others is ignored with, and said to be.
IGNORED = [
    ("generate", "--top-k", "x --top-k 5"),
    ("generate", "--top-p", "x --top-p 0.5"),
    ("generate", "--min-p", "x --min-p 0.5"),
    ("generate", "--seed", "x --seed 1 --temp 0"),
    ("generate", "--hf", "x --hf a/b --model m.gguf"),
    ("generate", "--json-schema", "x --json-schema {} --grammar g"),
    ("generate", "--grammar", "x --json-schema {} --grammar g"),
    ("generate", "--system", "x --system y"),
    ("generate", "--think", "x --think"),
    ("generate", "--no-think", "x --no-think"),
    ("generate", "--special", "x --special --chat"),
    ("generate", "--mtp-gamma", "x --mtp-gamma 2 --spec off"),
    ("generate", "--mtp-gguf", "x --mtp-gguf h --spec off"),
    ("generate", "--draft", "x --draft d --spec mtp"),
    ("generate", "--tree-budget", "x --tree-budget 5 --spec off"),
    ("generate", "--json", "x --json --jsonl"),
    ("generate", "--jsonl", "x --json --jsonl"),
    ("generate", "--verbose", "x --quiet --verbose"),
    ("generate", "--prompt", "x --prompt y"),
    ("chat", "--top-k", "--temp 0 --top-k 5"),
    ("chat", "--top-p", "--temp 0 --top-p 0.5"),
    ("chat", "--seed", "--temp 0 --seed 1"),
    ("chat", "--hf", "--hf a/b --model m.gguf"),
    ("chat", "--mtp-gguf", "--spec off --mtp-gguf h"),
    ("convert", "--no-mtp", "in out --no-mtp --mtp-only"),
    ("convert", "--mtp-only", "in out --no-mtp --mtp-only"),
    ("serve", "--api-key", "--api-key k --no-auth"),
    ("serve", "--no-auth", "--api-key k --no-auth"),
    ("serve", "--cache-disk", "--cache-disk 1"),
    ("serve", "--alias", "--alias a --gguf b=x --gguf c=y"),
    ("serve", "--mtp-gamma", "--mtp-gamma 2 --spec off"),
    ("serve", "--draft", "--draft d --spec mtp"),
    ("serve", "--tree-budget", "--tree-budget 5 --spec off"),
    ("bench humaneval", "--unsafe-check", "--unsafe-check --no-check"),
    ("bench humaneval", "--no-check", "--unsafe-check --no-check"),
] + [
    (f"bench {kind}", flag, args.replace("PLAIN", "off" if kind == "serve" else "plain"))
    for kind, flags in {
        "humaneval": "gguf seed form plot",
        "prompts": "gguf seed form plot",
        "oracle": "form plot",
        "sweep": "form plot",
        "batch": "gguf seed form plot",
        "serve": "gguf form",
    }.items()
    for flag, args in {
        "gguf": [("--mtp-gguf", "--modes PLAIN --mtp-gguf h"), ("--draft", "--modes PLAIN --draft d")],
        "seed": [("--seed", "--seed 1")],
        "form": [("--json", "--json --csv"), ("--csv", "--csv --md"), ("--commit", "--commit abc")],
        "plot": [("--plot", "--plot x.svg")],
    }.items()
    if flag in flags
    for flag, args in args
]


def commands(group=cli, path=()):
    """Name and command of all that take options."""
    for name, command in group.commands.items():
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


@pytest.mark.parametrize(("command", "flag", "args"), IGNORED)
def test_a_flag_that_would_be_ignored_is_named_in_a_usage_error(luce_, command, flag, args):
    result = luce_(*command.split(), *args.split())
    assert result.exit_code == 2 and flag in result.stderr, result.stderr
