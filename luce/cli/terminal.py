"""Shows people a spinner, a bar and a summary line on stderr. Only this module imports rich, and only for a
terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from luce.cli import stdout
from luce.decode.events import Finished
from luce.files.probe import Facts, Layers
from luce.native.structs import Device, EngineInfo, Tensor
from luce.planning.memory import Fit
from luce.planning.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.status import Status
    from rich.table import Table
    from rich.text import Text

LOG_EVERY = 30.0  # Where there is no terminal, a count is told of every so many seconds.
BAR_AFTER = 2.0  # A prefill that takes, or promises to take, so many seconds gets a bar.


class Display:
    """Shows progress on stderr, and unless that is a terminal nothing but lines of what takes long. `quiet`
    silences these and warnings too. `verbose` says more, also where there is no terminal."""

    def __init__(self, quiet: bool = False, verbose: bool = False, console: Console | None = None):
        self._quiet, self._verbose = quiet, verbose
        terminal = console.is_terminal if console else sys.stderr is not None and sys.stderr.isatty()
        self._on = terminal and not quiet
        self._console = console or (_stderr() if self._on else None)
        self._status: Status | None = None  # At most one status or bar is shown at a time.
        self._bar: Progress | None = None
        self._since = 0.0
        self._logged: float | None = None  # When the last line of a count was, or the first count.

    def spin(self, label: str) -> None:
        """Shows a spinner until the next call."""
        self.clear()
        self._since = time.perf_counter()
        if self._on and self._console:
            self._status = self._console.status(label)
            self._status.start()

    def loading(self, fraction: float) -> None:
        """Shows the part of the weights that is loaded, 0..1."""
        if self._status:
            self._status.update(f"loading the model {fraction:4.0%}")

    def prefill(self, done: int, total: int) -> None:
        """Shows the prompt tokens that are committed, as a bar once the whole takes over two seconds."""
        elapsed = time.perf_counter() - self._since
        if self._status and elapsed * total / done > BAR_AFTER:
            self._start_bar("reading the prompt", total, auto_refresh=True)
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def count(self, label: str, done: int, total: int, figures: str = "") -> None:
        """Shows a bar of `done` of `total`, with the running figures behind it; in a log now and then a line.
        It is drawn in these calls alone, so nothing of it falls into what is measured between them."""
        if not self._on:
            now = time.perf_counter()
            if self._logged is None:
                self._logged = now
            elif not self._quiet and now - self._logged >= LOG_EVERY:
                self._logged = now
                self._print(f"{label}: {done} of {total}{', ' if figures else ''}{figures}")
            return
        bar = self._bar or self._start_bar(label, total, auto_refresh=False)
        bar.update(bar.task_ids[0], description=label, completed=done, total=total, figures=figures)
        bar.refresh()

    def _start_bar(self, label: str, total: int, auto_refresh: bool) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.clear()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))  # fmt: skip
        bar = Progress(*columns, console=self._console, transient=True, auto_refresh=auto_refresh)
        bar.add_task(label, total=total, figures="")
        bar.start()
        self._bar = bar
        return bar

    def clear(self) -> None:
        """Takes the spinner or the bar off the terminal. It is called before anything is printed."""
        status, self._status = self._status, None
        bar, self._bar = self._bar, None
        for live in (status, bar):
            if live is not None:
                live.stop()

    def warn(self, message: str) -> None:
        """Prints one line, on a terminal or not."""
        if not self._quiet:
            self._print(f"Warning: {message}")

    def explain(self, chosen: Plan, info: EngineInfo, device: str) -> None:
        """Says what was chosen and why, where --verbose asks for it. What the plan left to the engine, with a
        0, is in the engine's `info`. `device` is the one that the model is on, which a plan may call auto."""
        if self._verbose:
            opened = {"rows": info.n_rows, "chunk": info.n_chunk, "pages": info.n_pages, "draft_device": "none"}
            for name, choice in chosen.as_json().items():
                value = device if name == "device" else choice["value"] or opened.get(name, 0)
                shown = value["mode"] if isinstance(value, dict) else value
                self._print(f"{name} {shown}: {choice['reason']}")

    def note(self, line: str) -> None:
        """Prints a line for people, on a terminal alone."""
        self.clear()
        if self._on and self._console:
            self._console.print(printable(line), style="dim", markup=False, highlight=False)

    def summary(self, result: Finished) -> None:
        """Prints the line at the end."""
        self.clear()
        if self._on and self._console:
            self._console.print(summary_line(result), style="dim", markup=False, highlight=False)
        elif self._verbose:
            self._print(summary_line(result))
        if self._verbose:
            self._print(timing_line(result))

    def _print(self, line: str) -> None:
        self.clear()
        if sys.stderr is not None:
            with suppress(OSError):  # There is nobody to tell.
                print(printable(line), file=sys.stderr, flush=True)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


