"""Images for Gemma 4 through the server: in every API's form the tokens of `luce generate --chat --image`, counted
without encoding, and a conversation that goes on encodes none again."""

from __future__ import annotations

import base64
from dataclasses import replace
from io import BytesIO

import pytest
import tiny_gemma4_vision as vision
import tiny_vision
from depth import deeper
from serving import serving, settings

from luce.native import Tower

Image = pytest.importorskip("PIL.Image")
ROWS = 13 * 5  # 100 x 40 pixels become 624 x 240, within 70 rows.
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module", params=[*deeper("per-layer"), "dense"])
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp("served")
    vision.write_both(made, request.param)
    vision.write_assistant_of(made / "assistant.gguf", request.param)
    return made


@pytest.fixture(scope="module")
def server(folder, device):
    how = replace(settings(ctx=1024, device=device), mmproj=folder / "mmproj.gguf", image_tokens=70)
    with serving({"m": folder / "model.gguf"}, how) as running:
        yield running


def encoded(seed, size=(100, 40)):
    out = BytesIO()
    Image.fromarray(tiny_vision.image(*size, seed)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


ONE, TWO = encoded(22), encoded(21, (50, 110))
TEXT = {"type": "text", "text": "AB"}


def openai(*images, text=TEXT):
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
    return [{"role": "user", "content": [*parts, text]}]


def chat(server, messages):
    response = server.post("/v1/chat/completions", model="m", messages=messages, **GREEDY)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def known(folder):
    return []


@pytest.fixture
def expected(luce_, folder, device, known):
    """What the command line says of one image, and of two; the first test that asks for it runs it."""

    def said(*images):
        shown = []
        for i, image in enumerate(images):
            (folder / f"{i}.png").write_bytes(base64.b64decode(image))
            shown += ["--image", folder / f"{i}.png"]
        files = ("-m", folder / "model.gguf", "--mmproj", folder / "mmproj.gguf", "--device", device)
        how = ("--image-tokens", "70", "--chat", "-n", "8", "--temp", "0")
        result = luce_("generate", *files, *shown, *how, "AB")
        assert result.exit_code == 0, result.stderr
        return result.stdout

    if not known:
        known += [said(ONE), said(ONE, TWO)]
    return known


def test_openai_chat(server, expected):
    answer = chat(server, openai(ONE))
    assert answer["choices"][0]["message"]["content"] == expected[0]
    assert chat(server, openai(ONE, TWO))["choices"][0]["message"]["content"] == expected[1]
    assert "" != expected[0] != expected[1] != ""
    text = chat(server, [{"role": "user", "content": "AB"}])["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens"] == text + ROWS + 2, "marks stand beside the rows"


def test_anthropic_counts_without_encoding(server, expected, monkeypatch):
    source = {"type": "base64", "media_type": "image/png", "data": encoded(33)}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, TEXT]}]
    monkeypatch.setattr(Tower, "encode", lambda *_: pytest.fail("it was encoded"))
    counted = server.post("/v1/messages/count_tokens", model="m", messages=messages).json()["input_tokens"]
    monkeypatch.undo()
    usage = server.post("/v1/messages", model="m", messages=messages, **GREEDY).json()["usage"]
    assert sum(value for key, value in usage.items() if key.endswith("input_tokens") and value) == counted
    messages[0]["content"][0]["source"]["data"] = ONE
    answer = server.post("/v1/messages", model="m", messages=messages, **GREEDY).json()
    assert answer["content"][0]["text"] == expected[0], answer


def test_ollama_and_responses(server, expected):
    messages = [{"role": "user", "content": "AB", "images": [ONE, TWO]}]
    options = {"temperature": 0, "num_predict": 8}
    answer = server.post("/api/chat", model="m", messages=messages, options=options, stream=False).json()
    assert answer["message"]["content"] == expected[1]
    parts = [{"type": "input_image", "image_url": f"data:image/png;base64,{ONE}"}, {"type": "input_text", "text": "AB"}]
    given = {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 8}
    answer = server.post("/v1/responses", model="m", **given).json()
    assert answer["output"][-1]["content"][0]["text"] == expected[0]


def test_a_conversation_that_goes_on_is_read_from_its_image_on(server, monkeypatch):
    grids, encode = [], Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda self, *given: grids.append(given[1]) or encode(self, *given))
    first = openai(encoded(44), text={"type": "text", "text": "A" * 200})
    said = chat(server, first)["choices"][0]["message"]["content"]
    again = chat(server, [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "C"}])
    assert grids == [(15, 39)]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= ROWS


def test_a_pixel_is_an_image_and_one_beyond_the_towers_table_is_refused(server):
    assert chat(server, openai(encoded(1, (1, 1))))["usage"]["prompt_tokens"] > 64
    response = server.post("/v1/chat/completions", model="m", messages=openai(encoded(1, (4000, 2))), **GREEDY)
    assert response.status_code == 400 and "positions for 80 a side" in response.json()["error"]["message"]
