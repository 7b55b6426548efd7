"""Hands requests on to a server and numbers them: NUMBER.json is what a client sent, and the server's log tells of it.

Run it as `python recorder.py URL FOLDER`. It says its own address on stdout.
"""

from __future__ import annotations

import json
import sys
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

HOPS = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}  # Each connection has its own.


class Handler(BaseHTTPRequestHandler):
    """One client's connection."""

    protocol_version = "HTTP/1.1"
    target, folder = "", Path()
    numbers, lock = count(), threading.Lock()

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        with self.lock:
            number = f"{next(self.numbers):03}"
        if body:
            (self.folder / f"{number}.json").write_text(json.dumps({"path": self.path, "body": json.loads(body)}))
        server = HTTPConnection(self.target, timeout=600)
        given = {name: value for name, value in self.headers.items() if name.lower() not in HOPS}
        given["x-request-id"] = number  # The server's log has it.
        server.request(self.command, self.path, body or None, given)
        answer = server.getresponse()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOPS:
                self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        while part := answer.read1(65536):
            self._write(part)
        self._write(b"")
        server.close()

    def _write(self, part: bytes) -> None:
        if self.command != "HEAD":
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.flush()

    do_GET = do_HEAD = do_POST = pass_on  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Says nothing: the server has a log."""


if __name__ == "__main__":
    url, folder = sys.argv[1:]
    Handler.target, Handler.folder = urlsplit(url).netloc, Path(folder)
    recorder = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{recorder.server_port}", flush=True)
    recorder.serve_forever()