_ENDS = {"stop": "the text is complete", "cancelled": "interrupted"}
_TRUNCATED = {"max_tokens": "cut at -n tokens", "context": "cut where the context was full"}


def summary_line(result: Finished) -> str:
    """Returns "read 12 tokens in 0.30 s, left 108 out; wrote 64 in 2.10 s, 30.0 a second; 40 of 54 drafted tokens were
    right; cut at -n tokens"."""
    stats = result.stats
    speed = "" if stats.tok_per_s is None else f", {stats.tok_per_s:.1f} a second"
    drafted = "nothing drafted"
    if stats.drafted:
        drafted = f"{stats.accepted} of {stats.drafted} drafted tokens were right"
    kept = result.compressed
    left_out = f", left {kept.total - kept.read} out (lossy)" if kept else ""
    end = _TRUNCATED.get(result.truncated_by or "", _ENDS.get(result.reason, result.reason))
    return (
        f"read {result.prompt_tokens} tokens in {stats.prefill_s:.2f} s{left_out}; "
        f"wrote {len(result.tokens)} in {stats.decode_s:.2f} s{speed}; {drafted}; {end}"
    )


def timing_line(result: Finished) -> str:
    """Returns "24 rounds of 2.33 tokens; drafts right by place: 89% 59%; drafting 0.20 s, verifying 1.85 s,
    committing 0.01 s"."""
    stats = result.stats
    length = "" if stats.mean_accepted_length is None else f" of {stats.mean_accepted_length:.2f} tokens"
    shares = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
    places = f"; drafts right by place: {shares}" if stats.drafted else ""
    return (
        f"{stats.rounds} rounds{length}{places}; drafting {stats.draft_s:.2f} s, "
        f"verifying {stats.verify_s:.2f} s, committing {stats.commit_s:.2f} s"
    )


def print_table(title: str, header: list[str], rows: list[list[str]], notes: str) -> None:
    """Prints a table on stdout under its title and notes. It is as wide as it must be where stdout is no
    terminal. On a terminal that is too narrow for it, rows become columns."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    table = _table(header, rows)
    if rows and console.measure(table, options=console.options.update(width=10_000)).maximum > console.width:
        first, *others = zip(header, *rows, strict=True)
        table = _table(list(first), [list(column) for column in others])
    with console.capture() as printed:
        console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(notes, style="dim", markup=False, highlight=False, soft_wrap=True)
        console.print(table, markup=False, highlight=False)
    stdout.put(printed.get())


_STYLES = {"ok": "green", "note": "yellow", "bad": "bold red", "skipped": "dim"}


def print_verdict(verdict: str, name: str, text: str) -> None:
    """Prints a line of a report on stdout: "ok       rows       ...", in colours on a terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        stdout.put(f"{verdict:<8} {name:<10} {printable(text)}\n")
        return
    grid = Table.grid(padding=(0, 1))  # A long text goes on below itself.
    for width in (8, 10, None):
        grid.add_column(min_width=width, overflow="fold")
    with console.capture() as printed:
        grid.add_row(f"[{_STYLES[verdict]}]{verdict}[/]", name, _plain(text))
        console.print(grid, highlight=False)
    stdout.put(printed.get())


def _plain(text: str) -> Text:
    from rich.text import Text

    return Text(printable(text))


def _table(header: list[str], rows: list[list[str]]) -> Table:
    from rich.table import Table

    table = Table()
    for index, name in enumerate(header):  # No figure is cut where even that is too wide.
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def printable(text: str, most: int = 2000) -> str:
    """Returns one line without control characters, of `most` characters, for text that a file or an error
    brings."""
    line = " ".join(text.split())
    if len(line) > most:
        line = f"{line[:most]}... ({len(line) - most:,} more)"
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in line)


def facts_text(facts: Facts, fits: Sequence[Fit] = ()) -> str:
    """Returns facts for people: a line each, with sizes in GiB or MiB. `fits` are the ways to run the model.
    """
    lines: list[tuple[str, str]] = [
        ("kind", facts.kind),
        ("architecture", facts.architecture),
        ("name", _or_dash(facts.name)),
        ("file type", _or_dash(facts.file_type)),
        ("size", f"{size(facts.size_bytes)}, {facts.parameters:,} parameters"),
        ("blocks", _blocks(facts)),
        *_token_lines(facts),
        ("embedding", _or_dash(facts.embedding_length)),
        ("context", _or_dash(facts.context_length)),
        ("vocabulary", _or_dash(facts.vocab_size)),
        ("tokenizer", _or_dash(facts.tokenizer)),
        ("chat template", "yes" if facts.chat_template else "no"),
    ]
    lines += [
        (f"  {name}", f"{share.tensors} tensors, {size(share.bytes)}")
        for name, share in facts.quantization.items()
    ]
    if facts.dflash is not None:
        lines += [("drafter", facts.dflash.what), ("drafts for", facts.dflash.fits)]
        given = ((name, value) for name, value in vars(facts.dflash).items() if value is not None)
        lines += [(f"  {name}", str(value)) for name, value in given]
    if facts.tower is not None:
        named = f", by name {facts.name}" if facts.name else ""
        fitting = f"models with embedding {facts.tower.projection_dim}{named}"
        lines += [("tower", facts.tower.what), ("sees for", fitting)]
    if facts.layers is not None:
        lines += _layer_lines(facts.layers, facts.vocab_size)
    lines += [line for fit in fits for line in _fit_lines(fit)]
    lines.append(("supported", _supported(facts)))
    lines += [("note", note) for note in facts.notes]
    return "\n".join(f"{label:<15} {printable(value)}" for label, value in lines)


