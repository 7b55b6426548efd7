"""Keeps recent responses by id, so that a later request can refer to one (`previous_response_id`) or to an
item of one (`item_reference`): in memory, bounded by number and bytes, those that were used longest ago leave
first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import msgspec

from luce.server.ask import Refused

MOST, MOST_BYTES = 1000, 64 << 20
_KNOWN = "it was not stored, or is not among the most recent ones"


@dataclass(frozen=True)
class Kept:
    """One response as JSON. `input` are the items that its request brought, behind those of `previous`."""

    response: bytes
    input: bytes
    previous: str | None
    items: tuple[str, ...]  # ids of its output's items

    @property
    def size(self) -> int:
        return len(self.response) + len(self.input)


class Stored:
    """Store of responses, for any thread. Where one leaves, those that go on from it can no longer be gone on
    from: a conversation that is used stays whole, since each use counts as one of all that it goes on from.
    """

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES):
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # Those that were used last are at the end.
        self._holders: dict[str, str] = {}  # Items are in these responses, by their ids.
        self._bytes = 0
        self._lock = Lock()

    def keep(self, response: Mapping[str, Any], input: bytes) -> None:
        """Keeps a response and the items that its request brought, as JSON."""
        id, items = response["id"], tuple(item["id"] for item in response["output"])
        kept = Kept(msgspec.json.encode(response), input, response["previous_response_id"], items)
        if kept.size > self._most_bytes:
            return
        with self._lock:
            self._kept[id] = kept
            self._holders |= dict.fromkeys(items, id)
            self._bytes += kept.size
            while len(self._kept) > self._most or self._bytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def response(self, id: str) -> dict[str, Any]:
        """Returns a response. Raises Refused where it is not kept."""
        found: dict[str, Any] = msgspec.json.decode(self._get(id).response)
        return found

    def input(self, id: str) -> list[dict[str, Any]]:
        """Returns the items that a response's request brought. Raises Refused where it is not kept."""
        found: list[dict[str, Any]] = msgspec.json.decode(self._get(id).input)
        return found

    def delete(self, id: str) -> None:
        """Drops a response. Raises Refused where it is not kept."""
        with self._lock:
            self._drop(self._known(id))

    def conversation(self, id: str) -> list[dict[str, Any]]:
        """Returns all items up to the end of a response. Raises Refused where one of those that it goes on
        from is not kept."""
        turns: list[Kept] = []
        with self._lock:
            at: str | None = id
            while at is not None:
                if at not in self._kept:
                    said = f"Previous response with id {at!r} not found: {_KNOWN}."
                    raise Refused(400, said, "no_previous", "previous_response_id")
                self._kept.move_to_end(at)
                turns.append(self._kept[at])
                at = turns[-1].previous
        found: list[dict[str, Any]] = []
        for turn in reversed(turns):
            found += msgspec.json.decode(turn.input)
            found += msgspec.json.decode(turn.response)["output"]
        return found

    def item(self, id: str) -> dict[str, Any]:
        """Returns an item of a response's output. Raises Refused where it is not kept."""
        with self._lock:
            holder = self._holders.get(id)
        if holder is None:
            raise Refused(400, f"Item with id {id!r} not found: {_KNOWN}.", param="input")
        found: dict[str, Any] = next(item for item in self.response(holder)["output"] if item["id"] == id)
        return found

    def _get(self, id: str) -> Kept:
        with self._lock:
            self._kept.move_to_end(self._known(id))
            return self._kept[id]

    def _known(self, id: str) -> str:
        if id not in self._kept:
            raise Refused(404, f"Response with id {id!r} not found: {_KNOWN}.", param="response_id")
        return id

    def _drop(self, id: str) -> None:
        kept = self._kept.pop(id)
        self._bytes -= kept.size
        for item in kept.items:
            self._holders.pop(item, None)
