"""A client's connection: uvicorn's, with an end for those that say or read nothing, and a bound on how many
there are.

    opened ──▶ head ──▶ body ──▶ answer ──▶ kept alive ──▶ head ...
    HEAD_S     HEAD_S   BODY_S   STALL_S    KEEP_ALIVE_S

A head has to be whole HEAD_S after its connection was opened or its first byte came. A body may pause for
BODY_S, and so may what is left of one that was answered before its end. Where an answer waits for its reader,
he has to take some of it within STALL_S. A connection whose time is up is closed without a word, as nginx
does: the log has a line for it, and what was generated for it ends.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from luce.server.log import CLOSED, Log, Record

HEAD_S, BODY_S, STALL_S = 20.0, 30.0, 60.0
KEEP_ALIVE_S = 75  # A connection is kept for so long after an answer.
MAX_CONNECTIONS = 512
LINGER_S = 2.0  # One that is turned away has so long to read why,
LINGERING = 64  # and so many of them may.
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b"
)
SAID = b'{"error":{"message":"the server has as many connections as it takes","type":"server_error"}}'


def max_connections() -> int:
    """Returns how many connections may be open: half of the files that the process may have open, at most
    MAX_CONNECTIONS."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


class Connection(H11Protocol):
    """One connection. `log` gets the requests that end here, before they reach the application."""

    log: Log
    most: int

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None  # It ends a head or a body.
        self._stalled: asyncio.TimerHandle | None = None  # It ends an answer that nobody reads.
        self._turned_away = False
        self._awaits = "head"  # Of the client: its "head", "body" or "next" request, or "" where it waits.

    # ---- who is let in

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            idle = next((each for each in self.connections if _is_idle(each)), None)
            if idle is None:
                self._turn_away()
                return
            idle.transport.close()  # A client that keeps one for later has to open another.
        self._within(HEAD_S, self._head_over)

    def _turn_away(self) -> None:
        """Says that the server is full. What the client sends meanwhile is not read: closing at once would
        reset the connection before he has read why."""
        self._turned_away = True
        self._tell(503, "busy")
        if len(self.connections) > self.most + LINGERING:
            self.transport.abort()
            return
        self.transport.write(FULL % (len(SAID), SAID))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._within(LINGER_S, self.transport.abort)

    # ---- what comes from the client

    def data_received(self, data: bytes) -> None:
        if not self._turned_away:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def _watch(self) -> None:
        """Sets the timer by what is awaited of the client now."""
        before, state = self._awaits, self.conn.their_state
        self._awaits = ""
        if state is h11.SEND_BODY and not self.transport.is_closing():
            self._awaits = "body"
            self._within(BODY_S, self._body_over)
        elif state is h11.IDLE and not self.transport.is_closing():
            self._awaits = "head" if self._has_begun() else "next"
            if self._awaits != before:  # More bytes of a head do not give it more time.
                self._within(HEAD_S if self._awaits == "head" else KEEP_ALIVE_S, self._head_over)
        else:
            self._within(0, None)

    def _has_begun(self) -> bool:
        """Says whether some of a head is there."""
        return bool(self.conn.trailing_data[0])

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP. Where a request is under way, its line tells of it."""
        if self.cycle is None or self.cycle.response_complete:
            self._tell(400, "invalid")
        else:
            self._closes(400, "invalid")
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # Its answer has begun.
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: such a request is answered as HTTP/1.1, as it may be."""

    # ---- the ends

    def _within(self, seconds: float, over: Callable[[], object] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if over is None else self.loop.call_later(seconds, over)

    def _head_over(self) -> None:
        if self._has_begun():
            self._tell(408, "head")
        self.transport.close()

    def _body_over(self) -> None:
        self._closes(408, "body")
        self.transport.close()

    def _tell(self, status: int, error: str) -> None:
        client = self.client[0] if self.client else ""
        self.log.request(Record("", "", client=client, status=status, error=error))

    def _closes(self, status: int, error: str) -> None:
        """Notes for the log why the request that is under way is broken off."""
        scope: Any = self.scope
        scope[CLOSED] = (status, error)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall(self.transport.get_write_buffer_size())

    def _stall(self, left: int) -> None:
        self._stalled = self.loop.call_later(STALL_S, self._stall_over, left)

    def _stall_over(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._stall(left)
            return
        self._closes(499, "stalled")
        self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def _end_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._within(0, None)
        self._end_stall()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()


def _is_idle(connection: Any) -> bool:
    """Says whether a connection is kept for a request that may come."""
    return isinstance(connection, Connection) and connection._awaits == "next"


def connections_of(log: Log, most: int | None = None) -> type[Connection]:
    """Returns the class of a server's connections, which uvicorn makes by itself."""
    return type("Connection", (Connection,), {"log": log, "most": most or max_connections()})
