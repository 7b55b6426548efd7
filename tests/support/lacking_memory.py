"""Runs each call on an engine with every one of the core's own allocations failing in turn, alone and with
all after it, in a process that failing_new.cpp is preloaded into. Prints for each call how many there were.

A call that raises OutOfMemory has done nothing. One that raises DeviceError has failed its sequences, which
stay failed as the steps before it end. The same call then works, and leaves what it would have left.

Last come the allocations of the thread that copies a checkpoint to the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import drive
import nan_model
from nan_model import tokens_of
from op_run import Fault, fault

from luce import native as _native
from luce.errors import DeviceError, Error, OutOfMemory, StateError
from luce.native import Checkpoint, Drafts, Engine, Rows
from luce.native import Sequence as Timeline
from luce.native.structs import Penalties, Sampling

_preloaded = ctypes.CDLL(None)
_preloaded.arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]
_preloaded.arm_others.argtypes = [ctypes.c_long, ctypes.c_uint64, ctypes.c_uint64]
_preloaded.disarm_others.restype = ctypes.c_long
MASK = b"\xff" * (nan_model.SMALL.n_vocab // 8)


def code_of(library: Path) -> tuple[int, int]:
    """Returns the addresses of a loaded library's code."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(library.name) and "r-xp" in line:
            first, last = line.split()[0].split("-")
            return int(first, 16), int(last, 16)
    raise AssertionError(f"{library} is not loaded")


@dataclass
class Stage:
    """Holds two sequences, a checkpoint that the calls use, and one that every call begins from."""

    engine: Engine
    one: Timeline
    two: Timeline
    kept: Checkpoint
    start: Checkpoint
    made: list[Timeline | Checkpoint] = field(default_factory=list)

    def begin(self) -> None:
        for each in self.made:
            each.close()
        self.made.clear()
        self.kept.to_device()
        for seed, each in enumerate((self.one, self.two)):
            each.resume(self.start)
            each.set_sampling(Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=seed))
            each.set_penalties(Penalties(presence=0.5), 4)

    def rows(self) -> None:
        """Verifies rows of a tree, after drafts."""
        self.begin()
        for each in (self.one, self.two):
            self.engine.draft([Drafts(each, 3, 2)])
            drive.verify(each, [3, 4, 5], [-1, 0, 0])

    def started(self) -> None:
        """Begins a verify of one row each, which is to be followed before it has ended."""
        self.begin()
        self.engine.begin([Rows(self.one, [1]), Rows(self.two, [4])])

    def begun(self) -> None:
        """Begins a verify of sequences that choose by themselves, which is to be followed with drafts."""
        self.begin()
        library = self.engine.library
        for each in (self.one, self.two):
            library.check(library.lib.luce_sequence_set_penalties(each.handle, library.ffi.NULL))
        self.engine.begin([Rows(self.one, [1, 2], [-1, 0]), Rows(self.two, [4])])
        drive.follow([self.one, self.two], [2, 0])

    def on_host(self) -> None:
        """Has the checkpoint in host memory."""
        self.begin()
        self.kept.to_host()

    def follow(self) -> None:
        """Begins the step that follows, and lets both end."""
        drive.follow([self.one, self.two])
        self.engine.wait()
        self.engine.wait()

    def go_on(self) -> None:
        """Lets the step end, and the one that follows it. None does where there is no memory to begin it."""
        self.engine.wait()
        if self.engine.under_way:
            self.engine.wait()

    def land(self) -> None:
        """Lets what is under way end, whatever becomes of it."""
        while self.engine.under_way:
            with contextlib.suppress(Error):
                self.engine.wait()

    def infos(self) -> list[object]:
        return [self.engine.info, self.one.info, self.two.info, self.kept.info]


