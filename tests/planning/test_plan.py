"""Checks what plan decides, and the reasons it gives."""

import ast
import re
from dataclasses import FrozenInstanceError, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

import luce
from luce.decode.loop import MAX_ROWS
from luce.errors import ArgumentError, ContextFull, FileError, UnsupportedError
from luce.files.probe import probe
from luce.native import File
from luce.native.structs import DeviceMemory, EngineParams, Memory
from luce.planning.opened import params_of
from luce.planning.plan import (
    AUTO_BUDGET,
    DEFAULT_BUDGET,
    DEFAULT_GAMMA,
    MAX_BUDGET,
    MAX_GAMMA,
    MAX_TOP,
    PART,
    SPECS,
    Auto,
    Lookup,
    Mtp,
    Options,
    Plain,
    plan,
    smaller,
    with_copies,
    with_room,
)


@pytest.fixture(scope="module")
def facts(native, tiny_gguf):
    with File(tiny_gguf, native) as file:
        return probe(file)


def test_every_choice_of_a_plan_has_a_reason(facts):
    chosen = plan(facts, Options())
    assert set(chosen.reasons) == set(vars(chosen)) - {"reasons"}
    assert all(chosen.reasons.values())
    assert (chosen.device, chosen.kv_type, chosen.threads) == ("auto", "f16", 0)
    assert (chosen.sequences, chosen.checkpoints, chosen.draft) == (1, 0, Auto(0, None, AUTO_BUDGET))


def test_nothing_changes_a_plan(facts):
    chosen = plan(facts, Options())
    with pytest.raises(FrozenInstanceError):
        chosen.ctx = 1
    with pytest.raises(TypeError):
        chosen.reasons["ctx"] = "another"
    before = dict(chosen.reasons)
    other = chosen.because("draft", "measured", draft=Plain())
    assert (other.draft, other.reasons["draft"]) == (Plain(), "measured")
    assert dict(chosen.reasons) == before and isinstance(chosen.draft, Auto)
    assert {**other.reasons, "draft": before["draft"]} == before


def test_what_was_asked_wins(facts):
    options = Options(device="cpu", ctx=99, kv_type="q8_0", threads=3, sequences=4, checkpoints=5, pages=6,
                      chunk=256, rows=20)  # fmt: skip
    chosen = plan(facts, options)
    assert (chosen.device, chosen.ctx, chosen.kv_type, chosen.threads) == ("cpu", 99, "q8_0", 3)
    assert chosen.params == EngineParams(
        n_ctx=99, n_sequences=4, n_checkpoints=5, n_pages=6, n_rows=20, n_draft=0, n_chunk=256, n_threads=3,
        kv_type="q8_0",
    )  # fmt: skip
    asked = [name for name, reason in chosen.reasons.items() if reason == "as asked"]
    # It has no experts, and one device, the CPU.
    others = {"reasons", "draft", "cpu_experts", "expert_slots", "gaps", "scores", "layers", "copy_bytes"}
    others |= {"draft_device"}
    assert set(asked) == set(vars(chosen)) - others


@pytest.mark.parametrize(
    ("cpus", "asked", "threads"), [(0, None, 0), (2, None, 2), (64, None, 16), (2, 9, 9)]
)
def test_threads_are_the_usable_cpus_unless_asked_for(facts, cpus, asked, threads):
    assert plan(facts, Options(threads=asked), cpus=cpus).threads == threads


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
        (262144, 5000, None, 5000),
        (262144, 10, None, 4096),
    ],
)
def test_the_context_holds_the_request_if_the_model_was_trained_for_it(
    facts, trained, prompt, max_tokens, ctx
):
    chosen = plan(replace(facts, context_length=trained), Options(), prompt=prompt, new=max_tokens)
    assert chosen.ctx == ctx


def test_a_context_past_the_trained_one_names_both(facts):
    with pytest.raises(ArgumentError, match="5000.*2048"):
        plan(facts, Options(ctx=5000))


@pytest.mark.parametrize(("prompt", "ctx"), [(3000, None), (11, 10)])
def test_a_prompt_longer_than_the_context_names_both(facts, prompt, ctx):
    with pytest.raises(ContextFull, match=f"{prompt} tokens.*{ctx or 2048}"):
        plan(facts, Options(ctx=ctx), prompt=prompt)


def test_a_file_that_is_not_supported_has_no_plan(facts):
    with pytest.raises(UnsupportedError, match="because"):
        plan(replace(facts, supported=False, reasons=["because"]), Options())


# ---- speculation


