"""Who may ask: keys, the names that this machine is asked by, and the origins whose pages may read
answers."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from luce.server import LOOPBACK
from luce.server.ask import Refused

__all__ = ["LOOPBACK", "OPEN", "Access", "Guarded", "shared"]

# Pages of this machine, whatever server they come from.
LOCAL = r"https?://(([a-z0-9-]+\.)*localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(:[0-9]+)?"
# Desktop apps and editors have origins of their own, which no page of the web can have. "null" is none of
# them: every site can make a frame that has it.
APPS = r"(app|capacitor|file|ionic|tauri|vscode-file|vscode-webview)://[^/]*"
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/?#@]+))(?::[0-9]*)?")
OPEN = ("/health", "/v1/health")  # These need no key,
PAGE = "/"  # and neither does the page: it asks for one.


@dataclass(frozen=True)
class Access:
    """Says who may ask. `keys` holds the keys of which any is enough; empty, everyone may ask. `hosts` holds
    the names of this machine that a request may be for, which keeps out web pages that rebind a name; empty,
    any name will do. `origins` are pages that may ask and read beside those of this machine and of apps:
    "https://a.example", where * stands for any letters but /, and "*" alone for all pages of all sites."""

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = LOOPBACK
    origins: tuple[str, ...] = ()

    @cached_property
    def origin(self) -> re.Pattern[str]:
        """Returns what an origin has to look like whose pages may ask and read."""
        named = [".*" if each == "*" else re.escape(each).replace(r"\*", "[^/?#@]*") for each in self.origins]
        return re.compile("(?i)" + "|".join([LOCAL, APPS, *named]))

    @cached_property
    def _names(self) -> frozenset[str]:
        """Returns the names that a request may be for; those of origins that were named whole are among them,
        since this server may be behind a proxy of that name."""
        named = (_name(each.partition("://")[2]) for each in self.origins if "*" not in each)
        return frozenset([*self.hosts, *filter(None, named)])

    def is_for_us(self, host: str) -> bool:
        """Says whether a request for this host, with or without a port, may be answered."""
        name = _name(host)
        return not self.hosts or name in self._names or name.endswith(".localhost")

    def has_key(self, headers: dict[bytes, bytes]) -> bool:
        """Says whether a request has one of the keys, as a bearer (in any case) or as x-api-key."""
        if not self.keys:
            return True
        scheme, _, bearer = headers.get(b"authorization", b"").strip().partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else scheme
        given = given or headers.get(b"x-api-key", b"")
        return any([hmac.compare_digest(given, key.encode()) for key in self.keys])


def _name(host: str) -> str:
    """Returns the host without its port, "" where it is none: "[::1]:8080" gives "::1"."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


def shared(app: ASGIApp, access: Access) -> CORSMiddleware:
    """Lets pages of the allowed origins read what `app` answers, and answers what browsers ask before."""
    return CORSMiddleware(
        app,
        allow_origin_regex=access.origin.pattern,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["*"],
        allow_private_network=True,
    )


class Guarded:
    """Turns away requests without a key, for other names, and of web pages of other sites. `refuse` answers
    them, in the form of the path's API."""

    def __init__(self, app: ASGIApp, access: Access, refuse: Callable[[str, Refused], ASGIApp]):
        self._app, self._access, self._refuse = app, access, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refused(scope) if scope["type"] == "http" else None
        app = self._refuse(scope["path"], refused) if refused else self._app
        await app(scope, receive, send)

    def _refused(self, scope: Scope) -> Refused | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        if host and not self._access.is_for_us(host):
            return Refused(403, f"requests for {host!r} are not answered here", "forbidden")
        if origin and self._access.hosts and not self._access.origin.fullmatch(origin):
            return Refused(
                403, f"pages of {origin!r} are not among those that are answered here", "forbidden"
            )
        path = scope["path"]
        if path in OPEN or (path == PAGE and scope["method"] in ("GET", "HEAD")):
            return None
        return (
            None if self._access.has_key(headers) else Refused(401, "the API key is missing or wrong", "auth")
        )
