"""Connects as clients that say or read nothing: each is let go in time, and bounds hold."""

import asyncio
import heapq
import json
import socket
from contextlib import closing
from unittest import mock

import pytest
import uvicorn
from serving import HANG_S, serving, settings, until
from uvicorn.server import ServerState

from luce.data import BOX
from luce.errors import OutOfMemory
from luce.server import connection, response
from luce.server.connection import BODY_S, HEAD_S, KEEP_ALIVE_S, LINGER_S, STALL_S, connections_of
from luce.server.log import CLOSED, Log
from luce.server.models import Served

# ---- by a clock of our own


class Clock:
    """A loop of which only the time passes: it calls back, and runs no tasks."""

    def __init__(self):
        self.now, self._due, self._n = 0.0, [], 0

    def call_later(self, seconds, call, *args):
        handle = mock.Mock(cancelled=False)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        self._n += 1
        heapq.heappush(self._due, (self.now + seconds, self._n, handle, call, args))
        return handle

    def create_task(self, work):
        work.close()
        return mock.Mock()

    def pass_(self, seconds):
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, handle, call, args = heapq.heappop(self._due)
            if not handle.cancelled:
                call(*args)
        self.now = end


class Transport(mock.Mock):
    """What a connection writes to. `waiting` bytes of it were not read by the client."""

    def __init__(self, **how):
        super().__init__(**how)
        self.closed, self.written, self.waiting = "", b"", 0
        self.get_extra_info = lambda name: None
        self.is_closing = lambda: bool(self.closed)
        self.get_write_buffer_size = lambda: self.waiting

    def _get_child_mock(self, **how):
        return mock.Mock(**how)

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = self.closed or "closed"

    def abort(self):
        self.closed = self.closed or "aborted"


class Clients:
    """Connections of one server, on one clock."""

    def __init__(self, most=3):
        self.clock, self.lines = Clock(), []
        log = mock.Mock(spec=Log)
        log.request = self.lines.append
        self._state = ServerState()
        self._config = uvicorn.Config(None, http=connections_of(log, most), timeout_keep_alive=KEEP_ALIVE_S,
                                      log_config=None, lifespan="off")  # fmt: skip
        self._config.load()

    def open(self):
        opened = self._config.http_protocol_class(
            config=self._config, server_state=self._state, app_state={}, _loop=self.clock
        )
        opened.connection_made(Transport())
        return opened

    def told(self):
        return [(line.status, line.error) for line in self.lines]


@pytest.fixture
def clients():
    return Clients()


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"


def answered(client, close=False):
    """Lets the application answer what has come."""
    headers = [(b"content-length", b"2")] + [(b"connection", b"close")] * close

    async def answer():
        await client.cycle.send({"type": "http.response.start", "status": 200, "headers": headers})
        await client.cycle.send({"type": "http.response.body", "body": b"ok"})

    asyncio.run(answer())


@pytest.mark.parametrize("sent", [b"", b"G", GET[:-2]])
def test_a_head_has_to_be_whole_in_time(clients, sent):
    client = clients.open()
    if sent:
        client.data_received(sent)
    clients.clock.pass_(HEAD_S - 1)
    assert not client.transport.closed
    clients.clock.pass_(1)
    assert client.transport.closed == "closed" and client.transport.written == b""
    assert clients.told() == ([(408, "head")] if sent else [])


def test_a_head_byte_by_byte_has_no_more_time(clients):
    client = clients.open()
    for byte in GET[:-1]:
        if client.transport.closed:
            break
        client.data_received(bytes([byte]))
        clients.clock.pass_(1)
    assert clients.clock.now == HEAD_S and clients.told() == [(408, "head")]


def test_a_body_may_pause_and_not_stop(clients):
    client = clients.open()
    client.data_received(POST)
    for _ in range(99):
        clients.clock.pass_(BODY_S - 1)
        client.data_received(b"x")
    assert not client.transport.closed
    clients.clock.pass_(BODY_S)
    assert client.transport.closed == "closed" and client.scope[CLOSED] == (408, "body")


def test_what_is_left_of_a_body_after_its_answer_has_as_long(clients):
    client = clients.open()
    client.data_received(POST + b"x" * 50)
    answered(client)
    clients.clock.pass_(BODY_S - 1)
    client.data_received(b"x" * 49)
    clients.clock.pass_(BODY_S - 1)
    assert not client.transport.closed
    clients.clock.pass_(1)
    assert client.transport.closed


