"""Images in the Python API: the tokens of `luce generate`, however an image is given, and what is none is refused."""

from __future__ import annotations

import asyncio
import base64
import threading
import time

import pytest
import tiny_vision

import luce
from luce.errors import Cancelled
from luce.native import Tower

Image = pytest.importorskip("PIL.Image")
HOW = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("seen")
    tiny_vision.write_both(made)
    for i, picture in enumerate(tiny_vision.pictures()):
        Image.fromarray(picture).save(made / f"{i}.png")
    return made


@pytest.fixture(scope="module")
def model(folder, device):
    mmproj = folder / "mmproj.gguf"
    with luce.load(folder / "model.gguf", mmproj=mmproj, device=device, threads=1, ctx=1024, parallel=2) as opened:
        yield opened


@pytest.fixture
def said(luce_, folder, device):
    """Gives said(*words), which is what the command line says of both images."""

    def run(*words, images=("0.png", "1.png")):
        shown = [word for name in images for word in ("--image", folder / name)]
        files = ("-m", folder / "model.gguf", "--mmproj", folder / "mmproj.gguf", "--device", device)
        result = luce_("generate", *files, *shown, "-n", "8", *words)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    return run


def test_images_before_a_text(model, folder, said):
    given = [folder / "0.png", (folder / "1.png").read_bytes()]
    wanted = said("AB")
    assert model.generate("AB", images=given, **HOW).text == wanted
    assert "".join(piece.text for piece in model.stream("AB", images=given, **HOW)) == wanted
    assert [answer.text for answer in model.generate(["AB", "AB"], images=given, **HOW)] == [wanted, wanted]
    assert model.generate("AB", images=given[::-1], **HOW).text != wanted


def test_token_ids_have_their_own_places(model, folder):
    marks = model.encode("<|vision_start|><|image_pad|><|vision_end|>", special=True)
    ids = [*model.encode("A"), *marks, *model.encode("B")]
    answer = model.generate(ids, images=[folder / "0.png"], **HOW)
    before = model.generate("AB", images=[folder / "0.png"], **HOW)
    assert answer.prompt_tokens == before.prompt_tokens == len(ids) + 77 and answer.text != before.text


def parts(folder, kind):
    data = [(folder / f"{i}.png").read_bytes() for i in range(2)]
    if kind == "files":
        return [{"type": "image", "image": str(folder / f"{i}.png")} for i in range(2)]
    if kind == "bytes":
        return [{"type": "image", "image": each} for each in data]
    urls = (f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in data)
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


@pytest.mark.parametrize("kind", ["files", "bytes", "urls"])
def test_parts_of_a_chat(model, folder, said, kind):
    content = [*parts(folder, kind), {"type": "text", "text": "AB"}]
    answer = model.chat([{"role": "user", "content": content}], **HOW)
    assert answer.text == said("--chat", "AB")


def test_images_of_a_chat_stand_before_the_newest_text(model, folder, said):
    wanted, given = said("--chat", "AB"), [folder / "0.png", folder / "1.png"]
    assert model.chat([{"role": "user", "content": "AB"}], images=given, **HOW).text == wanted
    before = [{"role": "user", "content": "AB"}, {"role": "assistant", "content": "C"}]
    messages = [*before, {"role": "user", "content": "D"}]
    spelled = [*before, {"role": "user", "content": [*parts(folder, "files"), {"type": "text", "text": "D"}]}]
    assert model.chat(messages, images=given, **HOW).text == model.chat(spelled, **HOW).text
    assert messages[2]["content"] == "D", "what was given is as it was"


def test_a_conversation_with_images_goes_on_and_encodes_none_twice(model, folder, monkeypatch):
    encoded, encode = [], Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda self, *given: encoded.append(1) or encode(self, *given))
    Image.fromarray(tiny_vision.image(64, 300, 77)).save(folder / "new.png")
    content = [{"type": "image", "image": folder / "new.png"}, {"type": "text", "text": "A"}]
    messages = [{"role": "user", "content": content}]
    answer = model.chat(messages, **HOW)
    messages += [answer.message, {"role": "user", "content": "B"}]
    again = model.chat(messages, **HOW)
    assert len(encoded) == 1 and again.prompt_tokens > answer.prompt_tokens
    tool = {"role": "tool", "content": [{"type": "image", "image": folder / "0.png"}]}
    assert model.chat([*messages, again.message, tool], **HOW).prompt_tokens > again.prompt_tokens + 78