@pytest.fixture(scope="module")
def files(facts):
    """Maps names to facts of every kind of file."""
    return {
        "plain": facts,
        "combined": replace(facts, nextn_predict_layers=1),
        "head": replace(facts, kind="head", nextn_predict_layers=1, supported=False, reasons=["head only"]),
        "drafter": replace(facts, kind="drafter", supported=False, reasons=["a dflash drafter"]),
        "other": replace(facts, kind="other", supported=False, reasons=["the file holds no model"]),
    }


@pytest.mark.parametrize("drafts", [6, 7, 8])
def test_a_block_has_as_many_drafts_as_its_file_says(files, drafts):
    """A drafter whose anchor's row drafts too has one more than others with the same rows."""
    unsaid = dict.fromkeys(("target_embedding", "target_vocabulary", "target_blocks"))
    block = SimpleNamespace(block_size=8, drafts=drafts, **unsaid)
    drafter = "d.gguf", replace(files["drafter"], dflash=block)
    made = plan(files["plain"], Options(spec="dflash"), drafter=drafter)
    assert made.draft.block == drafts and f"all {drafts} drafts of its block" in made.reasons["draft"]
    assert plan(files["plain"], Options(), drafter=drafter).draft.block == drafts


def test_a_drafter_of_another_model_is_refused_with_what_it_fits(files):
    """Whatever of it is unlike the model's, the error says all that it drafts for, and what the model is."""
    model = files["plain"]
    like = {"target_embedding": model.embedding_length, "target_vocabulary": model.vocab_size,
            "target_blocks": model.block_count}  # fmt: skip
    for key in (None, *like):
        block = SimpleNamespace(drafts=7, fits="models of some kind", **like | ({key: like[key] + 1} if key else {}))
        drafter = "d.gguf", replace(files["drafter"], dflash=block)
        for options in (Options(spec="dflash"), Options()):
            if key is None:
                assert plan(model, options, drafter=drafter).draft.block == 7
                continue
            with pytest.raises(FileError) as error:
                plan(model, options, drafter=drafter)
            found = f"embedding {model.embedding_length:,}, vocabulary {model.vocab_size:,}, {model.block_count} blocks"
            assert str(error.value) == f"d.gguf drafts for models of some kind, and this model has {found}"


GAMMAS = (None, 0, 1, 2, MAX_GAMMA)


def wanted(model, spec, gamma, head):
    """Applies design.md's rules, once more. Returns the choice or the error."""
    if spec in ("off", "lookup", "dflash") and gamma is not None:
        return ArgumentError
    if spec in ("off", "lookup"):
        return Plain() if spec == "off" else Lookup(DEFAULT_BUDGET)
    if spec == "dflash":
        return UnsupportedError
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
    if spec == "mtp":
        return Plain() if gamma == 0 else Mtp(gamma or DEFAULT_GAMMA, where)
    if where is None or gamma == 0:
        return Auto(0, None, AUTO_BUDGET)
    return Auto(gamma or MAX_GAMMA, where, AUTO_BUDGET)


@pytest.mark.parametrize("model", ["plain", "combined"])
@pytest.mark.parametrize("head", [None, "plain", "combined", "head", "drafter", "other"])
def test_every_flag_against_every_kind_of_file(files, model, head):
    for spec, gamma in product((None, *SPECS), GAMMAS):
        options = Options(spec=spec, gamma=gamma)
        expected = wanted(model, spec, gamma, head)
        arguments = (files[model], options, files[head] if head else None)
        if isinstance(expected, type):
            with pytest.raises(expected):
                plan(*arguments)
            continue
        chosen = plan(*arguments)
        assert chosen.draft == expected, (spec, gamma)
        assert chosen.drafts == getattr(expected, "gamma", 0)
        assert chosen.params.n_top == 0
        assert (chosen.params.n_rows, chosen.params.n_draft) == (chosen.draft.candidates + 1, chosen.drafts)
        assert chosen.as_json()["draft"]["value"] == {"mode": expected.mode, **vars(expected)}
        assert all(chosen.reasons.values()) and set(chosen.reasons) == set(vars(chosen)) - {"reasons"}


@pytest.mark.parametrize("model", ["head", "drafter", "other"])
def test_what_is_no_model_has_no_plan_whatever_is_asked(files, model):
    for spec, gamma in product((None, *SPECS), GAMMAS):
        with pytest.raises(UnsupportedError):
            plan(files[model], Options(spec=spec, gamma=gamma), files["head"])