def test_an_answer_takes_as_long_as_it_takes(clients):
    client = clients.open()
    client.data_received(POST + b"x" * 100)
    clients.clock.pass_(3600)
    assert not client.transport.closed


@pytest.mark.parametrize("discarded", [0, 1])
def test_a_connection_is_kept_for_the_next_request_and_not_for_ever(clients, discarded):
    """Also where the last bytes of a body came after its answer."""
    client = clients.open()
    for _ in range(3):
        client.data_received(POST + b"x" * (100 - discarded))
        answered(client)
        if discarded:
            client.data_received(b"x" * discarded)
        clients.clock.pass_(KEEP_ALIVE_S - 1)
    assert not client.transport.closed
    client.data_received(GET[:9])  # The next head has begun, and has its own time.
    clients.clock.pass_(HEAD_S - 1)
    assert not client.transport.closed
    clients.clock.pass_(1)
    assert client.transport.closed and clients.told() == [(408, "head")]
    client = clients.open()
    client.data_received(GET)
    answered(client)
    clients.clock.pass_(KEEP_ALIVE_S)
    assert client.transport.closed and clients.told() == [(408, "head")]


def test_requests_that_came_together_are_answered_one_after_another(clients):
    client = clients.open()
    client.data_received(GET + GET + GET[:9])
    answered(client)
    answered(client)
    assert client.transport.written.count(b"200") == 2
    clients.clock.pass_(HEAD_S)
    assert client.transport.closed and clients.told() == [(408, "head")]


def test_a_reader_has_to_read_in_time(clients):
    """A slow one is let be: he takes some of it."""
    client = clients.open()
    client.data_received(GET)
    client.transport.waiting = 100_000
    client.pause_writing()
    for _ in range(3):
        clients.clock.pass_(STALL_S - 1)
        client.transport.waiting -= 1000
    assert not client.transport.closed
    client.resume_writing()
    clients.clock.pass_(STALL_S)
    assert not client.transport.closed
    client.pause_writing()
    clients.clock.pass_(STALL_S)
    assert client.transport.closed == "aborted" and client.scope[CLOSED] == (499, "stalled")


def test_connections_are_bounded(clients):
    held = [clients.open() for _ in range(3)]
    more = clients.open()
    assert more.transport.written.startswith(b"HTTP/1.1 503 ") and clients.told() == [(503, "busy")]
    head, _, body = more.transport.written.partition(b"\r\n\r\n")
    assert b"\r\nRetry-After: " in head and b"\r\nContent-Length: %d" % len(body) in head and json.loads(body)
    more.data_received(GET)  # He may still be sending.
    clients.clock.pass_(LINGER_S)
    assert more.transport.closed == "aborted"
    more.connection_lost(None)
    held[0].connection_lost(None)
    assert clients.open().transport.written == b""


def test_too_many_that_are_turned_away_are_not_even_told(clients, monkeypatch):
    monkeypatch.setattr(connection, "LINGERING", 2)
    ends = [clients.open().transport.closed for _ in range(6)]
    assert ends == ["", "", "", "", "", "aborted"]


def test_a_connection_that_waits_for_its_next_request_makes_room(clients):
    held = [clients.open() for _ in range(3)]
    held[1].data_received(GET)
    answered(held[1])
    more = clients.open()
    assert [each.transport.closed for each in held] == ["", "closed", ""] and not more.transport.written


def test_half_of_the_files_that_may_be_open_are_connections(monkeypatch):
    for soft, most in ((256, 128), (1024, 512), (1 << 20, 512), (-1, 512)):
        monkeypatch.setattr(connection.resource, "getrlimit", lambda which, soft=soft: (soft, soft))
        assert connection.max_connections() == most


# ---- at a server


def connect(url, small=False):
    """Opens a connection; with `small`, hardly anything waits in it unread."""
    host, _, port = url.removeprefix("http://").partition(":")
    opened = socket.socket()
    if small:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.settimeout(HANG_S)
    opened.connect((host, int(port)))
    return opened


