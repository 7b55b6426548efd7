#!/usr/bin/env python3
"""luce beside llama.cpp on one file, in one run: prefill, plain decoding, drafting with the NextN head or
Gemma 4's assistant, and with a DFlash drafter.

Prefill is --n-prompt random tokens into an empty context: in luce to the choice of the next token, in
llama-bench to the logits. Decoding of luce and llama-server starts when the first new token is out, after a
random prompt of --prompt-tokens, and ends with the last of --n-gen; all of a round is inside: draft, verify,
accept, commit, text. llama-bench decodes --n-gen random tokens from an empty context and chooses none.
Outside the timing windows: loading, opening, warm-ups, the prefill of the short prompt (luce's modes tell it
as their prefill_tok_per_s), HTTP, checks of tokens. luce's modes, its prefill and llama-bench take turns.
Then luce is closed and llama-server is loaded once for each configuration, so that its rounds are together.
Medians over rounds, quartiles in brackets (of fewer than four rounds: least and greatest).

llama.cpp is that of the source archive of luce's ggml: `--build DIR` builds it there, `--bin DIR` takes a
folder with llama-bench and llama-server. llama-server drafts N tokens (draft-mtp) for every mtp:N of --modes,
by the assistant's file where --draft names one, and for the modes of dflash the blocks of the same drafter's
file (draft-dflash), which it verifies as chains: it has no trees. Its drafts are accepted where they are right.
`--synthetic` adds rows in which it accepts
drafts by chance (--spec-synth-len), whatever they say: its cost at an acceptance that these weights do not
have, with tokens that mean nothing. luce accepts its drafts where they are right, so such rows are compared
by time a round. With several --temp luce's modes run at each, and llama-server greedily.

    python bench/peer_llamacpp.py model.gguf --device cpu --threads 2 --build /somewhere/peer
    python bench/peer_llamacpp.py oracle-27b-0.8.gguf --bin peer/bin --modes plain,mtp:3 --synthetic 2.9,0.9
    python bench/peer_llamacpp.py oracle-35b-a3b-0.8.gguf --cpu-experts 8 --bin peer/bin --modes plain,mtp:2
    python bench/peer_llamacpp.py oracle-27b-0.8.gguf --draft oracle-27b-drafter-0.9033.gguf --bin peer/bin \
        --modes plain,dflash,dflash:22 --temp 0,0.7 --top-k 20 --top-p 0.95
    python bench/peer_llamacpp.py oracle-gemma4-31b.gguf --draft oracle-gemma4-31b-assistant-0.8.gguf \
        --bin peer/bin --modes plain,mtp:1,mtp:2,mtp:3,mtp:4
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from os import cpu_count
from pathlib import Path
from typing import Any

import llamacpp
import numpy as np
from peer_table import Row, markdown, ratio, ratios

from luce.bench.acceptance import Acceptance
from luce.bench.oracle_model import Rule, wrong_tokens
from luce.bench.origin import command_text, origin
from luce.bench.run import (
    PLAIN,
    WARM_UP_TOKENS,
    Bench,
    Case,
    Mode,
    Record,
    Settings,
    parse_modes,
    with_temperatures,
)
from luce.bench.summary import five_digits, quartiles, summarise
from luce.decode.engine import Engine
from luce.errors import Error
from luce.files.probe import probe
from luce.native import File
from luce.native import Sequence as Timeline
from luce.native.structs import Sampling
from luce.planning.opened import Files
from luce.planning.plan import Options

TIMING = " ".join(__doc__.split("\n\n")[1].split())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- prompts and what must follow them


@dataclass(frozen=True)
class Task:
    """This is what both sides do: they prefill `long`, and decode n_gen tokens after `short`. `expected` has
    the tokens that an oracle file must say; it is None for other files."""

    long: list[int]
    short: list[int]
    n_gen: int
    expected: list[int] | None

    def wrong(self, tokens: Sequence[int]) -> int:
        """Counts tokens that are not the expected ones, or missing."""
        assert self.expected is not None
        return wrong_tokens(tokens, self.expected)


def oracle_rule(kv: Mapping[str, Any]) -> Rule | None:
    """Returns the known answers of an oracle file, from its metadata; None for other files."""
    if "oracle.seed" not in kv:
        return None
    n_vocab = len(kv["tokenizer.ggml.tokens"])
    accept = kv["oracle.accept"]
    if isinstance(accept, memoryview):
        accept = Acceptance(tuple(accept), name=kv.get("oracle.class", ""))
    return Rule(n_vocab, kv["oracle.seed"], accept, kv.get("oracle.coverage", 0.0))


def task_of(kv: Mapping[str, Any], n_prompt: int, prompt_tokens: int, n_gen: int) -> Task:
    """Makes random prompts; the short one of an oracle file is the first of `luce bench oracle`."""
    rule = oracle_rule(kv)
    # The last 16 ids are control tokens.
    n_ids = rule.n_cycle if rule else len(kv["tokenizer.ggml.tokens"]) - 16
    short, long = (
        [int(t) for t in np.random.default_rng(seed).integers(0, n_ids, n)]
        for seed, n in ((1, prompt_tokens), (2, n_prompt))
    )
    return Task(long, short, n_gen, rule.continuation(short[-1], n_gen) if rule else None)


# ---- luce, and llama-bench in turn with it


@dataclass
class Turns:
    """This is what luce and llama-bench gave in turn; speeds are in tokens/s."""

    device: str  # The core names it so.
    threads: int
    records: list[Record] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    bench_prefill: list[float] = field(default_factory=list)
    bench_decode: list[float] = field(default_factory=list)


def prefill_speed(sequence: Timeline, prompt: list[int]) -> float:
    chunk = sequence.engine.info.n_chunk
    sequence.reset()
    start = time.perf_counter()
    for begin in range(0, len(prompt), chunk):
        sequence.prefill(prompt[begin : begin + chunk], last=begin + chunk >= len(prompt))
    return len(prompt) / (time.perf_counter() - start)


def take_turns(args: argparse.Namespace, task: Task) -> Turns:
    device = None if args.device == "auto" else args.device
    sampling = Sampling(max(args.temps), args.top_k, args.top_p)
    settings = Settings(
        args.n_gen, args.rounds, sampling, threads=args.threads, cpu_experts=args.cpu_experts or None
    )
    modes = with_temperatures(args.modes, args.temps)
    case = Case("random", tuple(task.short))
    plain = Options(ctx=len(task.long) + 1, threads=args.threads, spec="off")
    with (
        Files(args.model, device=device, drafter=args.draft) as files,
        Bench(files, modes, [case], settings) as bench,
        Engine.open(files, plain, model=bench.model) as engine,
        engine.native.sequence() as sequence,
    ):
        turns, generations = Turns(bench.model.info.device, bench.threads), bench.run()
        prefill_speed(sequence, task.long)  # This warms up.
        for turn in range(args.rounds):
            turns.records += islice(generations, len(modes))
            turns.prefill.append(prefill_speed(sequence, task.long))
            speeds, decode = llamacpp.llama_bench(
                args.bin / "llama-bench", args.model, [len(task.long)], task.n_gen, turns.threads, turns.device,
                *llamacpp.experts_on_cpu(args.cpu_experts),
            )  # fmt: skip
            turns.bench_prefill.append(prefill := speeds[len(task.long)])
            turns.bench_decode.append(decode)
            this = [r for r in turns.records if r.round == turn]
            ours = "".join(f"{r.mode} {r.stats.tok_per_s or 0:.1f}, " for r in this)
            say(f"round {turn + 1}: luce {ours}prefill {turns.prefill[-1]:.0f}; "
                f"llama-bench {decode:.1f}, prefill {prefill:.0f} tok/s")  # fmt: skip
    return turns


def speed_fields(name: str, values: Sequence[float]) -> Row:
    spread = [five_digits(v) for v in quartiles(values) or []]
    return {name: five_digits(statistics.median(values)), f"{name}_spread": spread}


def luce_rows(modes: Sequence[Mode], turns: Turns, task: Task) -> list[Row]:
    """Returns the rows of `luce bench oracle`, and the time of a round, all of it."""
    wrong = (lambda record: task.wrong(record.tokens)) if task.expected else None
    rows = []
    for row in summarise(turns.records, [mode.name for mode in modes], wrong=wrong):
        stats = [r.stats for r in turns.records if r.mode == row.mode and r.stats.rounds]
        times = [1000 * s.decode_s / s.rounds for s in stats]
        rows.append(
            row.as_json() | {"ms_per_round": five_digits(statistics.median(times)) if times else None}
        )
    return rows


def bench_row(turns: Turns) -> Row:
    return {
        "name": "llama-bench",
        "compared_with": f"luce {PLAIN}",
        **speed_fields("tok_per_s", turns.bench_decode),
        **speed_fields("prefill_tok_per_s", turns.bench_prefill),
        "ms_per_round": five_digits(1000 / statistics.median(turns.bench_decode)),
    }


# ---- llama-server, one configuration after another


@dataclass(frozen=True)
class Configuration:
    """Says how a llama-server is loaded: as luce's mode drafts, but without trees. `forced` is the mean
    accepted length, with the target's token, at which it accepts drafts by chance; with None it accepts them
    where they are right. `drafter` is the file of a DFlash drafter or an assistant, and `drafts` how many a round
    has."""

    mode: Mode
    forced: float | None = None
    drafts: int = 0
    drafter: Path | None = None

    @property
    def name(self) -> str:
        name = "llama-server" if self.mode.name == PLAIN else f"llama-server {self.mode.name}"
        return name if self.forced is None else f"{name}, {self.forced:.4g} tokens a round forced"

    @property
    def options(self) -> list[str]:
        kind = ["--spec-type", f"draft-{self.mode.spec}"]
        drafts = [*kind, "--spec-draft-n-max", str(self.drafts)]
        forced = ["--spec-synth-len", str(self.forced)]
        return [
            *(["-md", str(self.drafter)] if self.drafter else []),
            *(drafts if self.drafts else []),
            *(forced if self.forced is not None else []),
        ]

    def beside(self, modes: Sequence[Mode]) -> list[Mode]:
        """Returns luce's modes of the same drafts: those with a tree too."""
        return [mode for mode in modes if (mode.spec, mode.gamma) == (self.mode.spec, self.mode.gamma)]


