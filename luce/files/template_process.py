"""Runs a chat template in a process of its own, since it may be of any file and may ask for endless time and
memory.

A request is a line of JSON on stdin. The answer is one on stdout: {"text"}, {"mentions"}, {"failed"} where
the template refuses the messages, or {"error"}.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from luce.errors import Error, TemplateFailed

CPU_SECONDS = 5  # One prompt may take so many.
WALL_SECONDS = 60.0  # One prompt may take so many, on a machine that has other things to do.
MEMORY_BYTES = 1 << 30  # They bound its address space.
MAX_TEXT = 64 << 20  # An answer has at most so many bytes.

NEEDS_MEMORY = f"it needs more than {MEMORY_BYTES >> 30} GiB of memory"

CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from luce.files.template_process import answer_requests
answer_requests()
"""


class Renderer:
    """Renders one template, one prompt at a time. The process starts with the first prompt, and again after
    it was ended."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        self._template = {"source": source, "special_tokens": special_tokens}
        # The process ends with this one, since its stdin closes.
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, **variables: Any) -> str:
        """Renders as ChatTemplate.render does. TemplateFailed says what the template fails at; Error,
        that it takes too much or is malformed."""
        return str(self._answer(variables=variables)["text"])

    def mentions(self) -> frozenset[str]:
        """Returns what ChatTemplate.mentions does. Raises as render does."""
        return frozenset(self._answer()["mentions"])

    def _answer(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            try:
                answer = self._ask(self._template | {"seconds": CPU_SECONDS} | request)
            except BaseException:
                self.close()
                raise
        if "failed" in answer:
            raise TemplateFailed(answer["failed"])
        if "error" in answer:
            raise Error(answer["error"])
        return answer

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):  # It may have ended: what it said, if anything, is read below.
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        line, until = bytearray(), time.monotonic() + WALL_SECONDS
        while not line.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(until - time.monotonic(), 0))[0]:
                raise Error(f"it takes more than {WALL_SECONDS:.0f} seconds")
            piece = process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
            line += piece
            if len(line) > MAX_TEXT:
                raise Error(f"its text is of more than {MAX_TEXT >> 20} MiB")
            if not piece:
                raise Error(f"it takes more than {CPU_SECONDS} seconds, or crashes")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the parent, which ends it.
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def answer_requests() -> None:
    """Is what the process does. It ends with its stdin."""
    import resource

    from luce.files.template import ChatTemplate

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError):  # macOS has no such limit.
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    kept: tuple[Any, ChatTemplate] | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        used = int(time.process_time()) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used + request["seconds"], resource.RLIM_INFINITY))
        answer: dict[str, Any] = {}
        try:
            given = request["source"], tuple(request["special_tokens"].items())
            if kept is None or kept[0] != given:  # It is parsed once, and not for each prompt.
                kept = given, ChatTemplate(request["source"], request["special_tokens"])
            _, template = kept
            if "variables" in request:
                answer["text"] = template.render(**request["variables"])
            else:
                answer["mentions"] = sorted(template.mentions())
        except TemplateFailed as error:
            answer["failed"] = str(error)
        except Error as error:
            answer["error"] = str(error)
        except MemoryError:
            answer["error"] = NEEDS_MEMORY
        print(json.dumps(answer), flush=True)