def test_errors_say_what_is_missing_and_not_how_to_ask_for_it(files):
    """Flags are the command line's: it finds its remedy by what the error concerns."""
    for asked in ({"spec": "mtp"}, {"gamma": 2}, {"spec": "mtp", "gamma": 0}):
        with pytest.raises(UnsupportedError, match="qwen35.nextn_predict_layers") as raised:
            plan(files["plain"], Options(**asked))
        assert raised.value.concerns == "nextn_head" and "--" not in str(raised.value)
    with pytest.raises(UnsupportedError, match="holds no NextN head.*nextn_predict_layers"):
        plan(files["combined"], Options(), files["plain"])
    with pytest.raises(UnsupportedError, match="is a DFlash drafter and holds no NextN head") as raised:
        plan(files["combined"], Options(), files["drafter"])
    assert raised.value.concerns == "not_a_head"
    with pytest.raises(UnsupportedError, match="head only") as raised:
        plan(files["head"], Options())
    assert raised.value.concerns == "trunk"


@pytest.mark.parametrize("free", [99, 100])
def test_auto_is_smaller_where_its_drafts_do_not_fit_into_memory(files, free):
    """It is without the head first, then plain; what was asked for stays."""
    memory = Memory(weights=50, kv=20, state=10, compute=15, other=5, total=100, device_free=free)
    auto, asked = (plan(files["combined"], Options(spec=spec)) for spec in ("auto", "mtp"))
    assert smaller(asked, memory) is None
    if free == 100:
        assert smaller(auto, memory) is None
        return
    headless = smaller(auto, memory)
    assert headless.draft == Auto(0, None, AUTO_BUDGET) and headless.params.n_draft == 0
    plain = smaller(headless, memory)
    assert plain.draft == Plain() and plain.params.n_rows == 1 and smaller(plain, memory) is None
    assert all(each in chosen.reasons["draft"] for each in ("100", "99") for chosen in (headless, plain))


def test_sequences_of_auto_share_the_rows_of_a_step(files):
    for sequences, budget in ((1, AUTO_BUDGET), (2, 31), (4, 15), (16, MAX_GAMMA), (64, MAX_GAMMA)):
        chosen = plan(files["combined"], Options(sequences=sequences))
        assert chosen.draft == Auto(MAX_GAMMA, "embedded", budget)
    bound = plan(files["combined"], Options(budget=3))
    assert bound.draft == Auto(3, "embedded", 3) and bound.params.n_rows == 4


def test_a_chain_with_a_budget_is_a_tree(files):
    chosen = plan(files["combined"], Options(spec="mtp", gamma=3, budget=12))
    assert chosen.draft == Mtp(3, "embedded", 12)
    assert (chosen.params.n_rows, chosen.params.n_draft, chosen.params.n_top) == (13, 3, MAX_TOP)


def test_the_longest_chain_and_the_widest_step_are_the_core_s(native):
    assert (native.lib.LUCE_MAX_DRAFT, native.lib.LUCE_MAX_ROWS) == (MAX_GAMMA, MAX_ROWS)
    assert MAX_BUDGET == MAX_ROWS - 1


MIXTURE = {"experts": 8, "block_count": 41, "nextn_predict_layers": 1}


@pytest.mark.parametrize(
    ("mixture", "asked", "found"),
    [
        (MIXTURE, None, 0),
        (MIXTURE, 0, 0),
        (MIXTURE, 40, 40),
        (MIXTURE, 41, "41 layers .* has 40"),
        ({"experts": None}, 1, "has none"),
        ({"experts": None}, "auto", "has none"),
    ],
)
def test_experts_in_host_memory_are_of_layers_that_there_are(facts, mixture, asked, found):
    model, options = replace(facts, **mixture), Options(cpu_experts=asked)
    if isinstance(found, str):
        with pytest.raises(ArgumentError, match=found):
            plan(model, options)
    else:
        assert plan(model, options).cpu_experts == found


def test_auto_keeps_as_few_experts_in_host_memory_as_leave_room(facts):
    """Of 40 layers of 10 bytes beside 100: one layer less would not fit."""
    chosen = plan(replace(facts, **MIXTURE), Options(cpu_experts="auto"))
    for free in range(60, 520, 7):

        def memory(at, free=free):
            total = 100 + 10 * (40 - at.cpu_experts)
            return Memory(weights=total, kv=0, state=0, compute=0, other=0, total=total, device_free=free)

        found = with_room(chosen, 40, memory)
        assert memory(found).total <= free or found.cpu_experts == 40
        fewer = replace(found, cpu_experts=found.cpu_experts - 1)
        assert found.cpu_experts == 0 or memory(fewer).total > free
        assert (f"{free:,} are free" in found.reasons["cpu_experts"]) == (found.cpu_experts > 0)


