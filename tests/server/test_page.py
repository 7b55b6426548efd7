"""Asks for the page as browsers and as Ollama's clients do. tests/server/browser uses it in a browser."""

import base64
import hashlib
import re

import pytest
from serving import serving

from luce.data import BOX

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.fixture(scope="module")
def server(native):
    with serving({"box": BOX}) as running:
        yield running


def test_browsers_get_the_page_and_ollamas_clients_their_words(server):
    for accept in (BROWSER, "TEXT/HTML"):
        page = server.http.get("/", headers={"Accept": accept})
        assert page.headers["content-type"].startswith("text/html") and "Accept" in page.headers["vary"]
    assert server.http.head("/", headers={"Accept": BROWSER}).status_code == 200
    for accept in ("*/*", "application/json", ""):
        said = server.http.get("/", headers={"Accept": accept})
        assert said.text == "Ollama is running" and said.headers["content-type"].startswith("text/plain")


def test_the_page_runs_its_own_script_and_talks_to_its_server_alone(server):
    page = server.http.get("/", headers={"Accept": BROWSER})
    rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.S)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert set(re.findall(r"https?://[^'\"]*", page.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(| on[a-z]+=", page.text)
