"""Images on the command line: the tokens of transformers, whatever drafts, and one clear line for what cannot be."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import numpy as np
import pytest
import tiny
import tiny_dflash
import tiny_vision
from checkout import GOLDENS
from tiny_vision import IMAGE_PAD, TEXT, TINY, VISION_END, VISION_START

from luce.cli.command import installing
from luce.errors import Cancelled
from luce.native import Tower

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, its tower and a DFlash drafter, and the golden's two images."""
    made = tmp_path_factory.mktemp("seen")
    tiny_vision.write_both(made)
    tiny_dflash.write(made / "drafter.gguf", tiny_dflash.VISION, tiny_dflash.weights(tiny_dflash.VISION))
    for i, picture in enumerate(tiny_vision.pictures()):
        Image.fromarray(picture).save(made / f"{i}.png")
    return made


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDENS / "vision-text.npz") as held:
        return dict(held)


@pytest.fixture
def chat(luce_, folder, device):
    def run(*words, stdin, mmproj=("--mmproj", "mmproj.gguf")):
        files = ("-m", folder / "model.gguf", *(folder / word if word.endswith("gguf") else word for word in mmproj))
        return luce_("chat", *files, "--device", device, *words, stdin=stdin)

    return run


@pytest.fixture
def greedy(generate, golden, device):
    """Greedy tokens: transformers', or on a GPU, whose logits are off by its rounding, its own without drafts."""
    if device == "cpu":
        return golden["greedy"].tolist()
    how = ("--special", "-n", "32", "--kv-type", "f32", "--json", "--spec", "off")
    return tokens_of(generate(*how, spelled(golden["prompt"].tolist())))


@pytest.fixture
def generate(luce_, folder):
    def run(*words, images=("0.png", "1.png"), **how):
        shown = [word for name in images for word in ("--image", folder / name)]
        files = ("-m", folder / "model.gguf", "--mmproj", folder / "mmproj.gguf")
        words = (folder / word if str(word).endswith(".gguf") else word for word in words)
        return luce_("generate", *files, *shown, *words, **how)

    return run


def spelled(tokens):
    """Returns the golden's prompt as text, in which an image is spelled by its marks."""
    marks = {VISION_START: "<|vision_start|>", VISION_END: "<|vision_end|>", IMAGE_PAD: "<|image_pad|>"}
    pairs = zip(tokens, [None, *tokens], strict=False)
    kept = [token for token, before in pairs if (token, before) != (IMAGE_PAD, IMAGE_PAD)]
    return "".join(marks.get(token) or chr(token) for token in kept)