def forced_length(value: float, drafts: int) -> float | None:
    """Returns the mean accepted length that an entry of --synthetic asks of rounds of so many drafts: itself,
    or, below 1, that of drafts which each pass with this chance after those before. None says that no round
    is so long."""
    if value < 1:
        return five_digits(sum(value**i for i in range(drafts + 1)))
    return value if value <= drafts + 1 else None


def configurations(
    modes: Sequence[Mode], synthetic: Sequence[float], drafter: tuple[Path, int | None] | None = None
) -> list[Configuration]:
    """Returns how llama-server is loaded, once for each way that llama.cpp has. `drafter` is the file of a
    DFlash drafter, and how many drafts a block of it has, or that of an assistant and None."""
    file, block = drafter or (None, 0)
    found = []
    for mode in modes:
        if mode.name == PLAIN:
            one = Configuration(mode)
        elif mode.gamma:
            assistant = file if block is None else None
            one = Configuration(Mode(f"mtp:{mode.gamma}", "mtp", mode.gamma), None, mode.gamma, assistant)
        elif mode.spec == "dflash" and block:
            one = Configuration(Mode("dflash", "dflash"), None, block, file)
        else:
            continue
        lengths = [forced_length(value, one.drafts) for value in synthetic] if one.drafts else []
        found += [one, *(replace(one, forced=length) for length in lengths if length is not None)]
    return list(dict.fromkeys(found))


