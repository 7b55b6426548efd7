"""Images by their addresses: those below prefixes that whoever runs luce has allowed, within bounds of size and time.

A prefix is an http or https address, or a folder. An address that leaves it, by a redirect, by dots or by a link in the
folder, is refused. What a host's name stands for is the allowing one's to know: who allows a name trusts its addresses.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, Timer
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from luce.errors import ArgumentError
from luce.images.opening import MAX_BYTES, ImageError

if TYPE_CHECKING:  # Where no address is fetched, luce starts without HTTP and TLS.
    import http.client
    import socket

SECONDS = 10.0  # An image comes within so many, redirects counted in.
REDIRECTS = 3
MOVED = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}
# Servers read a path with these in their own ways.
_ODD = re.compile(r"[\x00-\x20\x7f\\]|%2e|%2f|%5c|%00|%25", re.IGNORECASE)


@dataclass(frozen=True)
class Allowed:
    """The prefixes that addresses of images may have. Raises ArgumentError where one is neither an address nor a
    folder that is there."""

    prefixes: Sequence[str]

    def __post_init__(self) -> None:
        for prefix in self.prefixes:
            if _folder(prefix) is None:
                try:
                    _place(prefix)
                except ImageError as error:
                    raise ArgumentError(f"{prefix!r} is no prefix of addresses: {error}") from error

    def fetch(self, address: str) -> bytes:
        """Returns the bytes at an address. Raises ImageError where it is not allowed, does not answer with an image in
        time, or gives more than MAX_BYTES."""
        end = monotonic() + SECONDS
        if not self.prefixes:
            raise ImageError("an image comes as base64 or as a data URL of it: no address is fetched")
        try:
            return self._read(address) if address.startswith(("file:", "/")) else self._fetched(address, end)
        except ValueError as error:  # Python's own parsers refuse it.
            raise ImageError(f"luce does not fetch {_short(address)}: it is no address") from error

    def _fetched(self, address: str, end: float) -> bytes:
        for _ in range(REDIRECTS + 1):
            place = _place(address)
            if not any(_is_below(place, _place(prefix)) for prefix in self.prefixes if _folder(prefix) is None):
                raise ImageError(f"luce does not fetch {_short(address)}: it is below no prefix that is allowed")
            found = _asked(place, end)
            if isinstance(found, bytes):
                return found
            address = urljoin(place.geturl(), found)
            if urlsplit(address).scheme not in PORTS:
                raise ImageError(f"{_short(place.geturl())} leads to what luce does not fetch")
        raise ImageError(f"{_short(address)} leads on more than {REDIRECTS} times")

    def _read(self, address: str) -> bytes:
        """Reads a file below an allowed folder, where links have been followed."""
        named = address
        if address.startswith("file:"):
            split = urlsplit(address)
            if split.netloc not in ("", "localhost"):
                raise ImageError(f"luce does not fetch {_short(address)}: it is of another machine")
            named = unquote(split.path)
        real = Path(os.path.realpath(named)) if named.startswith("/") and "\0" not in named else Path()
        folders = (folder for folder in map(_folder, self.prefixes) if folder is not None)
        if not any(real.is_relative_to(os.path.realpath(folder)) for folder in folders):
            raise ImageError(f"luce does not fetch {_short(address)}: it is below no folder that is allowed")
        try:
            handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise ImageError(f"{_short(address)} is no file")
                return _bounded(file.read(MAX_BYTES + 1), address)
        except OSError as error:
            raise ImageError(f"{_short(address)} cannot be read: {error.strerror}") from error


def _folder(prefix: str) -> Path | None:
    """Returns the folder that a prefix names, or None where it is an address. Raises ArgumentError where the folder is
    not there."""
    named = unquote(urlsplit(prefix).path) if prefix.startswith("file:") else prefix
    if not named.startswith("/"):
        return None
    if not Path(named).is_dir():
        raise ArgumentError(f"{named} is no folder")
    return Path(named)


def _place(address: str) -> SplitResult:
    """Returns the parts of an address. Raises ImageError where it is none of http or https, or is spelled oddly."""
    try:
        place = urlsplit(address)
        known = place.scheme in PORTS and place.hostname and (place.port or 1)
    except ValueError:
        known = None
    if not known or _ODD.search(address) or not address.isascii():
        raise ImageError(f"luce does not fetch {_short(address)}: it is no http or https address")
    if place.username is not None or place.password is not None:
        raise ImageError("luce does not fetch addresses with a name or a password")
    if any(part.partition(";")[0] in (".", "..") for part in place.path.split("/")):
        raise ImageError(f"luce does not fetch {_short(address)}: it has dots for folders")
    return place


def _is_below(place: SplitResult, prefix: SplitResult) -> bool:
    """Says whether an address has a prefix: its scheme, host and port, and whole folders of its path."""
    same = (place.scheme, place.hostname, place.port or PORTS[place.scheme])
    if same != (prefix.scheme, prefix.hostname, prefix.port or PORTS[prefix.scheme]):
        return False
    if prefix.query:
        return place.path == prefix.path and place.query.startswith(prefix.query)
    return place.path == prefix.path or (place.path or "/").startswith(prefix.path.rstrip("/") + "/")


def _asked(place: SplitResult, end: float) -> bytes | str:
    """Returns what an address gives, or where it leads. All of it is over at the time `end`."""
    import http.client

    left = end - monotonic()
    if left <= 0:
        raise ImageError(f"{_short(place.geturl())} takes longer than {SECONDS:.0f} seconds")
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    port = place.port or PORTS[place.scheme]
    try:
        connection = kind(str(place.hostname), port, timeout=left)
    except http.client.InvalidURL as error:
        raise ValueError(str(error)) from error
    with closing(connection):
        late: Timer | None = None
        try:
            _connect(connection, end)
            # Who sends a byte now and then holds nobody up.
            late = Timer(end - monotonic(), _hang_up, [connection.sock])
            late.daemon = True
            late.start()
            target = (place.path or "/") + (f"?{place.query}" if place.query else "")
            connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "luce"})
            answer = connection.getresponse()
            if answer.status in MOVED and (where := answer.getheader("Location")):
                return where
            if answer.status != 200:
                raise ImageError(f"{_short(place.geturl())} answers with status {answer.status}")
            body = _bounded(answer.read(MAX_BYTES + 1), place.geturl())
            if answer.length:
                raise http.client.IncompleteRead(body, answer.length)
            if monotonic() >= end:  # It was hung up on, and what came looks like all.
                raise TimeoutError
            return body
        except TimeoutError as error:
            raise ImageError(f"{_short(place.geturl())} takes longer than {SECONDS:.0f} seconds") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            if monotonic() >= end:
                raise ImageError(f"{_short(place.geturl())} takes longer than {SECONDS:.0f} seconds") from error
            raise ImageError(f"{_short(place.geturl())} cannot be fetched: {type(error).__name__}") from error
        finally:
            if late is not None:
                late.cancel()


def _connect(connection: http.client.HTTPConnection, end: float) -> None:
    """Connects, and raises TimeoutError at the time `end`: looking a name up has no bound of its own."""
    failed: list[Exception] = []

    def connect() -> None:
        try:
            connection.connect()
        except Exception as error:
            failed.append(error)

    thread = Thread(target=connect, name="luce-fetch", daemon=True)
    thread.start()
    thread.join(max(end - monotonic(), 0))
    if thread.is_alive():
        raise TimeoutError
    if failed:
        raise failed[0]


def _hang_up(connection: socket.socket) -> None:
    from socket import SHUT_RDWR

    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)


def _bounded(data: bytes, address: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise ImageError(f"{_short(address)} has more than {MAX_BYTES} bytes")
    return data


def _short(address: str) -> str:
    return ascii(address[:200])[1:-1]