def tokens_of(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["tokens"]


def test_without_pillow_a_model_that_sees_says_how_to_add_it(generate, chat, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    said = f"Error: images need Pillow: {installing('vision')}\n"
    for result in generate("x"), chat(stdin="/quit\n"):
        assert (result.exit_code, result.stdout, result.stderr) == (1, "", said)


DRAFTER = "--draft", "drafter.gguf"
MODES = [("--spec", "off"), ("--mtp-gamma", "3"), ("--spec", "lookup"), (), DRAFTER, (*DRAFTER, "--tree-budget", "9")]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_transformers_in_every_mode(generate, golden, greedy, mode):
    prompt = spelled(golden["prompt"].tolist())
    found = tokens_of(generate("--special", "-n", "32", "--kv-type", "f32", "--json", *mode, prompt))
    assert found == greedy


def test_sampled_tokens_are_the_same_in_every_mode(generate):
    words = ("-n", "24", "--json", "--temp", "1", "--seed", "3", "AB")
    found = [tokens_of(generate(*words, *mode)) for mode in MODES]
    assert all(tokens == found[0] for tokens in found)


def test_a_grammar_holds_behind_images_in_every_mode(generate, tmp_path):
    pytest.importorskip("llguidance")
    grammar = tmp_path / "words.gbnf"
    grammar.write_text('root ::= (word " ")* word\nword ::= [a-z] [a-z] [a-z]\n')
    results = [generate("-n", "24", "--json", "--grammar", grammar, *mode, "AB") for mode in MODES]
    found = [tokens_of(result) for result in results]
    assert all(tokens == found[0] for tokens in found)
    assert re.fullmatch("([a-z]{3} )+[a-z]{0,3}", json.loads(results[0].stdout)["text"])


def test_images_stand_before_a_raw_prompt(generate):
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    before = tokens_of(generate("-n", "8", "--json", "AB"))
    assert before == tokens_of(generate("-n", "8", "--json", "--special", f"{image}{image}AB"))
    assert before != tokens_of(generate("-n", "8", "--json", "AB", images=("1.png", "0.png")))


def test_images_stand_before_the_text_of_a_chat(generate):
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    raw = f"<|im_start|>user\n{image}AB<|im_end|>\n<|im_start|>assistant\n"
    found = tokens_of(generate("-n", "8", "--json", "--chat", "AB", images=("0.png",)))
    assert found == tokens_of(generate("-n", "8", "--json", "--special", raw, images=("0.png",)))


def test_marks_that_users_spell_in_a_chat_are_text(generate):
    result = generate("-n", "4", "--json", "--chat", "<|image_pad|>", images=("0.png",))
    assert len(tokens_of(result)) == 4


def test_chat_shows_images_and_goes_on(chat, folder, generate):
    show = f"/image {folder / '0.png'}\nAB\n"
    result = chat("--temp", "0", "-n", "6", stdin=f"{show}CD\n/clear\n{show}")
    assert result.exit_code == 0 and not result.stderr, result.stderr
    assert result.stdout.count("it takes 78 tokens, as 416 x 192 pixels\n") == 2
    alone = generate("-n", "6", "--chat", "AB", images=("0.png",)).stdout
    first, again = result.stdout.split("it takes 78 tokens, as 416 x 192 pixels\n")[1:]
    assert first.startswith(alone) and again.startswith(alone)


def test_ctrl_c_ends_the_encoding_of_an_image_and_not_the_chat(chat, folder, generate, foreground, monkeypatch):
    encode, pressed = Tower.encode, []

    def slow(self, patches, grid, threads, progress):
        if pressed:
            return encode(self, patches, grid, threads, progress)
        pressed.append(True)
        os.kill(os.getpid(), signal.SIGINT)
        while not progress(0.5):
            time.sleep(0.01)
        raise Cancelled("encoding an image was cancelled")

    monkeypatch.setattr(Tower, "encode", slow)
    show = f"/image {folder / '0.png'}\nAB\n"
    result = chat("--temp", "0", "-n", "6", stdin=f"{show}{show}")
    assert result.exit_code == 0 and not result.stderr, result.stderr
    stopped, answered = result.stdout.split("stopped: the message and its images are forgotten\n")
    assert stopped.endswith("pixels\n")
    alone = generate("-n", "6", "--chat", "AB", images=("0.png",)).stdout
    assert answered.partition("pixels\n")[2].startswith(alone)


def test_chat_without_a_tower_says_what_images_need(chat, folder):
    result = chat("-n", "1", mmproj=(), stdin=f"/image {folder / '0.png'}\n")
    assert "/image needs --mmproj" in result.stderr


def test_a_chat_says_what_is_wrong_with_an_image_and_goes_on(chat, folder, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    result = chat("-n", "1", stdin=f"/image {tmp_path / 'bad.png'}\n/image {tmp_path / 'none.png'}\n/image\nAB\n")
    said = result.stderr.splitlines()
    assert result.exit_code == 0 and len(said) == 3 and all(line.startswith("Error: ") for line in said)
    assert "bad.png: the bytes are no PNG, JPEG, WebP or GIF image" in said[0] and "none.png" in said[1]


def test_images_are_reduced_to_a_number_of_tokens(generate, folder, tmp_path):
    Image.fromarray(tiny_vision.image(640, 480, 3)).save(tmp_path / "big.png")
    words = ("-n", "8", "--json", "AB")
    facts = json.loads(generate(*words, "--image-tokens", "80", images=(tmp_path / "big.png",)).stdout)
    Image.open(tmp_path / "big.png").resize((320, 224), Image.Resampling.BICUBIC).save(tmp_path / "small.png")
    assert facts["tokens"] == tokens_of(generate(*words, images=(tmp_path / "small.png",)))
    assert facts["tokens"] != tokens_of(generate(*words, images=(tmp_path / "big.png",)))


def test_wrong_images_are_one_line(generate, folder, tmp_path):
    bad = tmp_path / "bad.png"
    for data, said in ((b"", "no PNG"), ((folder / "0.png").read_bytes()[:200], "damaged")):
        bad.write_bytes(data)
        result = generate("AB", images=(bad,))
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert str(bad) in line and said in line
    assert "No such file" in generate("AB", images=("none.png",)).stderr
    assert "Is a directory" in generate("AB", images=(tmp_path,)).stderr


def test_other_numbers_of_places_and_images_are_refused(generate):
    result = generate("--special", "A<|image_pad|>B")
    assert result.exit_code == 1 and "spells the mark of an image 1 times, and 2 images are given" in result.stderr


def test_images_that_do_not_fit_the_context_are_told_before_work(generate):
    result = generate("--ctx", "100", "AB")
    assert result.exit_code == 1 and "a context of 100" in result.stderr


def test_towers_and_models_that_do_not_fit_are_refused(luce_, folder, tmp_path):
    c = tiny.Config(n_embd=96, n_vocab=400)
    wide = tiny.write(tmp_path / "wide.gguf", c, tiny.layout(c, 1), marks=tiny_vision.MARKS)
    blind = tiny.write(tmp_path / "blind.gguf", TEXT, tiny.layout(TEXT, 1))
    for model, said in ((wide, "width 96"), (blind, "the model's tokenizer has no <|image_pad|> and no <|image|>")):
        words = ("generate", "-m", model, "--mmproj", folder / "mmproj.gguf", "--image", folder / "0.png")
        result = luce_(*words, "--device", "cpu", "AB")
        assert result.exit_code == 1 and said in result.stderr, result.stderr
    words = ("-m", folder / "model.gguf", "--mmproj", folder / "model.gguf", "--image", folder / "0.png")
    assert "this is no vision tower" in luce_("generate", *words, "AB").stderr


def test_a_tower_of_another_name_gets_a_warning(luce_, folder, tmp_path, monkeypatch):
    weights = tiny_vision.layout(TINY, tiny_vision.weights(TINY, 5))
    monkeypatch.setattr(tiny_vision, "NAME", "Another-9B")
    path = tiny_vision.write(tmp_path / "other.gguf", TINY, weights)
    words = ("-m", folder / "model.gguf", "--mmproj", path, "--image", folder / "0.png", "-n", "1")
    result = luce_("generate", *words, "AB")
    assert result.exit_code == 0 and "is named Another-9B, and the model tiny-model" in result.stderr


def test_probe_shows_a_tower(luce_, folder):
    result = luce_("probe-gguf", folder / "mmproj.gguf")
    assert result.exit_code == 0
    assert "qwen3vl_merger, 3 blocks of width 72, 64 to 16384 rows an image" in result.stdout
    assert "models with embedding 64, by name tiny" in result.stdout
    assert "beside a model, with --mmproj" in result.stdout
    facts = json.loads(luce_("probe-gguf", folder / "mmproj.gguf", "--json").stdout)
    assert facts["kind"] == "tower" and facts["tower"]["projection_dim"] == 64 and facts["tower"]["runs"]


def test_probe_says_why_a_tower_does_not_run(luce_, tmp_path):
    weights = tiny_vision.layout(TINY, tiny_vision.weights(TINY, 5))
    path = tiny_vision.write(tmp_path / "g.gguf", TINY, weights, projector_type="gemma3")
    result = luce_("probe-gguf", path)
    assert result.exit_code == 0 and "key clip.projector_type is 'gemma3': luce runs 'qwen3vl_merger'" in result.stdout
    assert "--mmproj" not in result.stdout
