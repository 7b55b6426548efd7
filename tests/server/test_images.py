"""Images through the server: in every API's form the tokens of `luce generate --chat --image`, counted without
encoding, and what cannot be is refused. A model without a tower keeps what it did."""

from __future__ import annotations

import base64
import threading
import time
from dataclasses import replace
from io import BytesIO

import pytest
import tiny_vision
from serving import HANG_S, serving, settings

from luce.errors import Cancelled
from luce.images import pixels
from luce.native import Tower

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("served")
    tiny_vision.write_both(made)
    return made


@pytest.fixture(scope="module")
def server(folder, device):
    how = replace(settings(ctx=1024, device=device), mmproj=folder / "mmproj.gguf")
    with serving({"m": folder / "model.gguf"}, how) as running:
        yield running


@pytest.fixture(scope="module")
def blind(folder, device):
    with serving({"m": folder / "model.gguf"}, settings(ctx=1024, device=device)) as running:
        yield running


def encoded(seed, size=(100, 40)):
    out = BytesIO()
    Image.fromarray(tiny_vision.image(*size, seed)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


ONE, TWO = encoded(20), encoded(21, (50, 110))
TEXT = {"type": "text", "text": "AB"}
GREEDY = {"temperature": 0, "max_tokens": 8}


def url(data):
    return f"data:image/jpeg;base64,{data}"  # It says another type than the bytes are of.


def openai(*images, text=TEXT):
    parts = [{"type": "image_url", "image_url": {"url": url(image), "detail": "high"}} for image in images]
    return [{"role": "user", "content": [*parts, text]}]


def chat(server, messages, **more):
    response = server.post("/v1/chat/completions", model="m", messages=messages, **GREEDY | more)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def known():
    return []


@pytest.fixture
def expected(luce_, folder, device, known):
    """What the command line says of one image, and of two; the first test that asks for it runs it."""

    def said(*images):
        shown = []
        for image in images:
            path = folder / f"{len(image)}.png"
            path.write_bytes(base64.b64decode(image))
            shown += ["--image", path]
        files = ("-m", folder / "model.gguf", "--mmproj", folder / "mmproj.gguf", "--device", device)
        result = luce_("generate", *files, *shown, "--chat", "-n", "8", "AB")
        assert result.exit_code == 0, result.stderr
        return result.stdout

    if not known:
        known += [said(ONE), said(ONE, TWO)]
    return known


def test_openai_chat(server, expected):
    answer = chat(server, openai(ONE))
    assert text_of(answer) == expected[0]
    assert text_of(chat(server, openai(ONE, TWO))) == expected[1]
    tokens = server.post("/tokenize", content="AB").json()["tokens"]
    assert answer["usage"]["prompt_tokens"] > 78 + len(tokens)


def test_responses(server, expected):
    parts = [{"type": "input_image", "image_url": url(ONE)}, {"type": "input_text", "text": "AB"}]
    given = {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 8}
    answer = server.post("/v1/responses", model="m", **given).json()
    assert answer["output"][-1]["content"][0]["text"] == expected[0]


def anthropic(*images):
    sources = ({"type": "base64", "media_type": "image/png", "data": image} for image in images)
    return [{"role": "user", "content": [*({"type": "image", "source": source} for source in sources), TEXT]}]


def test_anthropic(server, expected):
    for images, said in (((ONE,), expected[0]), ((ONE, TWO), expected[1])):
        answer = server.post("/v1/messages", model="m", messages=anthropic(*images), **GREEDY).json()
        assert answer["content"][0]["text"] == said


def test_ollama(server, expected):
    messages = [{"role": "user", "content": "AB", "images": [ONE, TWO]}]
    options = {"temperature": 0, "num_predict": 8}
    answer = server.post("/api/chat", model="m", messages=messages, options=options, stream=False).json()
    assert answer["message"]["content"] == expected[1]


def tokens_of(answer):
    """Returns how many tokens an answer of Anthropic's says that the prompt has."""
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(answer["usage"].get(kind) or 0 for kind in kinds)


def test_images_in_answers_of_tools_are_seen(server):
    """Claude Code's Read and codex's view_image answer with them."""
    call = {"id": "c", "name": "Read", "type": "tool_use", "input": {"path": "a.png"}}
    answers = []
    for image in (ONE, TWO):
        source = {"type": "base64", "media_type": "image/png", "data": image}
        result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}
        said = [("user", [TEXT]), ("assistant", [call]), ("user", [result])]
        messages = [{"role": role, "content": content} for role, content in said]
        count = server.post("/v1/messages/count_tokens", model="m", messages=messages).json()["input_tokens"]
        answer = server.post("/v1/messages", model="m", messages=messages, **GREEDY).json()
        assert tokens_of(answer) == count
        answers.append(answer["content"][0]["text"])
    assert answers[0] != answers[1]
    items = [{"type": "function_call", "name": "view_image", "arguments": "{}", "call_id": "c"}]
    output = [{"type": "input_image", "image_url": url(ONE)}]
    items += [{"type": "function_call_output", "call_id": "c", "output": output}]
    given = {"input": [{"role": "user", "content": "AB"}, *items], "max_output_tokens": 16, "temperature": 0}
    answer = server.post("/v1/responses", model="m", **given)
    assert answer.status_code == 200 and answer.json()["usage"]["input_tokens"] > 78