@pytest.mark.parametrize("frees", [(1000,), (140, 1000), (105,), (90, 1000)])
def test_copies_take_half_of_what_is_left_and_no_more_than_there_is_to_copy(facts, frees):
    """A device's weights take 60 of 100 bytes, and copies of its ten matrices 16 each."""

    def memory(at):
        copied = min(at.copy_bytes // 16, 10) * 16
        devices = tuple(
            DeviceMemory(f"cuda:{i}", i, 1, 60 + copied, 40, 0, 0, 0, 100 + copied, free)
            for i, free in enumerate(frees)
        )
        return Memory(*(sum(getattr(each, part) for each in devices) for part in
                        ("weights", "kv", "state", "compute", "other", "total", "free")), devices=devices)  # fmt: skip

    before = plan(facts, Options())
    chosen = with_copies(before, memory)
    assert chosen.copy_bytes == {(1000,): 160, (140, 1000): 16, (105,): 0, (90, 1000): 0}[frees]
    assert memory(chosen).fits == (min(frees) >= 100) and chosen.reasons["copy_bytes"]
    assert replace(chosen, copy_bytes=0, reasons={}) == replace(before, reasons={})


def test_a_part_of_the_vocabulary_is_for_chains_that_are_asked_for(facts):
    head = replace(facts, nextn_predict_layers=1)
    chosen = plan(head, Options(spec="mtp", gamma=2, part=128))
    assert chosen.draft == Mtp(2, "embedded", part=128) and chosen.params.n_part == 128
    assert plan(head, Options(spec="mtp", gamma=2)).params.n_part == 0
    for spec in set(SPECS) - {"mtp"}:
        with pytest.raises(ArgumentError, match="among 128 tokens were asked for"):
            plan(head, Options(spec=spec, part=128))


COMMAND_LINE = {"cli.py", "flags.py", "hub.py", "serve_cli.py"}  # And all of luce/cli.


@pytest.mark.long
def test_only_the_command_line_speaks_of_flags():
    """Lower layers raise errors about values, and what runs a command adds the remedy. What luce bench,
    convert and serve run may start programs with flags, but raises nothing that speaks of any."""
    root = Path(luce.__file__).parent
    lower = [path for path in root.rglob("*.py") if path.name not in COMMAND_LINE and path.parent.name != "cli"]
    found = []
    for path in lower:
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        if path.parent not in (root, root / "native"):
            raised = [node for each in nodes if isinstance(each, ast.Raise) for node in ast.walk(each)]
            names = {node.id for node in raised if isinstance(node, ast.Name)}
            named = [
                node
                for each in nodes
                if isinstance(each, ast.Assign)
                and any(isinstance(to, ast.Name) and to.id in names for to in each.targets)
                for node in ast.walk(each)
            ]
            nodes = raised + named
        said = {node.value for node in nodes if isinstance(node, ast.Constant)} - {
            ast.get_docstring(node, clean=False)
            for node in nodes
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        }
        said = {re.sub("pip install --[a-z-]+", "", str(text)) for text in said}
        speaks = (text for text in said if re.search(r"(?<![\w-])--[a-z]", text))
        found += [(path.relative_to(root).as_posix(), text) for text in speaks]
    assert found == [] and len(lower) > 60


def test_an_assistant_takes_the_place_of_a_head(facts):
    """It never drafts among first tokens alone where luce chooses: in its vocabulary single characters come last."""
    assistant = replace(facts, kind="assistant", architecture="x-assistant")
    chosen = plan(facts, Options(spec="mtp"), assistant)
    assert chosen.draft == Mtp(DEFAULT_GAMMA, "assistant") and chosen.params.n_draft == DEFAULT_GAMMA
    assert chosen.reasons["draft"].startswith("the assistant that was given")
    assert plan(facts, Options(gamma=0), assistant).draft == Plain()
    auto = plan(facts, Options(), assistant)
    assert auto.draft == Auto(MAX_GAMMA, "assistant", AUTO_BUDGET)
    assert "by the assistant that was given" in auto.reasons["draft"]
    head = replace(facts, kind="head", nextn_predict_layers=1)
    large = 2 * PART
    parts = [params_of(plan(facts, Options(), each), "cpu", large).n_part for each in (head, assistant)]
    assert parts == [PART, 0]
    with pytest.raises(UnsupportedError, match="what was given is an assistant, which drafts with mtp or auto"):
        plan(facts, Options(spec="dflash"), assistant)
    assert plan(facts, Options(spec="lookup"), assistant).draft == Lookup(DEFAULT_BUDGET)
    less = smaller(auto, Memory(weights=0, kv=2, state=0, compute=0, other=0, total=2, device_free=1))
    assert less is not None and less.draft == Auto(0, None, AUTO_BUDGET)
