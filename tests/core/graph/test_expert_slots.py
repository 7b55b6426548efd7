"""Experts at home in host memory, of which some have slots on the device. No bit depends on who has one, nor on when
one moves: answers are those of a model with all experts on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import drive
import numpy as np
import pytest
from depth import deeper_but
from mixture import CASES, CONFIG, tokens_of, written
from op_run import Fault, fault, poison, poison_experts

from luce.errors import ArgumentError, DeviceError, NumericError, UnsupportedError
from luce.native import Engine, Library
from luce.native.engine import ExpertMove
from luce.native.structs import Sampling

N = CONFIG.n_expert


@pytest.fixture(scope="module")
def path_of(native: Library, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return written(native, tmp_path_factory.mktemp("slots"))


def any_moves(engine: Engine, rng: np.random.Generator) -> list[ExpertMove]:
    """Returns moves of some experts of some layers to any slots."""
    info, moves = engine.info, []
    for layer in range(info.n_expert_layers):
        outside = [e for e, slot in enumerate(engine.experts()[layer][1]) if slot < 0]
        n = int(rng.integers(0, min(len(outside), info.n_expert_slots) + 1))
        slots = rng.permutation(info.n_expert_slots)[:n]
        moves += [ExpertMove(layer, int(e), int(s)) for e, s in zip(rng.permutation(outside), slots, strict=False)]
    return moves


def answer(engine: Engine, between: Callable[[], None] = lambda: None) -> bytes:
    """Returns the logits of a prompt's continuation in steps of several widths, with what is done between them."""
    with engine.sequence() as sequence:
        drive.prefill(sequence, tokens_of(1, 41))
        found = b""
        for turn, width in enumerate((1, 1, 5, 16)):
            between()
            found += drive.chain_logits(sequence, tokens_of(2 + turn, width), width).tobytes()
    return found


@pytest.mark.parametrize("kind", deeper_but(CASES, "Q6_K"))
def test_no_placement_changes_a_bit(kind: str, native: Library, path_of: Callable[[str], Path], device: str) -> None:
    """Neither the number of slots, nor who has them, nor moves between steps. The reference is a model that knows no
    slots."""
    expected = answer(drive.open_engine(drive.open_model(native, path_of(kind), device), n_ctx=128))
    model = drive.open_model(native, path_of(kind), device, experts_at_home=True)
    rng = np.random.default_rng(7)
    for n_slots in (0, 1, 3, N):
        for n_threads in (1, 2):
            engine = drive.open_engine(model, n_ctx=128, n_expert_slots=n_slots, n_threads=n_threads)
            assert engine.info.n_expert_slots == n_slots
            moved = []

            def move(engine: Engine = engine, moved: list[ExpertMove] = moved) -> None:
                moved += (moves := any_moves(engine, rng))
                engine.move_experts(moves)

            assert answer(engine) == expected
            for _ in range(3):
                assert answer(engine, move) == expected
            assert bool(moved) == (n_slots in (1, 3))


def test_stages_have_slots_of_their_own_layers(native: Library, path_of: Callable[[str], Path], device: str) -> None:
    if not device.startswith("cpu"):
        pytest.skip("several GPUs are refused")
    expected = answer(drive.open_engine(drive.open_model(native, path_of("Q4_K"), device), n_ctx=128))
    model = drive.open_model(native, path_of("Q4_K"), "cpu,cpu", layers=(1, 1), experts_at_home=True)
    engine, rng = drive.open_engine(model, n_ctx=128, n_expert_slots=3), np.random.default_rng(8)
    assert engine.info.n_expert_layers == 2
    assert answer(engine, lambda: engine.move_experts(any_moves(engine, rng))) == expected


def test_who_has_a_slot_is_read_there(native: Library, path_of: Callable[[str], Path], device: str) -> None:
    """And who has none is not, nor is a slot that nobody has. So the test above can fail."""
    model = drive.open_model(native, path_of("F32"), device, experts_at_home=True)
    engine = drive.open_engine(model, n_ctx=128, n_expert_slots=N)
    answer(engine)
    poison_experts(engine, 1)
    with pytest.raises(NumericError):
        answer(engine)


