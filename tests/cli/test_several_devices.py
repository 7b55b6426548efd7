"""What loads a model takes one that several devices share, with layers each or with a part of each matrix."""

import json

import pytest
from click.testing import CliRunner
from cut_models import files
from depth import deeper_but
from serving import serving, settings

from luce.cli.commands import cli

WAYS = {"layers": ("--device", "cpu,cpu", "--split", "1,3"), "parts": ("--device", "cpu,cpu", "--split", "tensor")}
NAMES = {"layers": "cpu,cpu", "parts": "cpu+cpu"}


@pytest.fixture(scope="module")
def model(native, tmp_path_factory):
    return files(tmp_path_factory.mktemp("shared"), "dense")[0]


def said(*words, stdin=None):
    done = CliRunner().invoke(cli, [*map(str, words), "--threads", "1"], input=stdin)
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_a_chat_and_a_text_are_those_of_one_device(native, model, way):
    """Layers have the bits of one device. With parts of matrices sums are added in another order, so a chat has to be
    that of drafts there."""
    sampled = ("--gguf", model, "--ctx", "512", "-n", "24", "--temp", "0")
    chat, shared = ("chat", *sampled), WAYS[way]
    plain = said(*chat, *shared, "--spec", "off", stdin="hello\n")
    assert len(plain.strip()) > 10 and plain == said(*chat, *shared, "--mtp-gamma", "2", stdin="hello\n")
    if way == "layers":
        assert plain == said(*chat, "--device", "cpu", "--spec", "off", stdin="hello\n")
        text = ("generate", "hello", *sampled, "--spec", "off")
        assert said(*text, *shared) == said(*text, "--device", "cpu")


@pytest.mark.parametrize("way", deeper_but(WAYS, "layers"))
def test_benchmarks_measure_them(native, model, way):
    words = ("bench", "batch", "--gguf", model, "--sequences", "1,2", "--modes", "plain,mtp:2", "-n", "8", "--json")
    row = json.loads(said(*words, "--quiet", *WAYS[way]))
    assert [(each["mode"], each["sequences"]) for each in row["batches"]] == [
        ("plain", 1), ("plain", 2), ("mtp:2", 1), ("mtp:2", 2),
    ]  # fmt: skip
    assert all(each["tok_per_s"] > 0 for each in row["batches"])


@pytest.mark.parametrize("way", WAYS)
def test_a_server_answers_from_them(native, model, way):
    """Two at once, and again from what was kept of the prompt, with drafts."""
    asked = {"prompt": [7 + 3 * i % 200 for i in range(300)], "max_tokens": 12, "temperature": 0}
    found = []
    for options in ({"spec": "off"}, {"spec": "mtp", "gamma": 2}):
        with serving({"m": model}, settings(device=NAMES[way], ctx=512, **options)) as server:
            for _ in range(2):
                answer = server.post("/v1/completions", **asked).json()
                found.append((answer["choices"][0]["text"], answer["usage"]["completion_tokens"]))
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
            assert NAMES[way] in json.dumps(server.http.get("/props").json())
    assert found == found[:1] * 4 and found[0][1] == 12
