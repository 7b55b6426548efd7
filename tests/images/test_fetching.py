"""Images by their addresses: what lies below a prefix is fetched, from a server of this machine, and nothing else."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from luce.errors import ArgumentError
from luce.images import fetching
from luce.images.fetching import Allowed
from luce.images.opening import ImageError

BODY = b"some bytes of an image"


class Web(BaseHTTPRequestHandler):
    """Answers by the path, and notes what was asked."""

    def do_GET(self):
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.server.places[path])
            self.end_headers()
        elif path == "/img/none":
            self.send_error(404)
        elif path == "/img/large":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(bytes(1 << 20))
        elif path == "/img/slow":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while not self.server.ended.is_set():  # A byte now and then, so that no read waits for long.
                    self.wfile.write(b"a")
                    self.wfile.flush()
                    time.sleep(0.02)
                return
            self.server.left.set()
        elif path == "/img/cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(BODY)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BODY)

    def log_message(self, *_):
        pass


@pytest.fixture
def web():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    server.handle_error = lambda *_: None  # Clients leave.
    server.asked, server.places = [], {}
    server.ended, server.left = threading.Event(), threading.Event()
    server.base = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_lies_below_a_prefix_is_fetched(web):
    allowed = Allowed([f"{web.base}/img/"])
    assert allowed.fetch(f"{web.base}/img/a.png?x=1") == BODY and web.asked == ["/img/a.png?x=1"]
    assert Allowed([web.base]).fetch(f"{web.base}/any/where") == BODY
    assert Allowed([f"{web.base}/img"]).fetch(f"{web.base}/img/b/c") == BODY


@pytest.mark.parametrize(
    "address",
    [
        "{base}/other", "{base}/imgs/a", "{base}/img", "{base}/img/../other", "{base}/img/%2e%2e/other",
        "{base}/img%2fa", "{base}/img\\a", "http://user@{host}/img/a", "http://user:word@{host}/img/a",
        "http://localhost:{port}/img/a", "https://{host}/img/a", "http://127.0.0.1/img/a", "ftp://{host}/img/a",
        "file:///etc/passwd", "/etc/passwd", "{base}/img/a b", "{base}/img/a\r\nHost: b", "http://[/img/", "",
        "img/a", "http://{host}.example.com/img/a", "{base}/img/\u00e9", "file://[x", "{base}/img/..;/other",
        "{base}/img/%252e%252e/other", "http://[fd00::abcd]/img/a", "http://[x/img/a",
    ],
)  # fmt: skip
def test_nothing_else_is(web, address):
    host, port = web.base.removeprefix("http://"), web.server_address[1]
    with pytest.raises(ImageError, match="luce does not fetch"):
        Allowed([f"{web.base}/img/"]).fetch(address.format(base=web.base, host=host, port=port))
    assert not web.asked


def test_redirects_stay_below_the_prefixes(web):
    allowed = Allowed([f"{web.base}/img/", f"{web.base}/to/"])
    web.places = {"/to/inside": "/img/a", "/to/outside": "/secret", "/to/file": "file:///etc/passwd",
                  "/to/elsewhere": "http://169.254.169.254/", "/to/again": "/to/again"}  # fmt: skip
    assert allowed.fetch(f"{web.base}/to/inside") == BODY
    outside = "no prefix that is allowed"
    for name, said in (("outside", outside), ("file", "does not fetch"), ("elsewhere", outside),
                       ("again", "leads on more than 3 times")):  # fmt: skip
        web.asked.clear()
        with pytest.raises(ImageError, match=said):
            allowed.fetch(f"{web.base}/to/{name}")
        assert set(web.asked) == {f"/to/{name}"}


def test_size_and_time_are_bounded(web, monkeypatch):
    monkeypatch.setattr(fetching, "SECONDS", 0.3)
    allowed = Allowed([web.base])
    with pytest.raises(ImageError, match="takes longer than"):
        allowed.fetch(f"{web.base}/img/slow")
    assert web.left.wait(60), "the server sends for as long as it is read"
    monkeypatch.setattr(fetching, "SECONDS", 60)
    monkeypatch.setattr(fetching, "MAX_BYTES", 3 << 20)
    with pytest.raises(ImageError, match=f"more than {3 << 20} bytes"):
        allowed.fetch(f"{web.base}/img/large")


def test_looking_a_name_up_is_bounded_too(monkeypatch):
    ended, waited_for = threading.Event(), threading.Event()

    def looks_for_ever(*_args, **_how):
        if not ended.wait(60):
            waited_for.set()
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", looks_for_ever)
    monkeypatch.setattr(fetching, "SECONDS", 0.2)
    try:
        with pytest.raises(ImageError, match="takes longer than"):
            Allowed(["http://images.example/"]).fetch("http://images.example/a.png")
        assert not waited_for.is_set()
    finally:
        ended.set()


def test_what_fails_is_one_line(web):
    allowed = Allowed([web.base, "http://127.0.0.1:9"])
    for address, said in (
        (f"{web.base}/img/none", "answers with status 404"),
        (f"{web.base}/img/cut", "cannot be fetched: IncompleteRead"),
        ("http://127.0.0.1:9/a", "cannot be fetched: ConnectionRefusedError"),
    ):
        with pytest.raises(ImageError, match=said) as caught:
            allowed.fetch(address)
        assert "\n" not in str(caught.value)


def test_files_below_a_folder_are_read(tmp_path):
    folder, other = tmp_path / "pictures", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (folder / "a b.png").write_bytes(BODY)
    (other / "b.png").write_bytes(BODY)
    (folder / "leads").symlink_to(other / "b.png")
    (folder / "within").symlink_to(folder / "a b.png")
    os.mkfifo(folder / "pipe")
    for prefix in (str(folder), folder.as_uri()):
        allowed = Allowed([prefix])
        for named in (str(folder / "a b.png"), (folder / "a b.png").as_uri(), str(folder / "within")):
            assert allowed.fetch(named) == BODY
        outside = other / "b.png", folder / ".." / "other" / "b.png", folder / "leads", f"{folder}s", "/etc/passwd"
        for named in outside:
            with pytest.raises(ImageError, match="below no folder that is allowed"):
                allowed.fetch(str(named))
        for named, said in (("pipe", "is no file"), ("none", "No such file"), (".", "cannot be read|is no file")):
            with pytest.raises(ImageError, match=said):
                allowed.fetch(f"{folder}/{named}")
        for odd in ("file:within", "file:", "file:///%00", f"file://{folder}/..%2f..%2fetc/passwd"):
            with pytest.raises(ImageError, match="below no folder that is allowed"):
                allowed.fetch(odd)
        with pytest.raises(ImageError, match="another machine"):
            allowed.fetch(f"file://example.com{folder}/within")
        with pytest.raises(ImageError, match="does not fetch"):
            allowed.fetch("http://127.0.0.1/a")


def test_prefixes_that_are_none_are_refused(tmp_path):
    for prefix in ("", "example.com", "ftp://a/", "http://", "http://user@a/", str(tmp_path / "none"), "http://a/../b"):
        with pytest.raises(ArgumentError):
            Allowed([prefix])


def test_without_prefixes_nothing_is_fetched():
    with pytest.raises(ImageError, match="no address is fetched"):
        Allowed([]).fetch("http://127.0.0.1/")
