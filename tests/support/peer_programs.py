"""Small programs in place of llama.cpp's: they write down how they were called, and answer."""

from __future__ import annotations

# Each writes its arguments, a line of JSON, to the file `calls` beside it.
PROGRAM = """#!{python}
import json, sys
from pathlib import Path
here, args = Path(__file__).parent, sys.argv[1:]
option = dict(zip(args, args[1:]))
with (here / "calls").open("a") as calls:
    print(json.dumps([Path(__file__).name, *args]), file=calls)
"""
# A server answers "ok" to each GET, and to a POST what answer(asked) returns.
SERVER = (
    PROGRAM
    + """
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer  # HTTPServer asks for this host's name first

class Handler(BaseHTTPRequestHandler):
    def put(self, answer):
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.put({"status": "ok"})

    def do_POST(self):
        self.put(answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def log_message(self, *args):
        pass

def serve():
    TCPServer(("127.0.0.1", int(option["--port"])), Handler).serve_forever()
"""
)