def test_what_steps_read_is_counted(native: Library, path_of: Callable[[str], Path], device: str) -> None:
    """Each row of a step counts each of its experts, and prompts count nothing."""
    model = drive.open_model(native, path_of("Q4_K"), device, experts_at_home=True)
    engine = drive.open_engine(model, n_ctx=128, n_expert_slots=2)

    def counts() -> list[np.ndarray]:
        return [np.array(engine.experts()[layer][0], np.int64) for layer in range(engine.info.n_expert_layers)]

    with engine.sequence() as sequence:
        before = counts()
        drive.prefill(sequence, tokens_of(1, 40))
        assert all((a == b).all() for a, b in zip(before, counts(), strict=True))
        drive.chain_logits(sequence, tokens_of(2, 5), 5)
        for a, b in zip(before, counts(), strict=True):
            assert (b - a >= 0).all()
            assert (b - a).sum() % CONFIG.n_expert_used == 0
            assert (b - a).sum() >= 5 * CONFIG.n_expert_used  # A step may be filled up with rows of nobody.


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=3)])
def test_drafts_change_no_token(
    sampling: Sampling, native: Library, path_of: Callable[[str], Path], device: str
) -> None:
    plain = None
    for at_home in (False, True):
        model = drive.open_model(native, path_of("Q4_K"), device, head=True, experts_at_home=at_home)
        slots = {"n_expert_slots": 3} if at_home else {}
        sequence = drive.open_sequence(model, n_ctx=128, n_rows=9, n_draft=8, **slots)
        sequence.set_sampling(sampling)
        for gamma in (0, 3):
            run = drive.decode(sequence, tokens_of(4, 30), 30, *([gamma] if gamma else []), logits=True)
            plain = plain or run
            assert run.tokens == plain.tokens
            assert np.stack(run.logits).tobytes() == np.stack(plain.logits).tobytes()
            sequence.reset()


@pytest.mark.parametrize("after", range(6))
def test_a_move_that_fails_leaves_every_expert_readable(
    after: int, native: Library, path_of: Callable[[str], Path], device: str
) -> None:
    """Whichever copy fails, answers stay, and the next move works."""
    model = drive.open_model(native, path_of("F32"), device, experts_at_home=True)
    engine = drive.open_engine(model, n_ctx=128, n_expert_slots=2)
    expected = answer(engine)
    moves = [ExpertMove(layer, 2 + slot, slot) for layer in range(engine.info.n_expert_layers) for slot in range(2)]
    with fault(native, Fault.MOVE, 2 * after), pytest.raises(DeviceError, match="copying experts of blk.*failed"):
        engine.move_experts(moves)
    for layer in range(engine.info.n_expert_layers):
        slots = engine.experts()[layer][1]
        held = [slot for slot in slots if slot >= 0]
        assert len(set(held)) == len(held)
        done = all(slots[move.expert] == move.slot for move in moves if move.layer == layer)
        assert done or all(slots[move.expert] == -1 for move in moves if move.layer == layer)
    poison(engine)  # What nobody has.
    assert answer(engine) == expected
    engine.move_experts([move for move in moves if engine.experts()[move.layer][1][move.expert] < 0])
    assert all(engine.experts()[move.layer][1][move.expert] == move.slot for move in moves)
    assert answer(engine) == expected


def test_what_cannot_be_is_refused(
    native: Library, path_of: Callable[[str], Path], tiny_gguf: Path, device: str
) -> None:
    with pytest.raises(ArgumentError, match="experts were to have slots, and .* has none: .* is qwen35"):
        drive.open_model(native, tiny_gguf, device, experts_at_home=True)
    with pytest.raises(ArgumentError, match="leave one out"):
        drive.open_model(native, path_of("F32"), device, cpu_experts=1, experts_at_home=True)
    model = drive.open_model(native, path_of("F32"), device, experts_at_home=True)
    with pytest.raises(ArgumentError, match=f"n_expert_slots is {N + 1}, expected"):
        drive.open_engine(model, n_expert_slots=N + 1)
    with pytest.raises(ArgumentError, match="n_expert_slots is 1, and the model was opened with its experts on"):
        drive.open_engine(drive.open_model(native, path_of("F32"), device), n_expert_slots=1)
    engine = drive.open_engine(model, n_ctx=128, n_expert_slots=2)
    before = engine.experts()
    for moves, why in [
        ([(0, N, 0)], "there is no such"),
        ([(0, 3, 2)], "there is no such"),
        ([(9, 3, 1)], "there is no such"),
        ([(0, 1, 0)], "has a slot"),
        ([(0, 3, 0), (0, 4, 0)], "gets two"),
        ([(0, 3, 0), (0, 3, 1)], "has a slot, or slot 1 gets two"),
    ]:
        with pytest.raises(ArgumentError, match=why):
            engine.move_experts([ExpertMove(*move) for move in moves])
    assert before == engine.experts()
    if device.startswith("cpu"):
        other = drive.open_model(native, path_of("IQ3_S"), device, experts_at_home=True)
        with pytest.raises(UnsupportedError, match="have no slots on a CPU"):
            drive.open_engine(other, n_expert_slots=1)