# Each has what comes before a call, and the call.
CALLS: dict[str, tuple[Callable[[Stage], None], Callable[[Stage], object]]] = {
    "open": (Stage.begin, lambda s: s.made.append(s.engine.sequence())),
    "prefill": (Stage.begin, lambda s: s.one.prefill(tokens_of(9))),
    "draft": (Stage.begin, lambda s: s.engine.draft([Drafts(s.one, 1, 2), Drafts(s.two, 1, 1)])),
    "verify": (Stage.begin, lambda s: s.engine.verify([Rows(s.one, [1, 2], [-1, 0]), Rows(s.two, [4])])),
    "follow": (Stage.started, Stage.follow),
    "go_on": (Stage.begun, Stage.go_on),
    "choose": (Stage.rows, lambda s: s.two.choose(1, MASK)),
    "commit": (Stage.rows, lambda s: s.one.commit([0, 2])),
    "lookup": (Stage.rows, lambda s: s.one.lookup(3, 2)),
    "reset": (Stage.rows, lambda s: s.one.reset()),
    "make": (Stage.begin, lambda s: s.made.append(s.one.checkpoint())),
    "resume": (Stage.rows, lambda s: s.one.resume(s.kept)),
    "resume_from_host": (Stage.on_host, lambda s: s.one.resume(s.kept)),
    "save": (Stage.begin, lambda s: s.kept.save()),
    "load": (Stage.begin, lambda s: s.made.append(s.engine.load_checkpoint(SAVED[0]))),
    "to_host": (Stage.begin, lambda s: s.kept.to_host()),
    "to_device": (Stage.on_host, lambda s: s.kept.to_device()),
}
OF_BOTH = ("verify", "follow", "go_on")  # All sequences are of the one step that can fail.
SAVED: list[bytes] = []


def fail_each(
    stage: Stage,
    begin: Callable[[Stage], None],
    call: Callable[[Stage], object],
    code: tuple[int, int],
    on: bool,
    both: bool,
) -> int:
    """Returns how many allocations the call has."""
    begin(stage)
    call(stage)
    expected = stage.one.dump()
    failed = 0
    while True:
        begin(stage)
        before, error = stage.infos(), None
        _preloaded.arm(failed, on, *code)
        try:
            call(stage)
        except (OutOfMemory, DeviceError) as raised:
            error = raised
        done = _preloaded.disarm()
        if error is None and not done:
            failed += 1  # It was caught, and something else was done instead.
            continue
        if error is None:
            return failed
        failed += 1
        if isinstance(error, OutOfMemory):
            assert stage.infos() == before, (error, before, stage.infos())
            assert stage.kept.save() == SAVED[0]
        else:
            stage.land()
            marked = [stage.one.info.failed, stage.two.info.failed]
            assert all(marked) if both else any(marked), error
            begin(stage)
        call(stage)
        assert stage.one.dump() == expected


def fail_leaving(stage: Stage, faulty: bool) -> int:
    """Returns how many allocations the thread has that copies a checkpoint to the host, where that works, or fails.
    Whoever waits for the copy is told how it ended, whichever of them fails."""
    library, passed = stage.engine.library, 0
    while True:
        stage.begin()
        left = stage.one.checkpoint()
        with fault(library, Fault.LEAVE) if faulty else contextlib.nullcontext():
            _preloaded.arm_others(passed, 0, 2**64 - 1)
            left.to_host()
            error = None
            try:
                left.to_device()
            except StateError as raised:
                error = raised
            failed = _preloaded.disarm_others()
        left.close()
        assert (error is None) == (not faulty and not failed), (error, failed)
        assert error is None or "the checkpoint is lost: " in str(error)
        if not failed:
            return passed
        passed += 1


def main(path: Path) -> None:
    native = _native.default()
    code = code_of(native.path)
    engine = nan_model.open_engine(drive.open_model(native, path, head=True), n_ctx=600, n_checkpoints=3)
    one = engine.sequence()
    one.prefill(tokens_of(256), last=False)
    stage = Stage(engine, one, engine.sequence(), one.checkpoint(), one.checkpoint())
    SAVED.append(bytes(stage.kept.save()))
    for name, (begin, call) in CALLS.items():
        found = [fail_each(stage, begin, call, code, on, name in OF_BOTH) for on in (False, True)]
        print(name, min(found))
    print("leaving", fail_leaving(stage, False))
    print("leaving_fails", fail_leaving(stage, True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
