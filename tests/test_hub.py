"""Takes models of a hub: a stand-in on this machine says what the hub says."""

import fcntl
import hashlib
import json
import os
import pty
import socket
import struct
import termios
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from luce.errors import FileError
from luce.files.hub import chosen, fetch, parts_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Gives hub(files), which returns its address; `asked` has the paths that were asked for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    servers = []

    def start(files):
        class Handler(BaseHTTPRequestHandler):
            asked = []

            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                self.asked.append((self.command, self.path))
                name = self.path.partition("/resolve/main/")[2]
                if self.path.startswith("/api/models/owner/repo/tree/main"):
                    tree = [
                        {"type": "file", "path": each, "size": len(files[each]), "oid": "0"} for each in files
                    ]
                    self._say(200, {}, json.dumps(tree).encode())
                elif name in files:
                    etag = hashlib.sha256(files[name]).hexdigest()
                    self._say(200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, files[name])
                else:
                    self._say(404, {"X-Error-Code": "EntryNotFound"}, b"{}")

            def _say(self, status, headers, body):
                self.send_response(status)
                for key, value in {**headers, "Content-Length": len(body)}.items():
                    self.send_header(key, str(value))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", Handler.asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_file_is_downloaded_once(hub):
    url, asked = hub({"model-Q4_K_M.gguf": b"weights", "model-Q8_0.gguf": b"more", "README.md": b"x"})
    path = fetch("owner/repo", url)
    assert path.name == "model-Q4_K_M.gguf" and path.read_bytes() == b"weights"
    assert fetch("owner/repo:model-Q8_0.gguf", url).read_bytes() == b"more"
    before = [each for each in asked if each[0] == "GET" and "resolve" in each[1]]
    assert fetch("owner/repo", url) == path
    assert [each for each in asked if each[0] == "GET" and "resolve" in each[1]] == before


def test_what_is_not_there_is_named(hub):
    url, _ = hub({"a.gguf": b"1", "b.gguf": b"2"})
    with pytest.raises(FileError, match="owner/repo:none.gguf"):
        fetch("owner/repo:none.gguf", url)
    with pytest.raises(FileError, match="a.gguf, b.gguf"):
        fetch("owner/repo", url)
    with pytest.raises(FileError, match="no REPO"):
        fetch("../../etc/passwd", url)


@pytest.mark.parametrize("reference", ["owner/repo", "owner/repo:a.gguf"])
def test_a_hub_that_cannot_be_reached_is_one_line(hub, monkeypatch, reference):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # The client tries several times.
    with socket.socket() as nobody:  # The socket is bound, and it listens to no one.
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(FileError, match=f"^{reference}: [^\n]+$"):
            fetch(reference, f"http://127.0.0.1:{nobody.getsockname()[1]}")


def test_parts_and_preferences():
    assert parts_of("m-00001-of-00003.gguf") == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    split = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-F16.gguf"]
    assert chosen(split, "r") == split[0]
    with pytest.raises(FileError, match="no GGUF"):
        chosen(["mmproj-F16.gguf", "config.json"], "r")


def test_each_command_takes_a_model_of_the_hub(hub, luce_, command, tiny_gguf, monkeypatch, tmp_path):
    url, asked = hub({"m.gguf": tiny_gguf.read_bytes()})
    form = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + form)
    for words, stdin in ((("probe-gguf",), None), (("generate", "x", "-n", "2"), None),
                         (("chat", "--device", "cpu", "-n", "2"), "hello\n")):  # fmt: skip
        result = luce_(*words, "--hf", "owner/repo", stdin=stdin)
        assert result.exit_code == 0 and result.stdout, result.stderr
    assert [path for verb, path in asked if verb == "GET" and "resolve" in path] == [
        "/owner/repo/resolve/main/m.gguf"
    ]
    env = {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path / "other")}
    words = ("--hf", "owner/repo:m.gguf", "--port", "0", "--device", "cpu", "--ctx", "256")
    screen, theirs = pty.openpty()  # The bar is for a terminal.
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with command("serve", *words, env=env, stderr=theirs) as process, open(screen, "rb", buffering=0) as said:
        os.close(theirs)
        shown = b""
        while b"luce serves" not in shown:
            shown += said.read(1000)
        process.terminate()
    assert b"m.gguf: 100%" in shown and b"luce serves owner/repo:m.gguf at http" in shown