def test_a_beginning_with_images_is_kept(model, folder):
    content = [*parts(folder, "files"), {"type": "text", "text": "AB" * 60}]
    more = [{"role": "user", "content": "CD"}]
    whole = model.chat([{"role": "user", "content": content}, *more], **HOW)
    with model.prefix([{"role": "user", "content": content}]) as prefix:
        answer = prefix.chat(more, **HOW)
        assert prefix.kept_tokens > 128 and answer.cached_tokens >= prefix.kept_tokens
        assert answer.text == whole.text


def test_asyncio(folder, device, said):
    async def ask():
        how = {"mmproj": folder / "mmproj.gguf", "device": device, "threads": 1}
        async with luce.AsyncModel(folder / "model.gguf", **how) as model:
            return (await model.generate("AB", images=[folder / "0.png", folder / "1.png"], **HOW)).text

    assert asyncio.run(ask()) == said("AB")


def test_images_are_reduced(folder, device):
    how = {"mmproj": folder / "mmproj.gguf", "device": device, "threads": 1, "ctx": 1024}
    with luce.load(folder / "model.gguf", image_tokens=64, **how) as model:
        answer = model.generate("A", images=[folder / "0.png"], **HOW)
        assert answer.prompt_tokens <= 64 + 3


def test_a_model_that_is_closed_ends_an_encode(folder, device, monkeypatch):
    began = threading.Event()

    def endless(self, patches, grid, threads, progress):
        began.set()
        while not progress(0.5):
            time.sleep(0.005)
        raise Cancelled("cancelled")

    monkeypatch.setattr(Tower, "encode", endless)
    model = luce.load(folder / "model.gguf", mmproj=folder / "mmproj.gguf", device=device, threads=1)
    ended = []

    def ask():
        with pytest.raises(luce.Cancelled):
            model.generate("A", images=[folder / "0.png"])
        ended.append(True)

    asking = threading.Thread(target=ask)
    asking.start()
    assert began.wait(60)
    model.close()
    asking.join()
    assert ended


REFUSED = {
    "no file": ({"images": ["/no/such.png"]}, luce.FileError, "/no/such.png: No such file"),
    "no image": ({"images": [b"hello"]}, luce.ArgumentError, "no PNG, JPEG, WebP or GIF"),
    "a single one": ({"images": b"hello"}, luce.ArgumentError, "images is b'hello': it is a list"),
    "a number": ({"images": [3]}, luce.ArgumentError, "an image is 3: it is the path of a file, or its bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_image_is_refused(model, what):
    how, error, told = REFUSED[what]
    with pytest.raises(error, match=told):
        model.generate("A", **how)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"content": [{"type": "video"}]}, "its type is one of text with a text, image with an image"),
        ({"content": [{"type": "text"}]}, "its type is one of"),
        ({"content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}, "luce fetches none"),
        ({"content": [{"type": "image_url", "image_url": "data:image/png;base64,@"}]}, "it is a data URL in base64"),
        ({"content": [{"type": "image", "image": None}]}, "an image is None"),
        ({"role": "system", "content": [{"type": "image", "image": b""}]}, "a message of the system has an image"),
        ({"content": 3}, "it is a text, or a list of parts"),
    ],
)
def test_parts_that_are_none_are_refused(model, message, told):
    with pytest.raises(luce.ArgumentError, match=told):
        model.chat([{"role": "user", **message}])


def test_parts_of_text_alone_are_text(model):
    texts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    found = model.chat([{"role": "user", "content": texts}], **HOW)
    assert found.text == model.chat([{"role": "user", "content": "AB"}], **HOW).text


def test_images_need_a_tower(folder, device):
    with luce.load(folder / "model.gguf", device=device, threads=1) as model:
        with pytest.raises(luce.ArgumentError, match="loaded without mmproj"):
            model.generate("A", images=[folder / "0.png"])
        with pytest.raises(luce.ArgumentError, match="loaded without mmproj"):
            model.chat([{"role": "user", "content": [{"type": "image", "image": folder / "0.png"}]}])
    for how, told in (({"image_tokens": 100}, "give both"), ({"mmproj": 3}, "mmproj is 3"),
                      ({"mmproj": folder / "mmproj.gguf", "image_tokens": 9}, "image_tokens is 9")):  # fmt: skip
        with pytest.raises(luce.ArgumentError, match=told):
            luce.load(folder / "model.gguf", **how)


def test_a_tower_of_another_name_gets_a_warning(folder, tmp_path, device, monkeypatch):
    weights = tiny_vision.layout(tiny_vision.TINY, tiny_vision.weights(tiny_vision.TINY, 5))
    monkeypatch.setattr(tiny_vision, "NAME", "Another-9B")
    path = tiny_vision.write(tmp_path / "other.gguf", tiny_vision.TINY, weights)
    with pytest.warns(UserWarning, match="is named Another-9B"):
        luce.load(folder / "model.gguf", mmproj=path, device=device, threads=1).close()