@pytest.fixture
def narrow(monkeypatch):
    """Lets the system hold little of what a server has sent."""
    made = connection.Connection.connection_made

    def narrowed(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(connection.Connection, "connection_made", narrowed)


@pytest.mark.parametrize(
    ("sent", "name", "line"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", "HEAD_S", {"status": 408, "error": "head"}),
        (POST + b"{", "BODY_S", {"status": 408, "error": "body", "path": "/tokenize", "method": "POST"}),
        (b"GARBAGE\r\n\r\n", "HEAD_S", {"status": 400, "error": "invalid"}),
    ],
)
def test_half_a_request_is_ended_and_told(native, monkeypatch, capsys, sent, name, line):
    with serving({"box": BOX}, log="json") as server:
        monkeypatch.setattr(connection, name, 0.05)
        with closing(connect(server.url)) as client:
            client.sendall(sent)
            said = client.recv(9999)
            assert said.startswith(b"HTTP/1.1 400 ") if line["status"] == 400 else said == b""
        lines = []

        def has_line():
            lines.extend(map(json.loads, capsys.readouterr().err.splitlines()))
            return lines

        until(has_line, "the log has a line")
    (found,) = lines
    assert line.items() <= found.items()


ASKED = {"prompt": "x", "temperature": 0, "stream": True, "ignore_eos": True, "logprobs": 20}


def streams(client, **more):
    """Sends a request for a stream, of which nothing is read."""
    body = json.dumps(ASKED | more).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    client.sendall(head % len(body) + body)


def test_a_stream_that_nobody_reads_ends(native, endless, monkeypatch, narrow, capsys):
    how = settings(sequences=1, ctx=50_000, checkpoints=0, spec="off")
    with serving({"endless": endless}, how, log="json") as server:
        monkeypatch.setattr(connection, "STALL_S", 0.05)
        with closing(connect(server.url, small=True)) as client:
            streams(client, max_tokens=49_000)
            until(lambda: server.scheduler.running, "it runs")
            until(lambda: server.scheduler.idle, "its sequence is free")
            served = server.models.slots["endless"].served
            until(lambda: not served.users, "nobody holds the model")
        told = [""]
        until(lambda: told.append(told.pop() + capsys.readouterr().err) or told[0].endswith("\n"), "its line")
        line = json.loads(told[0])
        assert (line["status"], line["error"], line["reason"]) == (499, "stalled", "gone")
        assert 0 < line["generated"] < 49_000


def test_a_stream_that_nobody_reads_does_not_keep_its_model(native, endless, monkeypatch, narrow):
    """What it says is all there by then, and is read after the model has gone."""
    made = []

    class Narrow(Served):
        def __init__(self, *args):
            if any(each.open for each in made):
                raise OutOfMemory("needed 2, free 1")
            super().__init__(*args)
            self.open = True
            made.append(self)

        def close(self):
            self.open = False
            super().close()

    monkeypatch.setattr("luce.server.models.Served", Narrow)
    how = settings(ctx=4096, checkpoints=0, spec="off")
    with serving({"a": endless, "b": endless}, how) as server:
        with closing(connect(server.url, small=True)) as client:
            streams(client, model="a", max_tokens=500)
            until(lambda: made and made[0].open and made[0].first.scheduler.running, "it runs")
            until(lambda: made[0].first.scheduler.idle, "it has ended")
            asked = {"model": "b", "prompt": "x", "max_tokens": 2}
            until(lambda: server.post("/v1/completions", **asked).status_code == 200, "b takes its place")
            assert [each.open for each in made] == [False, True]
            said = b""
            while not said.endswith(b"0\r\n\r\n"):
                said += client.recv(1 << 16)
        assert b'"predicted_n":500' in said and b'"finish_reason":"length"' in said


def test_a_client_that_goes_before_its_stream_begins_frees_its_sequence(native, endless, monkeypatch):
    """It is gone when the engine has begun: nothing of the stream is ever asked for."""
    how = settings(sequences=1, ctx=50_000, checkpoints=0, spec="off")
    with serving({"endless": endless}, how) as server:
        begun = response.Server._begun

        async def and_gone(self, ask, form):
            made = await begun(self, ask, form)
            for each in list(server.listener.server_state.connections):
                each.transport.abort()
            return made

        monkeypatch.setattr(response.Server, "_begun", and_gone)
        with closing(connect(server.url)) as client:
            streams(client)
            served = server.models.slots["endless"].served
            until(lambda: client.recv(9999) == b"", "it is gone")
        until(lambda: server.scheduler.idle and not served.users, "nothing is left of it")