def test_tokens_are_counted_without_encoding(server, monkeypatch):
    fresh = encoded(33)
    monkeypatch.setattr(Tower, "encode", lambda *_: pytest.fail("it was encoded"))
    counted = server.post("/v1/messages/count_tokens", model="m", messages=anthropic(fresh)).json()["input_tokens"]
    monkeypatch.undo()
    answer = server.post("/v1/messages", model="m", messages=anthropic(fresh), **GREEDY).json()
    assert tokens_of(answer) == counted


def test_a_conversation_that_goes_on_is_read_from_its_image_on(server, monkeypatch):
    grids, encode = [], Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda self, *given: grids.append(given[1]) or encode(self, *given))
    first = openai(encoded(44), text={"type": "text", "text": "A" * 90})
    answer = chat(server, first)
    more = [*first, {"role": "assistant", "content": text_of(answer)}, {"role": "user", "content": "C"}]
    again = chat(server, more)
    assert len(grids) == 1 and again["usage"]["prompt_tokens_details"]["cached_tokens"] > 78
    assert text_of(chat(server, openai(encoded(45), text={"type": "text", "text": "A" * 90}))) != text_of(answer)


def test_a_session_that_holds_ten_screenshots_encodes_none_twice(server, monkeypatch):
    """An agent sends all of them with each turn, as results of a tool."""
    grids, encode = [], Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda self, *given: grids.append(given[1]) or encode(self, *given))
    messages = [{"role": "user", "content": [TEXT]}]
    for turn in range(10):
        call = {"id": f"c{turn}", "name": "Read", "type": "tool_use", "input": {"path": f"{turn}.png"}}
        source = {"type": "base64", "media_type": "image/png", "data": encoded(100 + turn, (64, 64))}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "image", "source": source}]}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        answer = server.post("/v1/messages", model="m", messages=messages, temperature=0, max_tokens=1).json()
        assert len(grids) == turn + 1 and tokens_of(answer) > 64 * (turn + 1)
    assert answer["usage"]["cache_read_input_tokens"] > 9 * 64


def test_several_answers_and_streams(server, expected):
    assert text_of(chat(server, openai(ONE), n=2)) == expected[0]
    with server.http.stream(
        "POST", "/v1/chat/completions", json={"model": "m", "messages": openai(ONE), "stream": True, **GREEDY}
    ) as response:
        assert response.status_code == 200 and b"[DONE]" in response.read()


