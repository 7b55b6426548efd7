"""Asks the server as those who may and those who may not: keys, names of hosts, origins of pages."""

import json

import pytest
from serving import serving

from luce.data import BOX
from luce.server.access import LOOPBACK, Access

KEYS = ("secret", "other")
NAMED = (
    "https://chat.example.com",
    "http://box.lan:3000",
    "chrome-extension://*",
    "https://*.inside.example",
)


@pytest.fixture(scope="module")
def server(native):
    with serving({"box": BOX}, origins=NAMED) as running:
        yield running


@pytest.fixture(scope="module")
def locked(native):
    with serving({"box": BOX}, keys=KEYS, origins=NAMED) as running:
        yield running


# ---- keys


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": "bearer secret"}, 200),
        ({"Authorization": "BEARER   other"}, 200),
        ({"Authorization": "secret"}, 200),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer secre"}, 401),
        ({"Authorization": "Bearer Secret"}, 401),
        ({"Authorization": "Bearer secret other"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"x-api-key": "other"}, 200),
        ({"X-API-Key": "othe"}, 401),
        ({"Authorization": "Bearer wrong", "x-api-key": "other"}, 401),
    ],
)
def test_one_of_the_keys_is_asked_for(locked, headers, status):
    """The scheme of Authorization is the same in any case (RFC 9110, 11.1), a key is not."""
    for path in ("/v1/models", "/api/tags", "/metrics", "/nothing"):
        found = locked.http.get(path, headers=headers).status_code
        assert found == (404 if path == "/nothing" and status == 200 else status), path


def test_whether_it_lives_and_its_page_need_no_key(locked):
    for path, accept in (("/health", "*/*"), ("/v1/health", "*/*"), ("/", "text/html"), ("/", "*/*")):
        assert locked.http.get(path, headers={"Accept": accept}).status_code == 200
    assert locked.http.post("/", headers={"Accept": "text/html"}).status_code == 401


# ---- names of this machine


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("luce.localhost:8080", 200),
        ("chat.example.com", 200),
        ("box.lan:8080", 200),
        ("evil.example", 403),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("www.inside.example", 403),
        ("0.0.0.0:8080", 403),
        ("[::1", 403),
        ("localhost:80.evil.example", 403),
        ("[", 403),
    ],
)
def test_a_page_that_rebinds_its_name_is_told_nothing(server, host, status):
    """The browser believes that this machine is the page's own site, and sends that site's name. The names of
    origins that were given whole are ours: a proxy may stand before the server."""
    assert server.http.get("/api/tags", headers={"Host": host}).status_code == status


# ---- origins of pages

OURS = (
    "http://localhost", "http://localhost:3000", "https://localhost:8443", "http://app.localhost:3000",
    "http://127.0.0.1:5173", "http://[::1]:3000", "http://0.0.0.0:3000", "HTTP://LOCALHOST:3000",
)  # fmt: skip
APPS = (
    "app://obsidian.md", "app://.", "file://", "tauri://localhost", "https://tauri.localhost", "vscode-webview://x",
    "vscode-file://vscode-app", "capacitor://localhost", "ionic://localhost",
)  # fmt: skip
ALLOWED = (
    "https://chat.example.com", "http://box.lan:3000", "chrome-extension://abcdef", "https://a.inside.example",
    "https://a.b.inside.example",
)  # fmt: skip
OTHERS = (
    "https://evil.example", "null", "http://chat.example.com:81", "https://chat.example.com.evil.example",
    "https://evil.example#.inside.example", "https://evil.example/.inside.example", "http://localhost.evil.example",
    "http://127.0.0.1.evil.example", "http://localhost:3000.evil.example", "moz-extension://abcdef", "http://",
    "http://[", "://", "app:", "https://xchat.example.com", "https://chatxexample.com", "evil://localhost",
)  # fmt: skip


@pytest.mark.parametrize("origin", [*OURS, *APPS, *ALLOWED])
def test_pages_of_these_origins_ask_and_read(server, origin):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST",
               "Access-Control-Request-Headers": "content-type, authorization, x-stainless-lang"}  # fmt: skip
    before = server.http.options("/v1/chat/completions", headers=headers)
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == origin
    assert "POST" in before.headers["access-control-allow-methods"]
    assert before.headers["access-control-allow-headers"] == headers["Access-Control-Request-Headers"]
    for path, status in (("/api/tags", 200), ("/nothing", 404)):
        said = server.http.get(path, headers={"Origin": origin})
        assert said.status_code == status and said.headers["access-control-allow-origin"] == origin
        assert "access-control-allow-credentials" not in said.headers and "Origin" in said.headers["vary"]


@pytest.mark.parametrize("origin", OTHERS)
def test_pages_of_other_origins_neither_ask_nor_read(server, origin):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    before = server.http.options("/v1/chat/completions", headers=headers)
    asked = server.post("/v1/completions", prompt="a", max_tokens=1)
    assert asked.status_code == 200
    refused = server.http.post("/v1/completions", json={"prompt": "a"}, headers={"Origin": origin})
    assert (before.status_code, refused.status_code) == (400, 403)
    assert refused.json()["error"]["type"] == "permission_error"
    for response in (before, refused):
        assert "access-control-allow-origin" not in response.headers


def test_a_page_reads_why_it_was_refused(locked):
    """A key is sent with the request itself, so what a browser asks before needs none."""
    origin = {"Origin": "http://localhost:3000"}
    before = locked.http.options("/v1/models", headers=origin | {"Access-Control-Request-Method": "GET"})
    refused = locked.http.get("/v1/models", headers=origin)
    assert (before.status_code, refused.status_code) == (200, 401)
    for response in (before, refused):
        assert response.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert refused.headers["access-control-expose-headers"] == "*"


def test_a_named_page_of_the_web_may_ask_a_machine_of_its_network(server):
    headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    for origin, allowed in (("https://chat.example.com", 200), ("https://evil.example", 400)):
        before = server.http.options("/v1/models", headers=headers | {"Origin": origin})
        assert before.status_code == allowed


def test_all_pages_are_let_in_only_where_that_is_said(native):
    for origins, allowed in (((), False), (("null",), False), (("*",), True)):
        found = Access(hosts=LOOPBACK, origins=origins).origin
        assert bool(found.fullmatch("https://any.example")) == allowed
    assert Access(origins=("null",)).origin.fullmatch("null")


def test_a_server_of_the_network_answers_to_any_name_and_shares_with_the_same_pages(native):
    """Its own names are unknown there: a key keeps others out."""
    access = Access(keys=("k",), hosts=())
    assert access.is_for_us("gpu.lan:8080") and not access.origin.fullmatch("http://gpu.lan:3000")
    assert access.origin.fullmatch("http://localhost:3000")


def test_an_origin_that_no_browser_sends_is_a_usage_error(luce_):
    for value, near in (("https://a.example/", "https://a.example"), ("a.example", "https://a.example")):
        result = luce_("serve", "--origin", value)
        assert result.exit_code == 2 and f"is no origin, as {near} is" in result.stderr


# ---- how refusals look


def test_refusals_have_the_form_of_the_api(locked):
    for path, look in (
        ("/v1/messages", lambda said: said["type"] == "error" and said["error"]["type"]),
        ("/api/chat", lambda said: isinstance(said["error"], str)),
        ("/v1/chat/completions", lambda said: said["error"]["code"] == "invalid_api_key"),
    ):
        refused = locked.http.post(path, content=json.dumps({}))
        assert refused.status_code == 401 and look(refused.json())
