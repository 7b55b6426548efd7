"""Keeps recent responses by id, so that a later request can refer to one (`previous_response_id`) or to an
item of one (`item_reference`): in memory, bounded by number and bytes, those that were used longest ago leave
first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import msgspec

from luce.server.ask import Refused

MOST, MOST_BYTES = 1000, 64 << 20
_KNOWN = "it was not stored, or is not among the most recent ones"


@dataclass(frozen=True)
class Kept:
    """One response as JSON. `brought` are the items of its request, behind those of `previous`."""

    response: bytes
    brought: bytes
    previous: str | None
    items: tuple[str, ...]  # ids of its output's items

    @property
    def size(self) -> int:
        return len(self.response) + len(self.brought)

    @property
    def input(self) -> list[dict[str, Any]]:
        """Returns the items that its request brought."""
        found: list[dict[str, Any]] = msgspec.json.decode(self.brought)
        return found

    @property
    def output(self) -> list[dict[str, Any]]:
        """Returns the items that were said."""
        found: list[dict[str, Any]] = msgspec.json.decode(self.response)["output"]
        return found


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

    def keep(self, response: Mapping[str, Any], brought: bytes) -> None:
        """Keeps a response and the items that its request brought, as JSON."""
        id, items = response["id"], tuple(item["id"] for item in response["output"])
        kept = Kept(msgspec.json.encode(response), brought, response["previous_response_id"], items)
        if kept.size > self._most_bytes:
            return
        with self._lock:
            self._kept[id] = kept
            self._holders |= dict.fromkeys(items, id)
            self._bytes += kept.size
            while len(self._kept) > self._most or self._bytes > self._most_bytes:
                self._remove(next(iter(self._kept)))

    def get(self, id: str) -> Kept:
        """Returns what is kept of a response. Raises Refused where nothing is."""
        with self._lock:
            self._kept.move_to_end(self._known(id))
            return self._kept[id]

    def delete(self, id: str) -> None:
        """Removes a response. Raises Refused where it is not kept."""
        with self._lock:
            self._remove(self._known(id))

    def turns(self, id: str) -> list[Kept]:
        """Returns a response and all that it goes on from, in their order. Raises Refused where one of them
        is not kept."""
        found: list[Kept] = []
        at: str | None = id
        with self._lock:
            while at is not None:
                if at not in self._kept:
                    said = f"Previous response with id {at!r} not found: {_KNOWN}."
                    raise Refused(400, said, "no_previous", "previous_response_id")
                self._kept.move_to_end(at)
                found.append(self._kept[at])
                at = found[-1].previous
        return found[::-1]

    def holders(self, ids: Iterable[str]) -> list[Kept]:
        """Returns the responses that have these items, each once. Raises Refused where an item is not kept.
        """
        found: dict[str, Kept] = {}
        with self._lock:
            for id in ids:
                if (holder := self._holders.get(id)) is None:
                    raise Refused(400, f"Item with id {id!r} not found: {_KNOWN}.", param="input")
                self._kept.move_to_end(holder)
                found[holder] = self._kept[holder]
        return [*found.values()]

    def _known(self, id: str) -> str:
        if id not in self._kept:
            raise Refused(404, f"Response with id {id!r} not found: {_KNOWN}.", param="response_id")
        return id

    def _remove(self, id: str) -> None:
        kept = self._kept.pop(id)
        self._bytes -= kept.size
        for item in kept.items:
            self._holders.pop(item, None)