REFUSED = {
    "an address": ({"url": "https://example.com/a.png"}, "no address is fetched"),
    "a file": ({"url": "file:///etc/passwd"}, "no address is fetched"),
    "no base64": ({"url": "data:image/png;base64,@@@"}, "is no base64"),
    "no image": ({"url": url(base64.b64encode(b"hello").decode())}, "no PNG, JPEG, WebP or GIF"),
    "half an image": ({"url": url(base64.b64encode(base64.b64decode(ONE)[:150]).decode())}, "damaged"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_image_is_refused(server, what):
    image, said = REFUSED[what]
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": image}, TEXT]}]
    response = server.post("/v1/chat/completions", model="m", messages=messages, **GREEDY)
    assert response.status_code == 400 and said in response.json()["error"]["message"]
    source = {"type": "image", "source": {"type": "url", **image}}
    response = server.post("/v1/messages", model="m", messages=[{"role": "user", "content": [source, TEXT]}], **GREEDY)
    assert response.status_code == 400 and said in response.json()["error"]["message"]


def test_addresses_below_an_allowed_prefix_are_fetched(folder, device, expected, tmp_path):
    (tmp_path / "one.png").write_bytes(base64.b64decode(ONE))
    (tmp_path / "bad.png").write_bytes(b"no image")
    how = replace(settings(ctx=1024, device=device), mmproj=folder / "mmproj.gguf", image_urls=(str(tmp_path),))
    with serving({"m": folder / "model.gguf"}, how) as fetching:
        address = (tmp_path / "one.png").as_uri()
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}, TEXT]}]
        assert text_of(chat(fetching, messages)) == expected[0]
        parts = [{"type": "image", "source": {"type": "url", "url": address}}, TEXT]
        given = [{"role": "user", "content": parts}]
        answer = fetching.post("/v1/messages", model="m", messages=given, **GREEDY).json()
        assert answer["content"][0]["text"] == expected[0]
        asked = given, anthropic(ONE)
        counts = [fetching.post("/v1/messages/count_tokens", model="m", messages=each).json() for each in asked]
        assert counts[0]["input_tokens"] == counts[1]["input_tokens"] > 78
        assert text_of(chat(fetching, openai(ONE))) == expected[0], "data URLs are always taken"
        for name, said in (("bad.png", "no PNG"), ("none.png", "No such file"), ("../a.png", "below no folder")):
            parts[0]["source"]["url"] = f"{tmp_path}/{name}"
            response = fetching.post("/v1/messages", model="m", messages=given, **GREEDY)
            assert response.status_code == 400 and said in response.json()["error"]["message"]
            assert "image 1 of 1" in response.json()["error"]["message"]


BY_ID = {
    "chat": {"type": "image_file", "image_file": {"file_id": "f"}},
    "responses": {"type": "input_image", "file_id": "f"},
    "messages": {"type": "image", "source": {"type": "file", "file_id": "f"}},
}
OF_SYSTEM = {"role": "system", "content": openai(ONE)[0]["content"]}
UNREAD = {
    "chat, a file": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [BY_ID["chat"]]}]}),
    "chat, the system": ("/v1/chat/completions", {"messages": [OF_SYSTEM, *openai()]}),
    "responses, a file": ("/v1/responses", {"input": [{"role": "user", "content": [BY_ID["responses"]]}]}),
    "responses, a tool's file": (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [BY_ID["responses"]]}]},
    ),
    "messages, a file": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [BY_ID["messages"]]}], "max_tokens": 4},
    ),
    "ollama, the system": (
        "/api/chat",
        {"messages": [{"role": "system", "content": "A", "images": [ONE]}, {"role": "user", "content": "B"}]},
    ),
}


@pytest.mark.parametrize("what", UNREAD)
def test_images_that_are_not_read_are_refused_and_not_noted(server, what):
    path, body = UNREAD[what]
    response = server.post(path, model="m", **body)
    error = response.json()["error"]
    said = error if isinstance(error, str) else error["message"]
    wanted = "a message of the system has an image" if "system" in what else "an image is neither base64 nor a URL"
    assert response.status_code == 400 and wanted in said


def test_an_image_of_the_assistant_is_noted(server):
    made = [*openai(), {"role": "assistant", "content": openai(ONE)[0]["content"]}, *openai()]
    assert chat(server, made)["usage"]["prompt_tokens"] < 200


def test_a_tower_of_another_name_is_told(folder, tmp_path, device, monkeypatch, caplog):
    weights = tiny_vision.layout(tiny_vision.TINY, tiny_vision.weights(tiny_vision.TINY, 5))
    monkeypatch.setattr(tiny_vision, "NAME", "Another-9B")
    path = tiny_vision.write(tmp_path / "other.gguf", tiny_vision.TINY, weights)
    how = replace(settings(ctx=1024, device=device), mmproj=path)
    with serving({"m": folder / "model.gguf"}, how) as other:
        chat(other, openai(ONE))
    assert any("is named Another-9B, and the model tiny-model" in line for line in caplog.messages)


