"""The page at /: a chat in one file, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).with_name("page.html")


def is_wanted(request: Request) -> bool:
    """Says whether a browser asks, which shows pages: clients of APIs do not name text/html."""
    return "text/html" in request.headers.get("accept", "").lower()


@cache
def _content() -> tuple[bytes, dict[str, str]]:
    """Returns the page and its headers. Its own script and style run, named by their hashes, and no others;
    it may talk to this server alone, and nobody may put it into a frame."""
    text = PAGE.read_text(encoding="utf-8")
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:"]
    rules += [f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")]
    for tag in ("script", "style"):
        inner = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
        hashes = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inner)
        rules.append(" ".join([f"{tag}-src", *(f"'sha256-{each}'" for each in hashes)]))
    headers = {
        "Content-Security-Policy": "; ".join(rules),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Vary": "Accept",
    }
    return text.encode(), headers


def response() -> Response:
    """Returns the page."""
    content, headers = _content()
    return Response(content, headers=headers, media_type="text/html")
