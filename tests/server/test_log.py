"""Reads the log: one line for each request, refused ones too, and nothing of what was said."""

import json
import logging
import socket
from contextlib import closing
from http.client import HTTPConnection

import pytest
from serving import HANG_S, serving, settings, until

from luce.data import BOX
from luce.decode.engine import Engine
from luce.server import app
from luce.server.api import body
from luce.server.cli import logging_to
from luce.server.log import MAX_PATH, Log

SECRET = "xyzzy"
SAID = [{"role": "user", "content": SECRET}]
FUNCTION = {"name": "f", "parameters": {"description": SECRET, "type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
PREFLIGHT = {"Origin": "http://localhost", "Access-Control-Request-Method": "GET"}


@pytest.fixture(scope="module")
def server(native):
    with serving({"box": BOX}, keys=["k"], log="json") as running:
        running.http.headers["Authorization"] = "Bearer k"
        yield running


@pytest.fixture
def lines(server, capsys):
    """Gives lines(n), the next n lines of the log as objects; there are no more of them."""
    found = []

    def read(n=1):
        def come():
            found.extend(map(json.loads, capsys.readouterr().err.splitlines()))
            return len(found) >= n

        until(come, f"{n} lines are written")
        assert len(found) == n, found
        taken, found[:] = list(found), []
        return taken

    return read


def test_each_request_has_one_line(server, lines, monkeypatch):
    monkeypatch.setattr(body, "MAX_BODY", 5000)
    for method, path, more, status, error in (
        ("GET", "/health", {}, 200, None),
        ("GET", "/v1/models", {}, 200, None),
        ("GET", "/v1/models", {"headers": {"Authorization": "Bearer no"}}, 401, "auth"),
        ("GET", "/v1/models", {"headers": {"Host": "evil.example"}}, 403, "forbidden"),
        ("GET", "/v1/models", {"headers": {"Origin": "https://evil.example"}}, 403, "forbidden"),
        ("OPTIONS", "/v1/models", {"headers": PREFLIGHT}, 200, None),
        ("GET", "/nothing", {}, 404, "no_route"),
        ("PUT", "/v1/models", {}, 405, "invalid"),
        ("POST", "/v1/completions", {"content": "{"}, 400, "invalid"),
        ("POST", "/v1/completions", {"content": b"x" * 6000}, 413, "too_large"),
        ("POST", "/api/chat", {"json": {"messages": SAID, "options": {"num_predict": 1}}}, 200, None),
    ):  # fmt: skip
        response = server.http.request(method, path, **more)
        (line,) = lines()
        assert response.status_code == status == line["status"], path
        assert (line["method"], line["path"], line.get("error")) == (method, path, error)
        assert line["client"] == "127.0.0.1"
        assert response.headers["x-request-id"] == line["id"] == response.headers["request-id"]
        assert line["time"].endswith("Z") and line["seconds"] >= 0


def test_a_line_tells_of_the_answer(server, lines):
    asked = {"model": "mine", "messages": SAID, "max_tokens": 5, "ignore_eos": True}
    for stream in (False, True):
        server.post("/v1/chat/completions", stream=stream, **asked)
        (line,) = lines()
        told = {"model": "mine", "generated": 5, "reason": "length", "status": 200}
        assert told.items() <= line.items()
        assert {"prompt", "cached", "prefill_s", "tok_per_s", "accepted_length", "first_token_s"} <= set(line)


def test_a_line_says_what_was_read_again(server, lines):
    """The second prompt has all of the first, which is kept at its last cut, and the third less than is kept."""
    told, prompts = [], [[70] * 500, [70] * 500 + [71], [70] * 300 + [72]]
    for prompt in prompts:
        server.post("/v1/completions", model="mine", prompt=prompt, max_tokens=1)
        (line,) = lines()
        told.append((line["prompt"], line["cached"], line["again"]))
    assert told == [(500, 0, 0), (501, 448, 52), (301, 0, 300)]  # A CPU cuts at multiples of 64.


def test_a_clients_own_id_is_taken_if_it_is_plain(server, lines):
    ids = set()
    for given, taken in (("req-1.a:b_C", True), ("a" * 128, True), ("a" * 129, False), ("", False),
                         ("a b", False), ('a"', False), ("ä", False)):  # fmt: skip
        response = server.http.get("/health", headers={"X-Request-Id": given.encode()})
        (line,) = lines()
        assert (line["id"] == given) == taken and line["id"] == response.headers["x-request-id"]
        ids.add(line["id"])
    assert len(ids) == 7


def test_a_client_that_goes_is_499(endless, capsys):
    """Also where its answer had begun with 200, or it waited for another's."""
    how = settings(sequences=1, ctx=50_000, checkpoints=0, spec="off")
    with serving({"m": endless}, how, log="json") as server:
        for stream in (True, False):
            asked = {"prompt": SECRET, "max_tokens": 49_000, "stream": stream}
            with closing(HTTPConnection(*server.url.removeprefix("http://").split(":"))) as client:
                client.request("POST", "/v1/completions", json.dumps(asked))
                if stream:
                    client.getresponse().read(10)
                until(lambda: server.scheduler.running, "it runs")
            said = []
            until(lambda said=said: said.append(capsys.readouterr().err) or any(said), "the line is written")
            line = json.loads("".join(said))
            assert (line["status"], line["error"], line["reason"]) == (499, "gone", "gone")


def test_nothing_of_what_was_said_is_told(server, monkeypatch, lines):
    """Not even where a defect's own words have it."""
    server.post(f"/v1/chat/completions?x={SECRET}", messages=SAID, tools=[TOOL], max_tokens=3)
    server.post("/v1/chat/completions", messages=[{"role": SECRET, "content": SECRET}])
    server.post("/v1/completions", prompt=SECRET, stop=SECRET, max_tokens=3, stream=True)
    server.post("/v1/completions", prompt={SECRET: 1})

    def defect(*args, **how):
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr(Engine, "generation", defect)
    server.post("/v1/completions", prompt=SECRET)
    monkeypatch.setattr(app, "asked", defect)
    refused = server.post("/v1/completions", prompt=SECRET)
    told = lines(7)
    assert SECRET not in json.dumps(told) and refused.status_code == 500
    assert SECRET in refused.json()["error"]["message"]  # Who said it may read it.
    (defects,) = [line for line in told if line.get("level") == "error"]
    id = refused.headers["x-request-id"]
    assert defects["message"].startswith(f"ZeroDivisionError in request {id} at ")
    assert "test_log.py" in defects["message"]


def test_lines_of_text_are_words(native, capsys):
    with serving({"box": BOX}, log="text") as server:
        server.http.get('/a b"c')
        server.http.get("/" + "x" * 2 * MAX_PATH)
    lines = [line for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == 2 and ' method="GET" path="/a b\\"c" status=404 id="' in lines[0]
    assert lines[0].startswith('time="') and ' error="no_route" ' in lines[0]
    assert f'path="/{"x" * (MAX_PATH - 1)}" ' in lines[1]


def test_what_the_core_and_pythons_libraries_report_is_in_the_log(native, capsys):
    for form in ("text", "json", ""):
        with logging_to(Log(form)):
            for level, word in enumerate(("debug", "info", "warning", "error")):
                native._log(level, native.ffi.new("char[]", f"core {word}\n".encode()), native.ffi.NULL)
            logging.getLogger("some.library").warning("a\nwarning %d", 7)
            logging.getLogger("some.library").info("nothing")
            try:
                raise ValueError(SECRET)
            except ValueError:
                logging.getLogger("some.library").exception(SECRET)
        said = capsys.readouterr().err
        if form == "":
            assert [line.split()[1] for line in said.splitlines()] == ['level="error"'] * 2
        elif form == "json":
            told = [json.loads(line) for line in said.splitlines()]
            assert [(line["level"], line["message"]) for line in told[:4]] == [
                ("info", "core info"), ("warning", "core warning"), ("error", "core error"),
                ("warning", "some.library: a warning 7")]  # fmt: skip
            assert told[4]["message"].startswith("ValueError at ") and len(told) == 5
        assert SECRET not in said
    assert native._log == native.ffi.NULL


def test_quiet_is_quiet(native, capsys):
    with serving({"box": BOX}, log="") as server:
        assert server.http.get("/nothing").status_code == 404
    assert capsys.readouterr().err == ""


def test_a_log_that_nobody_reads_any_more_harms_nobody(native, monkeypatch):
    class Broken:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    with serving({"box": BOX}, log="text") as server:
        monkeypatch.setattr("sys.stderr", Broken())
        assert server.http.get("/health").status_code == 200


def test_what_is_no_http_has_a_line(server, lines):
    host, _, port = server.url.removeprefix("http://").partition(":")
    for sent, path in ((b"\x16\x03\x01\x02\x00\r\n\r\n", ""), (b"GET / HTTP/9.9.9\r\n\r\n", "")):
        with closing(socket.create_connection((host, int(port)), HANG_S)) as client:
            client.sendall(sent)
            assert client.recv(9999).startswith(b"HTTP/1.1 400 ")
        (line,) = lines()
        assert (line["status"], line["error"], line["path"]) == (400, "invalid", path)
