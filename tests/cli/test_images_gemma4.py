"""Images for Gemma 4 on the command line: the tokens of transformers, whatever drafts, and clear refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_gemma4_unified
import tiny_gemma4_vision as vision
import tiny_vision
from checkout import GOLDENS
from depth import deeper

Image = pytest.importorskip("PIL.Image")
ROW = vision.VOCABULARY_SIZE - 1


@pytest.fixture(scope="module", params=[*deeper("per-layer"), "dense", "unified"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, name):
    """A model, its tower and assistant, and the golden's two images."""
    made = tmp_path_factory.mktemp("seen")
    text = "dense" if name == "unified" else name
    vision.write_both(made, text)
    vision.write_assistant_of(made / "assistant.gguf", text)
    if name == "unified":
        tiny_gemma4_unified.write(made / "mmproj.gguf")
    for i, picture in enumerate(tiny_vision.pictures()):
        Image.fromarray(picture).save(made / f"{i}.png")
    return made


@pytest.fixture
def generate(luce_, folder, device):
    def run(*words, **how):
        shown = [word for name in ("0.png", "1.png") for word in ("--image", folder / name)]
        files = ("-m", folder / "model.gguf", "--mmproj", folder / "mmproj.gguf", "--device", device)
        return luce_("generate", *files, *shown, "--image-tokens", "70", *words, **how)

    return run


def spelled(tokens):
    """Returns the golden's prompt as text behind its first token, in which an image is spelled by its marks."""
    marks = dict(zip((ROW - 2, ROW - 1, ROW), vision.MARKS, strict=True))
    pairs = zip(tokens[1:], tokens, strict=False)
    kept = [token for token, before in pairs if (token, before) != (ROW, ROW)]
    return "".join(marks.get(token) or vision.VOCABULARY[token] for token in kept)


def tokens_of(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["tokens"]


@pytest.mark.parametrize("spec", [*deeper((("--spec", "off"),)), ("--draft", "assistant.gguf")])
def test_tokens_are_those_of_transformers(generate, name, folder, device, spec):
    with np.load(GOLDENS / f"gemma4-vision-{name}.npz") as held:
        prompt, wanted = spelled(held["prompt"].tolist()), held["greedy"].tolist()
    how = ("--special", "-n", "32", "--kv-type", "f32", "--json", "--temp", "0")
    found = tokens_of(generate(*how, *(folder / word if "." in word else word for word in spec), prompt))
    if device == "cpu":
        assert found == wanted
    else:
        assert found == tokens_of(generate(*how, "--spec", "off", prompt))


def test_a_chat_shows_images_before_the_text(luce_, folder, device):
    files = ("-m", folder / "model.gguf", "--mmproj", folder / "mmproj.gguf", "--device", device)
    words = ("--chat", "--image", folder / "0.png", "-n", "4", "--json")
    result = luce_("generate", *files, *words, "  What?")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["prompt_tokens"] > 26 * 10  # 1248 x 480 pixels, of the usual budget of 280.
    stdin = f"/image {folder / '0.png'}\nWhat?\n"
    assert luce_("chat", *files, "-n", "4", stdin=stdin).exit_code == 0


def test_a_bound_on_tokens_is_a_budget(generate, luce_, folder, device):
    rows = 13 * 5 + 5 * 12  # 624 x 240 and 240 x 576 pixels
    result = generate("-n", "1", "--json", "AB")
    assert json.loads(result.stdout)["prompt_tokens"] == rows + 2 * 2 + 3, "marks beside each image, and the text's own"
    files = ("-m", folder / "model.gguf", "--mmproj", folder / "mmproj.gguf", "--device", device)
    result = luce_("generate", *files, "--image", folder / "0.png", "--image-tokens", "69", "AB")
    assert result.exit_code == 1 and "takes budgets of 70, 140, 280, 560, 1120" in result.stderr


def test_probe_shows_a_tower(luce_, name, folder):
    result = luce_("probe-gguf", folder / "mmproj.gguf")
    assert result.exit_code == 0, result.stderr
    kind, tower = "gemma4uv", tiny_gemma4_unified.CONFIG
    if name != "unified":
        kind, tower = "gemma4v", vision.TEXTS[name][1][0]
    assert f"{kind}, {tower.n_layer} blocks of width {tower.n_embd}, 70 to 1120 rows an image" in result.stdout
    assert "models with embedding 64, by name tiny" in result.stdout
