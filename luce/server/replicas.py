"""Replicas: engines of one model, each on devices of its own with a thread of its own, and which of them answers.

A request goes where it costs least: the tokens of its prompt that have to be read there, BESIDE for each request that
runs there, and BEHIND for each that it would wait for; of replicas that cost the same, to the one that was asked
longest ago. So a conversation goes on where its beginning is kept, and a beginning that many prompts share does not
draw them all to one replica while others are idle. Any replica gives the same tokens, since no token depends on a
cache or on a batch.

A replica whose device fails is left out. Those whose requests ran there are told so; what waited there goes to the
others. Where all have failed, requests are tried all the same, as with one, and who succeeds takes part again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from luce import native as _native
from luce.decode.events import Event, Failed, Finished, State
from luce.decode.request import Request
from luce.decode.scheduler import Job
from luce.errors import Busy, Cancelled, DeviceError
from luce.model.loaded import Loaded
from luce.planning.split import names_of

log = logging.getLogger(__name__)
# What others cost a request, in tokens of prompts that are read in that time. They are guessed, and were not measured:
# one that runs beside it slows it a little, and one that is ahead of it has first to end.
BESIDE, BEHIND = 1024, 16384


@dataclass(eq=False)
class Replica:
    """One engine of a model. `failed` is what its device reported last, "" while it works."""

    name: str  # its device, or devices, and a number where another has the same
    loaded: Loaded
    failed: str = ""
    asked: int = 0  # the number of the last request that it was given

    @property
    def state(self) -> str:
        return "failed" if self.failed else "ready"

    def as_json(self) -> dict[str, Any]:
        scheduler = self.loaded.scheduler
        return {"device": self.name, "state": self.state, "running": scheduler.running, "waiting": scheduler.waiting}


class Replicas:
    """The replicas of one model, one or more. All calls are the thread's to which events are handed."""

    def __init__(self, model: str, loaded: Sequence[Loaded]):
        names = [each.engine.model.info.device for each in loaded]
        self._model = model
        self.all = [Replica(_numbered(names, i), each) for i, each in enumerate(loaded)]
        kinds = {" and ".join(_described(name)) for name in names}
        if len(kinds) > 1:
            log.warning("%s: %s may differ in a token, and each answers some requests", model, ", ".join(sorted(kinds)))
        self._at = dict[Job, Replica]()
        self._asked = 0

    @property
    def working(self) -> list[Replica]:
        """Returns those whose device has not failed."""
        return [each for each in self.all if not each.failed]

    @property
    def idle(self) -> bool:
        return all(each.loaded.scheduler.idle for each in self.all)

    def submit(self, job: Job, admitted: bool = False) -> Replica:
        """Runs a job on one of them, and returns which. Raises Busy where all are (Scheduler.submit)."""
        busy: Busy | None = None
        for replica in self._ranked(job.request):
            try:
                replica.loaded.scheduler.submit(job, admitted)
            except Busy as error:
                busy = busy or error
            else:
                self._asked += 1
                self._at[job], replica.asked = replica, self._asked
                return replica
        assert busy is not None
        raise busy

    def cancel(self, job: Job) -> None:
        """Ends a job within a turn, wherever it is."""
        if job in self._at:
            self._at[job].loaded.scheduler.cancel(job)

    def note(self, job: Job, last: Event) -> Replica | None:
        """Notes by the last event of those that a job has whether its device works. Returns where it is or was; None
        where it has ended before."""
        replica = self._at.get(job)
        if replica is None or not isinstance(last, (Finished, Failed)):
            return replica
        del self._at[job]
        if isinstance(last, Failed) and isinstance(last.error, DeviceError):
            before, replica.failed = replica.failed, str(last.error)
            if not before and len(self.all) > 1:
                what = f"{self._model}: {replica.name} has failed and is left out"
                log.warning("%s, %d of %d go on: %s", what, len(self.working), len(self.all), replica.failed)
        elif isinstance(last, Finished) and last.reason != "cancelled" and replica.failed:
            replica.failed = ""
            if len(self.all) > 1:
                log.warning("%s: %s works again", self._model, replica.name)
        return replica

    def move(self, waiting: Sequence[Job]) -> None:
        """Runs jobs elsewhere that waited for a replica whose device has failed."""
        for job in waiting:
            self._at.pop(job, None)
            try:
                self.submit(job, admitted=True)
            except Busy as busy:  # The server ends.
                job.put([Failed(Cancelled(str(busy)), State.IDLE)])

    def _ranked(self, request: Request) -> list[Replica]:
        """Returns who may take a request, the cheapest first."""
        found = self.working or self.all
        if len(found) == 1:
            return found

        def cost(replica: Replica) -> tuple[int, int]:
            others = list(self._at.values()).count(replica)
            ahead = max(others + 1 - replica.loaded.info.n_sequences, 0)
            cache = None if request.reads else replica.loaded.cache  # What reads a prompt starts at its first token.
            kept = cache.begun(request.key) if cache else 0
            return BESIDE * (others - ahead) + BEHIND * ahead - kept, replica.asked

        return sorted(found, key=cost)


def _described(names: str) -> list[str]:
    """Returns what devices are, which are named as a model's are: "cuda:0,cuda:1"."""
    library = _native.default()
    return [library.device(name).description for name in names_of(names)]


def _numbered(names: Sequence[str], at: int) -> str:
    """Returns the name at this place, with a number where others before have the same."""
    before = names[:at].count(names[at])
    return f"{names[at]}#{before + 1}" if before else names[at]