def test_an_image_that_has_no_room_is_refused_for_good(server, monkeypatch):
    sight = server.models.slots["m"].served._sight
    monkeypatch.setattr(sight, "processor", replace(sight.processor, most_rows=70))
    response = server.post("/v1/chat/completions", model="m", messages=openai(encoded(500, (320, 256))), **GREEDY)
    said = response.json()["error"]["message"]
    assert response.status_code == 400 and "takes 80 tokens" in said and "reduce it" in said


@pytest.mark.long
def test_an_image_longer_than_the_context_is_refused_before_it_is_encoded(server, monkeypatch):
    monkeypatch.setattr(Tower, "encode", lambda *_: pytest.fail("it was encoded"))
    response = server.post("/v1/chat/completions", model="m", messages=openai(encoded(1, (1600, 1400))), **GREEDY)
    assert response.status_code == 400 and "maximum context length" in response.json()["error"]["message"]


def test_images_that_are_too_many_are_refused_before_one_is_opened(server, monkeypatch):
    monkeypatch.setattr(pixels, "open_image", lambda _: pytest.fail("it was opened"))
    many = openai(*[encoded(200 + n, (300, 300)) for n in range(16)])
    response = server.post("/v1/chat/completions", model="m", messages=many, **GREEDY)
    assert response.status_code == 400 and "maximum context length" in response.json()["error"]["message"]
    assert server.post("/v1/messages/count_tokens", model="m", messages=many_of(many)).json()["input_tokens"] > 1024


def many_of(messages):
    """Returns OpenAI's images in Anthropic's form."""
    urls = (part["image_url"]["url"] for part in messages[0]["content"] if part["type"] == "image_url")
    return anthropic(*(url.partition(",")[2] for url in urls))


def test_an_image_is_opened_once_for_several_answers_and_turns(server, monkeypatch):
    opened, real = [], pixels.open_image
    monkeypatch.setattr(pixels, "open_image", lambda data: opened.append(len(data)) or real(data))
    fresh = openai(encoded(300))
    answer = chat(server, fresh, n=3)
    chat(server, [*fresh, {"role": "assistant", "content": text_of(answer)}, {"role": "user", "content": "C"}])
    assert len(opened) == 1


def test_an_error_says_which_image_it_is_of(server):
    response = server.post("/v1/chat/completions", model="m", messages=openai(ONE, ONE[:200]), **GREEDY)
    assert response.status_code == 400 and "image 2 of 2: the image is damaged" in response.json()["error"]["message"]


def test_base64_may_have_line_ends(server, expected):
    lines = "\r\n".join(ONE[at : at + 76] for at in range(0, len(ONE), 76))
    assert text_of(chat(server, openai(lines))) == expected[0]


def test_an_encode_ends_with_its_client_and_keeps_no_others_waiting(server, monkeypatch):
    began, ended = threading.Event(), threading.Event()
    chat(server, openai(ONE))  # Its rows are kept.

    def endless(self, patches, grid, threads, progress):
        began.set()
        while not progress(0.5):
            time.sleep(0.005)
        ended.set()
        raise Cancelled("cancelled")

    monkeypatch.setattr(Tower, "encode", endless)
    body = {"model": "m", "messages": openai(encoded(400)), "stream": True, **GREEDY}
    with server.asked("/v1/chat/completions", **body):
        assert began.wait(HANG_S)
    assert ended.wait(HANG_S)
    chat(server, openai(ONE))


def test_what_the_server_says_of_itself(server, blind):
    for running, sees in ((server, True), (blind, False)):
        assert running.http.get("/props").json()["modalities"]["vision"] is sees
        assert ("vision" in running.post("/api/show", model="m").json()["capabilities"]) is sees
        (listed,) = running.http.get("/v1/models").json()["data"]
        assert ("image" in listed["architecture"]["input_modalities"]) is sees
        assert running.http.get("/v1/models/m").json()["architecture"] == listed["architecture"]


def test_a_model_without_a_tower_refuses_and_notes_as_before(blind):
    response = blind.post("/v1/chat/completions", model="m", messages=openai(ONE), **GREEDY)
    assert response.status_code == 400 and "this model reads text alone" in response.json()["error"]["message"]
    older = [*openai(ONE), {"role": "assistant", "content": "C"}, {"role": "user", "content": "D"}]
    assert chat(blind, older)["usage"]["prompt_tokens"] < 200
