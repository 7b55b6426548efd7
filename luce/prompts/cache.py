"""Keeps beginnings of prompts, so that a prompt is read only from where it differs from all before it.

It keeps checkpoints, which the core makes where a prompt may be cut. They are made where they will be met again
(turns.py). Each lies on the device (sharing pages with others), in host memory, or as a file (disk.py).

Where room lacks, the checkpoint is evicted whose bytes save least. What it saves are the tokens that would have to
be read again without it. It counts less the longer it was not met, and where its conversation has gone on.

A prompt is resumed by its tokens, never by a hash, where that changes no bit (Turns.goes_on). Everything here runs in
the engine's thread, but for pins, which any thread may set. Files are written and read, and host memory of what is
evicted is freed, in three threads beside the engine's steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from luce.errors import Error, OutOfMemory, StateError
from luce.files.tokenizer import Tokenizer
from luce.native import Checkpoint, Engine, Sequence
from luce.native.structs import PAGE
from luce.prompts.disk import CLOSE_S, DiskCache
from luce.prompts.turns import Turns

SPARE = 8  # Of so many places on the device one is kept free, so that the next checkpoint waits for no copy.
MOVED = 2  # What has gone on is moved to host memory where it saves at least one in so many of its tokens.
GONE_ON = 8  # A beginning that one longer one follows is worth so much less.
KNOWN = 32  # Of so many prompts that were read last it is known what of them is read again.


@dataclass(eq=False)
class Kept:
    """This is a kept beginning of a prompt. Where `checkpoint` is None it is in a file alone. `met` is the
    number of the last prompt that began with it. `shorter` is the longest one that it begins with itself, and
    `longer` are those of which that is this one."""

    tokens: np.ndarray  # It is (n,) int32.
    size: int  # It counts bytes, in host memory or in a file.
    met: int
    checkpoint: Checkpoint | None = None
    on_device: bool = False
    path: Path | None = None
    shorter: Kept | None = None
    longer: list[Kept] = field(default_factory=list)

    def begins(self, tokens: np.ndarray) -> bool:
        """Says whether this is a beginning of `tokens`, which go on after it."""
        n = len(self.tokens)
        if n >= len(tokens) or self.tokens[-1] != tokens[n - 1]:
            return False
        return np.array_equal(self.tokens, tokens[:n])

    @property
    def saves(self) -> int:
        """Returns how many tokens would be read again without it."""
        return len(self.tokens) - (len(self.shorter.tokens) if self.shorter else 0)

    @property
    def goes_on_here(self) -> bool:
        """Says whether a longer one follows it on the device, which then has its pages too."""
        after = list(self.longer)
        while after and not after[-1].on_device:
            after += after.pop().longer
        return bool(after)


@dataclass
class Asked:
    """A prompt that is read: its tokens, (n,) int32, where chunks have to end, and which of these places are kept. An
    earlier one began with `again` of the tokens too that are read."""

    tokens: np.ndarray
    ends: list[int]
    kept: frozenset[int]
    again: int


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Returns with how many equal tokens two prompts begin."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n


def _part(n: int) -> int:
    """Returns how many pages hold less than all of their positions, of n tokens: none or one, which is not shared."""
    return 1 if n % PAGE else 0


class Pin:
    """A beginning that is kept until it is released, which any thread may do. `at` is where it is kept: the last
    place of its `tokens`, (n,) int32, where one can be; 0 where there is none."""

    def __init__(self, tokens: np.ndarray, at: int):
        self.tokens, self.at, self.released = tokens, at, False

    def release(self) -> None:
        self.released = True

    def keeps(self, tokens: np.ndarray) -> bool:
        """Says whether `tokens` are what it keeps."""
        return len(tokens) == self.at and np.array_equal(tokens, self.tokens[: self.at])


class PrefixCache:
    """These are the kept beginnings of one engine. `host_bytes` bounds the checkpoints in host memory. `disk`
    is where they outlive the process. `hits` counts the tokens of prompts that were not read again, and
    `queries` those of all prompts."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, host_bytes: int = 0, disk: DiskCache | None = None
    ):
        self._engine, self._host_bytes, self._disk = engine, host_bytes, disk
        info = engine.info
        self._turns = Turns(tokenizer, info.n_chunk, info.n_cut, info.whole_images)
        self._kept: list[Kept] = []
        self._asked = dict[Sequence, Asked]()  # These prompts run now.
        self._unsaved: list[Kept] = []
        self._held: Kept | None = None  # A sequence is resumed from it now, so it is not evicted.
        self._reader = ThreadPoolExecutor(1, "luce-cache-read")
        self._freer = ThreadPoolExecutor(1, "luce-cache-free")  # It waits for no file that is read.
        self._reading: tuple[Kept, Future[Checkpoint]] | None = None
        self._done = 0  # It was DiskCache.done when files were looked for last.
        self._prompts = 0
        self._pins: list[Pin] = []
        self._known = deque[np.ndarray](maxlen=KNOWN)  # These prompts were read, the last one last.
        self.hits = self.queries = 0
        for tokens, path, size in disk.found() if disk else ():
            self._add(Kept(tokens, size, 0, path=path))
        for thread in (self._reader, self._freer):
            thread.submit(int).result()  # Memory for the thread may lack later.

    def pin(self, prompt: list[int]) -> Pin:
        """Keeps the beginning of a prompt, once one that begins so is read. Any thread may call it."""
        tokens = np.asarray(prompt, np.int32)
        ends, _ = self._turns.cut(tokens)
        pin = Pin(tokens, ends[-1] if ends else 0)
        self._pins.append(pin)
        return pin

    def begun(self, tokens: np.ndarray) -> int:
        """Returns how many tokens the longest beginning of a prompt has that is kept. Any thread may ask, and what is
        kept may have changed by then."""
        return max((len(kept.tokens) for kept in list(self._kept) if kept.begins(tokens)), default=0)

    # ---- what a generation asks (generation.Prefixes)

    def resume(self, sequence: Sequence, prompt: Items[int] | np.ndarray) -> int:
        """Brings the sequence to the end of the longest beginning that is kept, or empties it. Returns the
        number of its tokens."""
        self._prompts += 1
        self._asked = {each: asked for each, asked in self._asked.items() if each.is_open}
        tokens = np.asarray(prompt, np.int32)
        at = self._resume(sequence, tokens)
        self._asked[sequence] = self._ask(tokens, at)
        self.hits, self.queries = self.hits + at, self.queries + len(prompt)
        return at

    def _ask(self, tokens: np.ndarray, at: int) -> Asked:
        """Returns what a prompt asks for that goes on from its first tokens, and notes it."""
        ends, kept = self._turns.cut(tokens, at)
        for pin in [pin for pin in self._pins if pin.released]:
            self._pins.remove(pin)  # Others may add some meanwhile.
        pins = (pin.at for pin in self._pins if pin.at and pin.keeps(tokens[: pin.at]))
        pinned = {at for at in pins if self._turns.goes_on(at, ends)}
        known = 0
        for each in reversed(self._known):  # A conversation's last prompt comes first: those before it are shorter.
            if known < min(len(each), len(tokens)) and each[known] == tokens[known]:  # Else it has no more of them.
                known = max(known, _common(tokens, each))
        self._known.append(tokens)
        return Asked(tokens, sorted(pinned.union(ends)), kept | pinned, max(known - at, 0))

    def _resume(self, sequence: Sequence, tokens: np.ndarray) -> int:
        for kept in sorted(self._fitting(tokens), key=lambda each: len(each.tokens), reverse=True):
            try:
                self._restore(kept, sequence)
            except StateError:  # Its copy to host memory has failed.
                self._free(kept)
                continue
            except Error:
                # The file is damaged, or there is no room for it: the next shorter one is tried.
                continue
            kept.met = self._prompts
            return len(kept.tokens)
        sequence.reset()
        return 0

    def ends(self, sequence: Sequence) -> list[int]:
        """Returns where chunks have to end of the prompt that the sequence was resumed for."""
        return self._asked[sequence].ends

    def again(self, sequence: Sequence) -> int:
        """Returns how many tokens of that prompt an earlier one began with too and are read again."""
        return self._asked[sequence].again

    def reached(self, sequence: Sequence) -> None:
        """Says that the sequence is where a chunk of its prompt had to end. It is kept if it will be met again."""
        n_past = sequence.info.n_past
        if n_past not in self._asked[sequence].kept:
            return
        tokens = self._asked[sequence].tokens[:n_past]  # All places of a prompt share its array.
        if any(len(kept.tokens) == n_past and np.array_equal(kept.tokens, tokens) for kept in self._kept):
            return
        with suppress(Error):  # Without it the prompt is read again one day, and nothing else.
            self._free_slot()
            self.free_pages(_part(n_past))
            checkpoint = sequence.checkpoint()
            kept = Kept(tokens, checkpoint.info.size_bytes, self._prompts, checkpoint, on_device=True)
            self._add(kept)
            if self._disk and tokens.min() >= 0:  # Names of rows of images are of this process alone.
                self._unsaved.append(kept)
            if any(n_past < at for at in self._asked[sequence].kept):
                self._spare_slot(kept)  # What leaves is copied beside the steps up to there.

    # ---- what the scheduler asks

    def fetch(self, prompt: Items[int] | np.ndarray, wait: bool) -> bool:
        """Reads the longest beginning of a prompt that will be resumed soon, if it is in a file alone.
        Returns False as long as that goes on, unless it is to `wait` for it."""
        if self._disk is None or not any(kept.checkpoint is None for kept in self._kept):
            return True
        if self._reading is None:
            tokens = np.asarray(prompt, np.int32)
            kept = max(self._fitting(tokens), key=lambda each: len(each.tokens), default=None)
            if kept is None or kept.checkpoint is not None:
                return True
            try:
                self._reading = kept, self._reader.submit(self._read, kept)
            except OutOfMemory:  # What resumes it may find more.
                return True
        kept, reading = self._reading
        if not reading.done() and not wait:
            return False
        self._reading = None
        self._take(kept, reading)
        return True

    def free_place(self) -> None:
        """Makes a place on the device free for the next checkpoint, where there are many. It comes behind a first
        token, which the begin of a copy would hold up."""
        self._spare_slot(max(self._on_device(), key=lambda kept: (kept.met, len(kept.tokens)), default=None))

    def free_pages(self, n: int) -> None:
        """Makes n pages free, as far as checkpoints hold them. Those go first whose pages no one else has."""
        while self._engine.info.pages_free < n:
            found = [kept for kept in self._on_device() if kept is not self._held]
            if not found:
                break
            self._leave_device(min(found, key=lambda kept: (self._is_shared(kept), self._worth(kept))))

    def free_ahead(self, n: int) -> None:
        """Makes n pages free for the prompt that comes next, as far as pages allow that no one has but beginnings which
        the last prompt did not have: so what that prompt takes has left behind an answer, and not ahead of its own."""
        while self._engine.info.pages_free < n:
            found = [kept for kept in self._on_device() if kept.met < self._prompts and not self._is_shared(kept)]
            if not found:
                break
            self._leave_device(min(found, key=self._worth))

    @property
    def pending(self) -> bool:
        """Says whether something waits to be written to a file."""
        return bool(self._unsaved)

    def work(self) -> None:
        """Hands one checkpoint that waits for it to the thread that writes files."""
        if self._disk and self._disk.done != self._done:
            self._done = self._disk.done
            self._evict_files()
        if self._disk is None or not self._unsaved or self._disk.busy:
            return
        kept = self._unsaved.pop(0)
        if kept.checkpoint is not None and kept in self._kept:
            kept.path = self._disk.write(kept.tokens, kept.checkpoint.save)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Returns for each place how many checkpoints it holds, and their bytes."""
        places = {"device": self._on_device(), "host": self._on_host()}
        places["disk"] = [kept for kept in self._kept if kept.path]
        return {name: (len(each), sum(kept.size for kept in each)) for name, each in places.items()}

    def close(self, seconds: float = CLOSE_S) -> None:
        """Closes all checkpoints but the files. Those that wait for it are written before, what saves most
        first, as far as so many seconds are enough."""
        self._reader.shutdown()
        self._freer.shutdown()
        if self._disk:
            waiting = [kept for kept in self._unsaved if kept.checkpoint and kept in self._kept]
            waiting.sort(key=self._worth, reverse=True)
            last = [(kept.tokens, kept.checkpoint.save) for kept in waiting if kept.checkpoint]
            self._disk.close(last, seconds)
        for kept in self._kept:
            if kept.checkpoint:
                kept.checkpoint.close()
        self._kept, self._unsaved = [], []

    def _fitting(self, tokens: np.ndarray) -> list[Kept]:
        """Returns the kept beginnings that a prompt may be resumed from."""
        goes_on, ends = self._turns.goes_on, [] if self._turns.free else self._turns.cut(tokens)[0]
        return [kept for kept in self._kept if goes_on(len(kept.tokens), ends) and kept.begins(tokens)]

    def _add(self, kept: Kept) -> None:
        begun = (each for each in self._kept if each.begins(kept.tokens))
        kept.shorter = max(begun, key=lambda each: len(each.tokens), default=None)
        after = kept.shorter.longer if kept.shorter else [each for each in self._kept if not each.shorter]
        self._link(kept, [each for each in after if kept.begins(each.tokens)])
        if kept.shorter:
            kept.shorter.longer.append(kept)
        self._kept.append(kept)

    def _link(self, shorter: Kept | None, longer: list[Kept]) -> None:
        """Makes one the longest that the others begin with."""
        for each in longer:
            if each.shorter:
                each.shorter.longer.remove(each)
            each.shorter = shorter
            if shorter:
                shorter.longer.append(each)

    def _evict(self, kept: Kept) -> None:
        self._kept.remove(kept)
        self._link(kept.shorter, list(kept.longer))
        self._link(None, [kept])

    # ---- room

    def _on_device(self) -> list[Kept]:
        return [kept for kept in self._kept if kept.on_device]

    def _on_host(self) -> list[Kept]:
        return [kept for kept in self._kept if kept.checkpoint and not kept.on_device]

    def _worth(self, kept: Kept) -> float:
        """Returns what it saves, less the longer it was not met, and less if one longer one follows. What is
        pinned is worth more than all else."""
        if self._is_pinned(kept):
            return math.inf
        return kept.saves / (1 + self._prompts - kept.met) / (GONE_ON if len(kept.longer) == 1 else 1)

    def _is_pinned(self, kept: Kept) -> bool:
        return any(not pin.released and pin.keeps(kept.tokens) for pin in self._pins)

    def _is_shared(self, kept: Kept) -> bool:
        """Says whether others have its pages: a longer one, or a sequence that is beyond it."""
        return kept.goes_on_here or any(
            sequence.is_open and kept.begins(asked.tokens) and sequence.info.n_past >= len(kept.tokens)
            for sequence, asked in self._asked.items()
        )

    def _restore(self, kept: Kept, sequence: Sequence) -> None:
        """Puts the sequence at its end. If there is room, the checkpoint goes to the device, where others
        share it."""
        self._held = kept
        try:
            checkpoint = kept.checkpoint = kept.checkpoint or self._loaded(kept)
            part = _part(len(kept.tokens))  # The sequence has a page of its own for it.
            pages = len(kept.tokens) // PAGE + part
            if not kept.on_device:
                with suppress(OutOfMemory):
                    self._free_slot()
                    self.free_pages(pages + part)
                    checkpoint.to_device()
                    kept.on_device = True
            self.free_pages(part if kept.on_device else pages)
            sequence.resume(checkpoint)
        finally:
            self._held = None
            self._fit_host(None)

    def _loaded(self, kept: Kept) -> Checkpoint:
        """Returns the checkpoint of a file, which is evicted where it is damaged."""
        reading = self._reader.submit(self._read, kept)
        self._take(kept, reading)
        return reading.result()

    def _read(self, kept: Kept) -> Checkpoint:
        assert self._disk is not None and kept.path is not None
        try:
            checkpoint = self._engine.load_checkpoint(self._disk.read(kept.path, kept.tokens))
        except MemoryError as error:
            raise OutOfMemory("out of host memory") from error
        if not np.array_equal(checkpoint.tokens, kept.tokens):
            raise Error("the file is of other tokens")
        return checkpoint

    def _take(self, kept: Kept, reading: Future[Checkpoint]) -> None:
        """Keeps what was read of a file, or evicts the file where it is damaged."""
        try:
            checkpoint = reading.result()
        except OutOfMemory:
            pass
        except Error:
            if self._disk and kept.path:
                self._disk.remove(kept.path)
            kept.path = None
            if kept.checkpoint is None and kept in self._kept:
                self._evict(kept)
        else:
            if kept.checkpoint is None and kept in self._kept:
                kept.checkpoint = checkpoint

    def _free_slot(self, newest: Kept | None = None) -> None:
        """Makes room for one more checkpoint on the device, beside the newest."""
        if self._engine.info.n_checkpoints == 0:
            raise OutOfMemory("the engine keeps no checkpoints on the device")
        on_device = self._on_device()
        if len(on_device) >= self._engine.info.n_checkpoints:
            self._leave_device(min((kept for kept in on_device if kept is not newest), key=self._worth))

    def _spare_slot(self, newest: Kept | None) -> None:
        """Makes that room ahead of the need for it, where places are many."""
        if self._engine.info.n_checkpoints >= SPARE:
            self._free_slot(newest)

    def _leave_device(self, kept: Kept) -> None:
        """Moves it to host memory, if it is worth its bytes there."""
        try:
            worth_a_copy = not kept.longer or MOVED * kept.saves >= len(kept.tokens)
            if kept.checkpoint and (self._is_pinned(kept) or (worth_a_copy and self._fit_host(kept))):
                try:
                    kept.checkpoint.to_host()
                except OutOfMemory:
                    self._freer.submit(int).result()  # What was evicted for it is freed by then.
                    kept.checkpoint.to_host()
                kept.on_device = False
                return
        except Error:  # Host memory lacks.
            pass
        self._free(kept)

    def _fit_host(self, new: Kept | None) -> bool:
        """Keeps checkpoints in host memory within its bytes. Returns False where `new` is worth least of
        all."""
        others = [kept for kept in self._on_host() if kept is not new]
        total = sum(kept.size for kept in others) + (new.size if new else 0)
        if new and new.size > self._host_bytes:
            return False
        for kept in sorted(others, key=lambda each: self._worth(each) / each.size):
            if total <= self._host_bytes:
                break
            if kept is self._held or self._is_pinned(kept):
                continue
            if new and self._worth(new) / new.size <= self._worth(kept) / kept.size:
                return False
            self._free(kept)
            total -= kept.size
        return total <= self._host_bytes

    def _free(self, kept: Kept) -> None:
        """Frees its memory; what is in a file too stays there. Who runs needs what is on the device, and waits for no
        host memory."""
        if kept.checkpoint and kept.on_device:
            kept.checkpoint.close()
        elif kept.checkpoint:
            self._freer.submit(kept.checkpoint.close)
        kept.checkpoint, kept.on_device = None, False
        if kept.path is None:
            self._evict(kept)

    def _evict_files(self) -> None:
        """Evicts those whose files were removed for the bound on files."""
        assert self._disk is not None
        for kept in list(self._kept):
            if kept.path and not self._disk.has(kept.path):
                kept.path = None
                if kept.checkpoint is None:
                    self._evict(kept)
