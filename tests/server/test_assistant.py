"""Serves a Gemma 4 model with its assistant: answers are those without it, cold or warm, alone or beside others."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from depth import deeper
from serving import serving, settings

import luce
from luce.bench import oracle_gemma4

LONG = " ".join(f"w{n}" for n in range(400, 700))
SAMPLED = {"temperature": 30.0, "top_k": 50, "seed": 7}  # An oracle's right logit is far above the next.


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and an assistant of whose drafts three of four are right."""
    folder = tmp_path_factory.mktemp("oracle")
    target, assistant = folder / "target.gguf", folder / "assistant.gguf"
    oracle_gemma4.make_oracle(target, "gemma4-mini", seed=3)
    oracle_gemma4.make_assistant(assistant, target, "gemma4-mini", seed=3, accept=0.75)
    return target, assistant


def ask(server, **how):
    found = server.post("/v1/completions", **{"prompt": LONG, "max_tokens": 40, "temperature": 0} | how).json()
    return found["choices"][0]["text"], found["timings"]


@pytest.mark.long
@pytest.mark.parametrize("spec", ["mtp", *deeper("auto")])
def test_a_server_says_with_an_assistant_what_it_says_without(native, files, spec):
    target, assistant = files
    asked = [{}, SAMPLED, {"prompt": LONG + " w5 w6", "max_tokens": 25}, {"prompt": "w9"}]
    with serving({"m": target}, settings(spec="off")) as server:
        expected = [ask(server, **how)[0] for how in asked]
    how = settings(spec=spec, gamma=3, sequences=3)
    for place in ("head", "drafter"):
        how = type(how)(**{**vars(how), "head": None, "drafter": None, place: assistant})
        with serving({"m": target}, how) as server:
            cold = [ask(server, **each) for each in asked]
            warm = [ask(server, **each) for each in asked]
            with ThreadPoolExecutor(4) as pool:
                beside = list(pool.map(lambda each: ask(server, **each), asked))
        for found in (cold, warm, beside):
            assert [text for text, _ in found] == expected
        if spec == "mtp":
            drafts = [[(each["draft_n"], each["draft_n_accepted"]) for _, each in found] for found in (cold, warm)]
            (made, accepted), *_ = drafts[0]
            assert drafts[0] == drafts[1] and 0 < accepted < made


@pytest.mark.long
@pytest.mark.parametrize("option", ["head", "drafter"])
def test_a_model_is_loaded_with_an_assistant(native, files, option):
    target, assistant = files
    with luce.load(target, device="cpu", draft="off") as model:
        plain = model.generate("w1 w2", max_tokens=40)
    with luce.load(target, device="cpu", draft="mtp", gamma=4, **{option: assistant}) as model:
        found = model.generate("w1 w2", max_tokens=40)
    assert found.text == plain.text and found.stats.accepted > 0
    with pytest.raises(luce.UnsupportedError, match="were asked for, and what was given is an assistant"):
        luce.load(target, device="cpu", draft="dflash", drafter=assistant)
    with pytest.raises(luce.ArgumentError, match=r"is an assistant, and .* drafts in its place: leave one out"):
        luce.load(target, device="cpu", head=assistant, drafter=assistant)
