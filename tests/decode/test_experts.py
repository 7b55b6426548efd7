"""Who has a slot is decided by a pure function of scores and slots; an engine's experts move between requests, and no
token depends on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import drive
import numpy as np
import pytest
import tiny
from depth import deeper
from mixture import CONFIG
from op_run import Fault, fault, pretended_devices

import luce
from luce.cli.terminal import facts_text, size
from luce.decode.engine import Engine
from luce.decode.events import Finished, Tokens, Warned
from luce.decode.experts import HALF_LIFE, MARGIN, RATIO, faded, moves_of
from luce.decode.request import Request
from luce.native import Library
from luce.planning.memory import fits
from luce.planning.opened import Files
from luce.planning.plan import Options
from luce.server.watch import Watch


def applied(slots, moves):
    made = [list(layer) for layer in slots]
    for layer, expert, slot in moves:
        made[layer] = [-1 if had == slot else had for had in made[layer]]
        made[layer][expert] = slot
    return made


def held(scores, slots):
    pairs = ((score, slot) for layer in zip(scores, slots, strict=True) for score, slot in zip(*layer, strict=True))
    return sum(score for score, slot in pairs if slot >= 0)


def drawn(rng):
    """Returns scores and slots of some layers, of which some slots may be empty, with many ties."""
    n_layers, n = int(rng.integers(1, 5)), int(rng.integers(1, 20))
    n_slots = int(rng.integers(0, n + 1))
    scores = [[float(x) for x in rng.integers(0, 40, n) ** int(rng.integers(1, 3))] for _ in range(n_layers)]
    slots = []
    for _ in range(n_layers):
        taken = rng.permutation(n_slots)[: int(rng.integers(0, n_slots + 1))]
        who = rng.permutation(n)[: len(taken)]
        slots.append([-1] * n)
        for expert, slot in zip(who, taken, strict=True):
            slots[-1][expert] = int(slot)
    return scores, slots, n_slots


@pytest.mark.parametrize("seed", range(200))
def test_moves_are_few_allowed_and_each_gains(seed):
    rng = np.random.default_rng(seed)
    scores, slots, n_slots = drawn(rng)
    most = int(rng.integers(0, 30))
    moves = moves_of(scores, slots, n_slots, most)
    assert len(moves) <= most
    assert len({move[:2] for move in moves}) == len({(move.layer, move.slot) for move in moves}) == len(moves)
    gains = []
    for move in moves:
        assert slots[move.layer][move.expert] == -1 and 0 <= move.slot < n_slots
        had = [scores[move.layer][e] for e, slot in enumerate(slots[move.layer]) if slot == move.slot]
        gain = scores[move.layer][move.expert] - sum(had)
        assert gain > (MARGIN if had else 0)
        gains.append(gain)
    assert gains == sorted(gains, reverse=True)
    assert held(scores, applied(slots, moves)) == held(scores, slots) + sum(gains)
    assert moves == moves_of(scores, slots, n_slots, 10**6)[:most], "a bound leaves out those that gain least"


@pytest.mark.parametrize("seed", range(100))
def test_moves_come_to_rest_where_no_expert_is_used_much_more_than_one_with_a_slot(seed):
    rng = np.random.default_rng(seed)
    scores, slots, n_slots = drawn(rng)
    turns = 0
    while moves := moves_of(scores, slots, n_slots, 3):
        slots, turns = applied(slots, moves), turns + 1
        assert turns <= sum(len(layer) for layer in slots)
    for score, slot_of in zip(scores, slots, strict=True):
        outside = [s for s, slot in zip(score, slot_of, strict=True) if slot < 0]
        inside = [s for s, slot in zip(score, slot_of, strict=True) if slot >= 0]
        if outside and inside:
            assert max(outside) <= RATIO * min(inside) + MARGIN
        if len(inside) < n_slots:
            assert max(outside, default=0) == 0


def test_experts_that_are_about_equally_used_do_not_take_turns():
    """Of 12 experts, each read at random as often as the others, 4 have slots: over 200 requests few move, none once
    scores are large. A margin alone, or none, moves hundreds."""
    rng = np.random.default_rng(3)
    scores, slots, moved = [[0.0] * 12], [[0, 1, 2, 3] + [-1] * 8], []
    for _ in range(200):
        scores = [faded(scores[0], np.bincount(rng.integers(0, 12, 400), minlength=12).tolist())]
        moves = moves_of(scores, slots, 4, 8)
        slots = applied(slots, moves)
        moved.append(len(moves))
    assert sum(moved) <= 12 and sum(moved[20:]) == 0


def test_what_is_used_finds_its_slots_and_leaves_them_when_that_changes():
    """Four of 64 experts have nine tenths of all reads; then four others have."""
    rng, n = np.random.default_rng(4), 64
    scores, slots = [[0.0] * n], [[0, 1, 2, 3, 4, 5, 6, 7] + [-1] * (n - 8)]
    for first in (20, 50):
        shares = np.full(n, 0.1 / n)
        shares[first : first + 4] += 0.9 / 4
        for _ in range(12):
            scores = [faded(scores[0], rng.multinomial(4000, shares).tolist())]
            slots = applied(slots, moves_of(scores, slots, 8, 2))
        assert all(slots[0][expert] >= 0 for expert in range(first, first + 4))


def test_scores_fade_by_what_was_read_since():
    assert faded([8.0, 0.0], [0, 0]) == [8.0, 0.0], "nothing was read, and nothing is forgotten"
    assert faded([8.0, 1.0], [0, HALF_LIFE]) == [4.0, HALF_LIFE + 0.5]


# ---- with an engine


@pytest.fixture(scope="module")
def mixture(native: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "mixture.gguf"
    tiny.write(path, CONFIG, tiny.layout(CONFIG, seed=5), drive.type_of("Q4_K"), quantize=native.quantize)
    return path


def requests(n: int) -> list[Request]:
    rng = np.random.default_rng(1)
    prompts = [tuple(int(t) for t in rng.integers(0, CONFIG.n_vocab, 20)) for _ in range(n)]
    return [Request(prompt, max_tokens=24, ignore_eos=True) for prompt in prompts]


def answers(engine: Engine, n: int = 6) -> list[tuple[int, ...]]:
    found = []
    for request in requests(n):
        tokens: list[int] = []
        for event in engine.generate(request):
            tokens += event.ids if isinstance(event, Tokens) else ()
            assert not isinstance(event, Finished) or event.reason == "length"
        found.append(tuple(tokens))
    assert all(len(tokens) == 24 for tokens in found)
    return found


@pytest.mark.parametrize("spec", ["off", "mtp"])
@pytest.mark.parametrize("n_slots", [*deeper(0), 2, *deeper(5, CONFIG.n_expert)])
def test_requests_have_the_same_tokens_while_experts_move(mixture, device, spec, n_slots):
    with Engine.open(mixture, Options(device=device, ctx=256, spec=spec)) as engine:
        assert engine.experts is None
        expected = answers(engine)
    with Engine.open(mixture, Options(device=device, ctx=256, spec=spec, expert_slots=n_slots)) as engine:
        assert answers(engine) == expected and answers(engine) == expected
        use = engine.experts.use
        assert use.read > 0 and not use.failed
        assert use.share == {0: 0.0, CONFIG.n_expert: 1.0}.get(n_slots, use.share)
        if 0 < n_slots < CONFIG.n_expert:
            assert use.moved > 0 and 0 < use.share < 1


def test_what_was_used_is_read_on_the_device(mixture, device):
    """The same request again and again: with learned places more of its reads find a slot than with the first ones'."""
    with Engine.open(mixture, Options(device=device, ctx=256, spec="off", expert_slots=3)) as engine:
        shares = []
        for _ in range(12):
            before = engine.experts.use
            answers(engine, 1)
            engine.experts.settle()
            now = engine.experts.use
            shares.append((now.hits - before.hits) / (now.read - before.read))
        assert shares[-1] > shares[0] + 0.1
        assert shares[-1] == shares[-2], "and places are at rest"