def server_answers(args: argparse.Namespace, turns: Turns, task: Task, options: list[str]) -> list[Row]:
    """Returns the answers of all rounds. Each round has a seed of its own, which decides what is accepted by
    chance."""
    n_ctx = len(task.short) + task.n_gen + 64
    with llamacpp.LlamaServer(
        args.bin / "llama-server", args.model, turns.threads, turns.device, *options, n_ctx=n_ctx
    ) as server:
        server.complete(task.short, min(WARM_UP_TOKENS, task.n_gen))
        answers = [server.complete(task.short, task.n_gen, seed) for seed in range(args.rounds)]
    if any(len(answer["tokens"]) < 2 for answer in answers):
        raise llamacpp.PeerError("llama-server ended its text after one token: there is no speed to measure")
    return answers


def server_row(configuration: Configuration, answers: Sequence[Row], task: Task, luce: Row) -> Row:
    """Makes the row of a server. `luce` is the row that it is compared with."""
    timings = [answer["timings"] for answer in answers]
    drafted = sum(t.get("draft_n", 0) for t in timings)
    accepted = [t.get("draft_n_accepted", 0) for t in timings]
    after_first = [len(answer["tokens"]) - 1 for answer in answers]
    # Each round adds a token of its own.
    rounds = [n - a for n, a in zip(after_first, accepted, strict=True)]
    length = five_digits(sum(after_first) / sum(rounds))
    against, wrong = f"luce {luce['mode']}", None
    if configuration.forced is not None:
        ours = luce["mean_accepted_length"]
        against += f", a round's time: {ours} tokens a round, its drafts accepted where they are right"
    elif task.expected:
        wrong = sum(task.wrong(answer["tokens"]) for answer in answers)
    return {
        "name": configuration.name,
        "options": [Path(word).name if Path(word).is_absolute() else word for word in configuration.options],
        "compared_with": against,
        **speed_fields("tok_per_s", [t["predicted_per_second"] for t in timings]),
        "ms_per_round": five_digits(
            statistics.median(t["predicted_ms"] / n for t, n in zip(timings, rounds, strict=True))
        ),
        "rounds": sum(rounds),
        "drafted": drafted,
        "accepted": sum(accepted),
        "acceptance": five_digits(sum(accepted) / drafted) if drafted else None,
        "mean_accepted_length": length,
        "forced_length": configuration.forced,
        "wrong_tokens": wrong,
    }


