"""What plan decides, and the reasons it gives."""

from dataclasses import replace
from itertools import product

import pytest

from luce._native import File
from luce.errors import ArgumentError, ContextFull, UnsupportedError
from luce.plan import DEFAULT_GAMMA, MAX_GAMMA, SPECS, Request, contradiction, fitted, plan
from luce.probe import probe
from luce.structs import Memory


@pytest.fixture(scope="module")
def facts(native, tiny_gguf):
    with File(tiny_gguf, native) as file:
        return probe(file)


def ask(prompt=10, max_tokens=20, **asked):
    return Request(tuple(range(prompt)), max_tokens, **asked)


def test_every_choice_of_a_plan_has_a_reason(facts):
    chosen = plan(facts, ask())
    assert set(chosen.reasons) == set(vars(chosen)) - {"reasons"}
    assert all(chosen.reasons.values())
    assert (chosen.device, chosen.kv_type, chosen.threads, chosen.mode) == ("auto", "f16", 0, "plain")
    assert (chosen.spec, chosen.gamma, chosen.head) == ("auto", 0, None)


def test_what_was_asked_wins(facts):
    chosen = plan(facts, ask(device="cpu", ctx=99, kv_type="q8_0", threads=3))
    assert (chosen.device, chosen.ctx, chosen.kv_type, chosen.threads) == ("cpu", 99, "q8_0", 3)
    params = chosen.session
    assert (params.n_ctx, params.kv_type, params.n_threads) == (99, "q8_0", 3)
    assert (params.n_rows, params.n_draft) == (1, 0)


@pytest.mark.parametrize(
    ("trained", "prompt", "max_tokens", "ctx"),
    [
        (262144, 10, 20, 4096),
        (2048, 10, 20, 2048),
        (262144, 5000, 20, 5020),
        (262144, 4090, 6, 4096),
        (262144, 4090, 7, 4097),
        (6000, 5000, 2000, 6000),
        (None, 10, 20, 4096),
    ],
)
def test_the_context_holds_the_request_if_the_model_was_trained_for_it(
    facts, trained, prompt, max_tokens, ctx
):
    assert plan(replace(facts, context_length=trained), ask(prompt, max_tokens)).ctx == ctx


def test_a_context_past_the_trained_one_names_both(facts):
    with pytest.raises(ArgumentError, match="5000.*2048"):
        plan(facts, ask(ctx=5000))


@pytest.mark.parametrize(("prompt", "ctx"), [(3000, None), (11, 10)])
def test_a_prompt_longer_than_the_context_names_both(facts, prompt, ctx):
    with pytest.raises(ContextFull, match=f"{prompt} tokens.*{ctx or 2048}"):
        plan(facts, ask(prompt, ctx=ctx))


def test_a_file_that_is_not_supported_has_no_plan(facts):
    with pytest.raises(UnsupportedError, match="because"):
        plan(replace(facts, supported=False, reasons=["because"]), ask())


# ---- speculation


@pytest.fixture(scope="module")
def files(facts):
    """name: facts of every kind of file."""
    return {
        "plain": facts,
        "combined": replace(facts, nextn_predict_layers=1),
        "head": replace(facts, kind="head", nextn_predict_layers=1, supported=False, reasons=["head only"]),
        "drafter": replace(facts, kind="drafter", supported=False, reasons=["a dflash drafter"]),
        "other": replace(facts, kind="other", supported=False, reasons=["the file holds no model"]),
    }


GAMMAS = (None, 0, 1, 2, MAX_GAMMA)


def wanted(model, spec, gamma, head):
    """design.md's rules, once more: (spec, gamma, where the head is) or the error."""
    if spec == "off" and (gamma is not None or head is not None):
        return ArgumentError
    if head not in (None, "combined", "head"):
        return UnsupportedError
    where = "separate" if head else "embedded" if model == "combined" else None
    if spec is None:
        spec = "auto" if gamma is None else "mtp"
        needed = spec == "mtp" and gamma != 0
    else:
        needed = spec == "mtp"
    if where is None and needed:
        return UnsupportedError
    most = {"off": 0, "auto": MAX_GAMMA if gamma is None else gamma,
            "mtp": DEFAULT_GAMMA if gamma is None else gamma}[spec]  # fmt: skip
    drafts = most if where else 0
    return spec, drafts, where if drafts else None