def test_a_move_that_fails_ends_moves_and_no_request(native, mixture, device):
    with Engine.open(mixture, Options(device=device, ctx=256, spec="off")) as engine:
        expected = answers(engine)
    with Engine.open(mixture, Options(device=device, ctx=256, spec="off", expert_slots=2)) as engine:
        with fault(native, Fault.MOVE, 1):
            said = []
            for request in requests(3):  # Before the second one experts would move.
                said += [event.message for event in engine.generate(request) if isinstance(event, Warned)]
            assert len(said) == 1 and said[0].startswith("experts stay where they are from now on: copying")
            assert answers(engine) == expected
        assert "copying experts" in engine.experts.use.failed and engine.experts.use.moved == 0
        assert answers(engine) == expected


def test_auto_gives_as_many_slots_as_there_is_room_for(native, mixture):
    """A device that the CPU stands in for has more and more memory: none, some, and all experts have slots, until the
    model needs no home in host memory. Tokens are the same."""
    found, tokens = [], set()
    with pretended_devices(native, {"roomy": 1 << 40}), Files(mixture, device="roomy") as files:
        whole = files.memory(files.plan(Options(ctx=256, spec="off")))
        none = files.memory(files.plan(Options(ctx=256, spec="off", expert_slots=0)))
        all_slots = files.memory(files.plan(Options(ctx=256, spec="off", expert_slots=CONFIG.n_expert)))
    tables = all_slots.experts // 512  # of the pinned pages
    assert none.experts == 0 and none.weights - tables + all_slots.experts == whole.weights
    each = all_slots.experts // CONFIG.n_expert
    for free in (none.total, none.total + each, none.total + 3 * each + each // 2, whole.total):
        with pretended_devices(native, {"small": free}), Files(mixture, device="small") as files:
            plan = files.plan(Options(ctx=256, spec="off", expert_slots="auto"))
            assert files.memory(plan).fits
            found.append(plan.expert_slots)
            assert ("are free" in plan.reasons["expert_slots"]) == (plan.expert_slots is not None)
            with Engine.open(files, plan) as engine:
                tokens.add(tuple(answers(engine, 2)))
    assert found == [0, 1, 3, None] and len(tokens) == 1


def test_probe_says_how_many_have_slots(native, mixture):
    """And what they take, beside the other parts."""
    with pretended_devices(native, {"roomy": 1 << 40}), Files(mixture, device="roomy") as files:
        asked = Options(ctx=256, spec="off", expert_slots=3)
        needed = files.memory(files.plan(asked))
        text = facts_text(files.facts, fits(files, asked))
        assert "experts" not in facts_text(files.facts, fits(files, Options(ctx=256))).split("plain at")[1]
    assert "3 of each layer's experts have a slot; all are in host memory" in text
    assert f"experts {size(needed.experts)}" in text and needed.parts == needed.total


def test_metrics_say_how_many_reads_found_a_slot(mixture):
    """Of a model that is opened as a user of Python does, and watched as the server does."""
    with luce.load(mixture, device="cpu", ctx=256, expert_slots=3, draft="off", checkpoints=0) as model:
        for _ in range(2):
            model.generate([1, 2, 3], max_tokens=16, ignore_eos=True)
        watched = SimpleNamespace(name="0", loaded=model.loaded, failed=None)
        served = SimpleNamespace(replicas=SimpleNamespace(all=[watched]))
        shown = Watch().scrape(SimpleNamespace(slots={"m": SimpleNamespace(served=served)})).decode()
        use = model.loaded.engine.experts.use
    assert use.read > use.hits > 0 and use.moved > 0
    assert f'luce:expert_reads{{place="device"}} {float(use.hits)}' in shown
    assert f'luce:expert_reads{{place="host"}} {float(use.read - use.hits)}' in shown
    assert f"luce:expert_moves {float(use.moved)}" in shown