# ---- the result row


def by_temperature(mode: Mode, temps: Sequence[float]) -> dict[float, str]:
    """Returns the names of a mode at each temperature."""
    return dict(zip(temps, (each.name for each in with_temperatures([mode], temps)), strict=True))


def sampled(modes: Sequence[Mode], temps: Sequence[float], luce: Mapping[str, Row]) -> list[Row]:
    """Divides the speed of each mode at a temperature above 0 by that of greedy decoding in the same mode."""
    found = []
    for mode in modes:
        names = by_temperature(mode, temps)
        greedy = luce[names[0]]["tok_per_s"]
        found += [{"mode": name, "of_greedy": ratio(luce[name]["tok_per_s"], greedy)}
                  for t, name in names.items() if t]  # fmt: skip
    return found


def block_of(drafter: Path) -> int | None:
    """Returns how many drafts a block of a DFlash drafter's file has, and None where it is an assistant."""
    with File(drafter) as file:
        facts = probe(file)
    if facts.kind == "assistant":
        return None
    if facts.dflash is None or facts.dflash.block_size is None:
        raise llamacpp.PeerError(f"{drafter} is neither an assistant nor a DFlash drafter of a known block size")
    return facts.dflash.block_size - 1


def measure(args: argparse.Namespace) -> tuple[str, Row]:
    """Returns the device, as the core names it, and the result row."""
    drafter = (args.draft, block_of(args.draft)) if args.draft else None
    with File(args.model) as file:
        task = task_of(file.kv, args.n_prompt, args.prompt_tokens, args.n_gen)
        read = probe(file, device="cpu").bytes_per_token
        turns = take_turns(args, task)
    every = with_temperatures(args.modes, args.temps)
    luce = {row["mode"]: row for row in luce_rows(every, turns, task)}
    greedy = {mode.name: luce[by_temperature(mode, args.temps)[0]] for mode in args.modes}
    prefill = speed_fields("prefill_tok_per_s", turns.prefill)
    peers = [bench_row(turns)]
    compared = [ratios(peers[0], greedy[PLAIN], prefill["prefill_tok_per_s"])]
    for configuration in configurations(args.modes, args.synthetic, drafter):
        options = [*configuration.options, *llamacpp.experts_on_cpu(args.cpu_experts)]
        answers = server_answers(args, turns, task, options)
        for mode in configuration.beside(args.modes):
            peers.append(server_row(configuration, answers, task, greedy[mode.name]))
            compared.append(ratios(peers[-1], greedy[mode.name]))
        say(f"{configuration.name}: {peers[-1]['tok_per_s']:.1f} tok/s")
    command = ["bench/peer_llamacpp.py", args.model.name, "--device", args.device]
    for name in ("threads", "n_prompt", "prompt_tokens", "n_gen", "rounds"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--build" if args.build else "--bin", str(args.build or args.bin)]
    command += ["--modes", ",".join(mode.name for mode in args.modes)]
    command += ["--draft", args.draft.name] if args.draft else []
    command += ["--cpu-experts", str(args.cpu_experts)] if args.cpu_experts else []
    if len(args.temps) > 1:
        command += ["--temp", ",".join(f"{t:g}" for t in args.temps)]
        command += ["--top-k", str(args.top_k), "--top-p", f"{args.top_p:g}"]
    command += ["--synthetic", ",".join(f"{v:g}" for v in args.synthetic)] if args.synthetic else []
    head = origin(
        "peer llama.cpp", turns.device, args.model, command_text(command), turns.threads, args.commit
    )
    return turns.device, head | {
        "timing": TIMING,
        "bytes_per_token": read,  # A plain step reads so many bytes of weights.
        "cpu_experts": args.cpu_experts,  # Both sides keep the experts of so many layers in host memory.
        "luce_prefill": {"n_prompt": args.n_prompt} | prefill,
        "luce": list(luce.values()),
        "llamacpp": peers,
        "ratios": compared,
        "sampled": sampled(args.modes, args.temps, luce),
    }


# ---- the command


MAX_BLOCK = 63  # A block has at most so many drafts.


def temperatures(text: str) -> list[float]:
    """Parses --temp."""
    temps = [float(part) for part in text.split(",")]
    if 0 not in temps or not all(0 <= t < float("inf") for t in temps):
        raise ValueError
    return temps


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def checked_modes(text: str, draft: Path | None) -> list[Mode]:
    """Checks --modes and --draft. ValueError says what is wrong with them."""
    modes = parse_modes(text)
    if PLAIN not in [mode.name for mode in modes]:
        raise ValueError("--modes needs plain, which the others are compared with")
    if any(mode.spec == "dflash" for mode in modes) and draft is None:
        raise ValueError("modes of dflash need a drafter: --draft names it")
    if draft is not None:
        assistant = block_of(draft) is None
        kind, spec = ("an assistant", "mtp") if assistant else ("a DFlash drafter", "dflash")
        if not {mode.spec for mode in modes} & {spec, "auto"}:
            raise ValueError(f"--draft names {kind}, and no mode is {spec} or auto")
        if assistant and any(mode.spec == "dflash" for mode in modes):
            raise ValueError("--draft names an assistant, and a mode is dflash")
    return modes


def checked_lengths(text: str, modes: Sequence[Mode]) -> list[float]:
    """Checks --synthetic. ValueError says what is wrong with it. A block is checked once it is known."""
    lengths = [float(part) for part in text.split(",")] if text else []
    most = max(MAX_BLOCK if mode.spec == "dflash" else mode.gamma or 0 for mode in modes)
    if lengths and not most:
        raise ValueError("--synthetic needs an mtp:N or dflash in --modes")
    for value in lengths:
        if not 0 <= value <= most + 1:
            raise ValueError(f"--synthetic {value:g}: rounds of {most} drafts accept 1 to {most + 1} tokens")
    return lengths


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--build", type=Path, metavar="DIR", help="build llama.cpp in this folder")
    peer.add_argument("--bin", type=Path, metavar="DIR", help="folder of llama-bench and llama-server")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=count, default=cpu_count())
    parser.add_argument("--n-prompt", type=count, default=512, help="tokens that prefill is measured with")
    parser.add_argument("--prompt-tokens", type=count, default=32, help="tokens before those decoded")
    parser.add_argument("--n-gen", type=count, default=256, help="tokens that decoding is measured with")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument(
        "--modes", default="plain,mtp:2,mtp:3", help="plain, mtp:N, dflash, dflash:N and auto (luce alone)"
    )
    parser.add_argument("--draft", type=Path, help="file of the DFlash drafter, or the assistant, of both")
    parser.add_argument(
        "--cpu-experts", type=int, default=0, metavar="N",
        help="keep the experts of N layers in host memory, on both sides",
    )  # fmt: skip
    parser.add_argument(
        "--temp", dest="temps", type=temperatures, default="0", help="of luce's modes; 0 is among them"
    )
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--synthetic",
        default="",
        metavar="LENGTHS",
        help="force these mean accepted lengths (1 or more: with the target's token) or chances of a draft "
        "(below 1) in the modes whose rounds are long enough",
    )
    parser.add_argument("--commit", help="of luce, where this is no git checkout")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the result row")
    args = parser.parse_args()
    try:
        args.modes = checked_modes(args.modes, args.draft)
        args.synthetic = checked_lengths(args.synthetic, args.modes)
    except (ValueError, Error, llamacpp.PeerError) as error:
        parser.error(str(error))
    if args.n_gen < 2:
        parser.error("--n-gen: decoding starts after the first token, so at least 2")
    for name in llamacpp.PROGRAMS if args.bin else ():
        if not (args.bin / name).is_file():
            parser.error(f"there is no {name} in {args.bin}")
    return args


def main() -> None:
    args = arguments()
    name = "peer"
    if args.draft:
        name += "-assistant" if block_of(args.draft) is None else "-dflash"
    llamacpp.compare(Path(__file__).stem, name, args, measure, markdown, TIMING)


if __name__ == "__main__":
    main()