@pytest.mark.parametrize("model", ["plain", "combined"])
@pytest.mark.parametrize("head", [None, "plain", "combined", "head", "drafter", "other"])
def test_every_flag_against_every_kind_of_file(files, model, head):
    for spec, gamma in product((None, *SPECS), GAMMAS):
        request = ask(spec=spec, mtp_gamma=gamma)
        expected = wanted(model, spec, gamma, head)
        arguments = (files[model], request, files[head] if head else None)
        if isinstance(expected, type):
            with pytest.raises(expected):
                plan(*arguments)
            continue
        chosen = plan(*arguments)
        assert (chosen.spec, chosen.gamma, chosen.head) == expected, (spec, gamma)
        assert chosen.mode == ("mtp" if chosen.gamma else "plain")
        assert (chosen.session.n_rows, chosen.session.n_draft) == (chosen.gamma + 1, chosen.gamma)
        assert all(chosen.reasons.values()) and set(chosen.reasons) == set(vars(chosen)) - {"reasons"}


@pytest.mark.parametrize("model", ["head", "drafter", "other"])
def test_what_is_no_model_has_no_plan_whatever_is_asked(files, model):
    for spec, gamma in product((None, *SPECS), GAMMAS):
        with pytest.raises(UnsupportedError):
            plan(files[model], ask(spec=spec, mtp_gamma=gamma), files["head"] if spec != "off" else None)


def test_errors_say_what_is_missing_and_what_to_give(files):
    for asked in ({"spec": "mtp"}, {"mtp_gamma": 2}, {"spec": "mtp", "mtp_gamma": 0}):
        with pytest.raises(UnsupportedError, match="qwen35.nextn_predict_layers.*--mtp-gguf"):
            plan(files["plain"], ask(**asked))
    with pytest.raises(UnsupportedError, match="--mtp-gguf holds no NextN head.*nextn_predict_layers"):
        plan(files["combined"], ask(), files["plain"])
    with pytest.raises(UnsupportedError, match="a dflash drafter"):
        plan(files["combined"], ask(), files["drafter"])
    for asked, head in (({"mtp_gamma": 2}, None), ({"mtp_gamma": 0}, None), ({}, "head")):
        with pytest.raises(ArgumentError, match="--spec off"):
            plan(files["combined"], ask(spec="off", **asked), files[head] if head else None)


def test_only_off_contradicts_the_other_flags():
    for spec, gamma, head in product((None, *SPECS), GAMMAS, (False, True)):
        expected = spec == "off" and (gamma is not None or head)
        assert bool(contradiction(spec, gamma, head)) is expected


@pytest.mark.parametrize("free", [99, 100])
def test_auto_is_plain_where_the_head_does_not_fit_into_memory(files, free):
    memory = Memory(weights=50, kv=20, state=10, compute=20, total=100, device_free=free)
    auto, asked = (plan(files["combined"], ask(spec=spec)) for spec in ("auto", "mtp"))
    assert fitted(asked, memory) == asked
    if free == 100:
        assert fitted(auto, memory) == auto
        return
    chosen = fitted(auto, memory)
    assert (chosen.mode, chosen.spec, chosen.gamma, chosen.head) == ("plain", "auto", 0, None)
    assert "100" in chosen.reasons["gamma"] and "99" in chosen.reasons["gamma"]
    assert fitted(plan(files["plain"], ask()), memory).reasons["gamma"] == "there is no NextN head"


def test_the_longest_chain_is_the_core_s(native):
    assert native.lib.LUCE_MAX_DRAFT == MAX_GAMMA