def _layer_lines(layers: Layers, vocabulary: int | None) -> list[tuple[str, str]]:
    """Returns lines on the kinds of layers, on their K and V, and on what an assistant drafts for."""
    lines = [("layers", layers.what)]
    of_global, of_sliding = layers.kv_bytes_per_position, layers.kv_bytes_per_position_swa
    if of_global and of_sliding is not None:
        lines.append(("F16 K and V", f"{size(of_global)} a position in global layers, {size(of_sliding)} in sliding"))
    if layers.target_embedding is not None:
        size_of = f"embedding {layers.target_embedding:,}, vocabulary {vocabulary or 0:,}"
        lines.append(("drafts for", f"models with {size_of} and the KV heads of these layers"))
    return lines


def _supported(facts: Facts) -> str:
    """Returns whether luce runs the file, or with which option it drafts beside a model."""
    if facts.supported:
        return "yes"
    named = {"drafter": "--draft", "assistant": "--draft", "head": "--mtp-gguf", "tower": "--mmproj"}
    option = named.get(facts.kind)
    if facts.tower is not None and not facts.tower.runs:
        option = None
    reasons = "; ".join(facts.reasons)
    return f"no: {reasons}" if option is None else f"beside a model, with {option}: {reasons}"


def _token_lines(facts: Facts) -> list[tuple[str, str]]:
    """Returns lines on what a token of a model goes through."""
    if facts.active_parameters is None or facts.bytes_per_token is None:
        return []
    read = size(facts.bytes_per_token)
    lines = [("a token reads", f"{read}, {facts.active_parameters:,} parameters")]
    if facts.experts:
        lines.insert(0, ("experts", f"{facts.experts}, of these {_or_dash(facts.experts_used)} for a token"))
    return lines


def _fit_lines(fit: Fit) -> list[tuple[str, str]]:
    experts = () if fit.expert_slots is None else ("experts",)
    names = ("weights", "kv", "state", *experts, "compute", "other")
    parts = ", ".join(f"{name} {size(getattr(fit.memory, name))}" for name in names)
    answer = "fits into" if fit.fits else "does not fit into"
    largest = f"the longest context that fits is {fit.largest}" if fit.largest else "no context fits"
    several = fit.memory.devices if len(fit.memory.devices) > 1 else ()
    by_device = [
        ("", f"{each.name} {'has' if each.parts <= each.free else 'lacks'} room for {fit.memory.layers_of(each)}: "
             f"{size(each.parts)} of {size(each.free)}")
        for each in several
    ]  # fmt: skip
    return [
        (f"{fit.mode} at {fit.context}", f"{size(fit.total)}: {parts}"),
        *by_device,
        *(("", f"{fit.expert_slots} of each layer's experts have a slot; all are in host memory") for _ in experts),
        ("", f"{answer} the {size(fit.memory.device_free)} that are free; {largest}"),
    ]


def devices_text(devices: list[Device]) -> str:
    """Returns a line for each device: what --device takes, its memory, and what it is."""
    return "\n".join(
        f"{device.name:<8} {size(device.memory_free)} of {size(device.memory_total)} free  "
        f"{printable(device.description)}"
        for device in devices
    )


def tensors_text(tensors: list[Tensor]) -> str:
    """Returns a line for each tensor: name, type, shape (fastest first), bytes."""
    columns: Callable[[Tensor], str] = lambda tensor: (  # noqa: E731
        f"{printable(tensor.name):<40} {tensor.type_name:<8} "
        f"{'x'.join(str(extent) for extent in tensor.shape):<20} {tensor.size_bytes:>14,}"
    )
    return "\n".join(columns(tensor) for tensor in tensors)


def size(count: int) -> str:
    """Returns bytes for people: "17.2 GiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _blocks(facts: Facts) -> str:
    if facts.block_count is None or not facts.nextn_predict_layers or facts.kind == "assistant":
        return _or_dash(facts.block_count)
    return f"{facts.block_count}, of these {facts.nextn_predict_layers} NextN"
