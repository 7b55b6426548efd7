"""Cuts a model into stages: each has its layers' caches, inputs and backend, and all that is computed, drafted and
saved has the bits that it has in one stage. A CPU is named several times; GPUs are those of --luce-device, each of
which has one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import drive
import op_run
import pytest
import tiny
import tiny_dflash
import tiny_gemma4
from depth import deeper_but
from split import held, stages, two_stages

from luce.convert.gemma4_layout import Config as Gemma4
from luce.errors import ArgumentError, UnsupportedError
from luce.files.probe import probe
from luce.native import File, Library, Prompt, Source
from luce.planning.opened import Files
from luce.planning.plan import Options

DENSE = tiny.Config(n_embd=256, n_ff=256, n_v_head=8, state_size=128, head_dim=128, n_layer=4,
                    recurrent=(True, False, True, False), n_nextn=1)  # fmt: skip
MIXTURE = tiny.with_experts(DENSE)
# Each has a file's config (or a drafter's case), its type, and how it is opened.
MODELS: dict[str, tuple[Any, str, dict[str, int]]] = {
    "dense": (DENSE, "F32", {}),
    "quantised": (DENSE, "Q8_0", {}),
    "mixture": (MIXTURE, "F32", {}),
    "unshared": (replace(MIXTURE, n_ff_shared=0), "F32", {}),
    "host": (MIXTURE, "F32", {"cpu_experts": 4}),
    "gemma4": (Gemma4(sliding=(True, False, True, False), n_shared_kv=2, n_embd_per_layer=32), "F32", {}),
    "assistant": ((*tiny_gemma4.CASES["dense"], tiny_gemma4.ASSISTANT), "F32", {}),
    "dflash": (tiny_dflash.CASES["causal-windows"], "F32", {}),
}


def files(folder: Path, name: str) -> tuple[Path, Path | None]:
    made, kind, _ = MODELS[name]
    if name == "assistant":
        config, seed, own = made
        tiny_gemma4.write(folder / "assistant.gguf", own, tiny_gemma4.layout(own, tiny_gemma4.ASSISTANT_SEED))
        return tiny_gemma4.write(folder / "model.gguf", config, tiny_gemma4.layout(config, seed)), None
    if isinstance(made, Gemma4):
        return tiny_gemma4.write(folder / "model.gguf", made, tiny_gemma4.layout(made, 5), kind), None
    if isinstance(made, tiny.Config):
        return tiny.write(folder / "model.gguf", made, tiny.layout(made, 5), kind), None
    return tiny_dflash.files(folder, made)


def n_layers(made: tuple[Path, Path | None], native: Library) -> int:
    """Returns how many layers the model's trunk has."""
    facts = probe(File(made[0], native))
    return (facts.block_count or 0) - facts.nextn_predict_layers


def run(
    native: Library, device: str, name: str, made: tuple[Path, Path | None], layers: Sequence[int] = ()
) -> list[bytes]:
    """Returns all that a model computes: logits of a prompt, of a row, a tree and verified drafts, and what a sequence
    holds, and another one beside it; then the same again from a checkpoint, over scratch, pages and slots that are
    poisoned."""
    path, drafter = made
    head: drive.Head = drafter is None and not isinstance(MODELS[name][0], Gemma4)
    if name == "assistant":  # Its layers read cells of both stages.
        head = path.with_name("assistant.gguf")
    model = drive.open_model(native, path, device, head=head, drafter=drafter, layers=layers, **MODELS[name][2])
    params = {"blocks": 1, "n_top": 2} if drafter else {"n_draft": 3, "n_part": 128, "n_top": 2} if head else {}
    sequence = drive.open_sequence(model, n_ctx=1024, n_sequences=2, n_rows=16, n_checkpoints=1, **params)
    other = sequence.engine.sequence()
    prompt = [7 + 3 * i % 200 for i in range(256)]
    drive.prefill(sequence, prompt)
    found = [sequence.logits(0).tobytes()]
    checkpoint = sequence.checkpoint()
    for moves in (False, True):
        if moves:
            checkpoint.to_host()
            sequence.reset()
            op_run.poison(sequence.engine)
            sequence.resume(checkpoint)
        other.reset()
        sequence.engine.prefill([Prompt(other, prompt[:200]), Prompt(sequence, [9, 8, 7])])
        found.append(bytes(other.dump()))
        found.append(drive.step(sequence, 11).tobytes())
        drive.verify(sequence, [5, 9, 8, 6], [-1, 0, 0, 2])
        found += [sequence.logits(row).tobytes() for row in range(4)]
        sequence.commit([0, 2, 3])
        for source in [Source.DFLASH] if drafter else [Source.NEXTN, Source.PART] if head else []:
            found.append(repr(drive.draft(sequence, 5, 3, source)).encode())
            drive.verify_draft(sequence, 3)
            found += [sequence.logits(row).tobytes() for row in range(4)]
            sequence.commit([0])
        found.append(bytes(sequence.dump()))
    sequence.engine.close()
    model.close()
    return found


@pytest.mark.parametrize("name", deeper_but(MODELS, "quantised", "host", "assistant", "dflash"))
def test_several_stages_have_the_bits_of_one(native: Library, device: str, name: str, tmp_path: Path) -> None:
    made = files(tmp_path, name)
    one = device.split(",")[0]
    if one != "cpu" and name == "host":
        pytest.skip("experts in host memory and several GPUs do not go together yet")
    two, n = two_stages(device), n_layers(made, native)
    if one != "cpu" and name == "gemma4":
        pytest.skip("GPUs do not read each other's cells, and all of its layers read those of others")
    whole = held(one, run(native, one, name, made))
    assert len(set(whole)) >= 7  # Logits differ, and states.
    cuts = list(range(1, 3))
    if name == "assistant":  # On a CPU it may read cells of both stages.
        cuts = [2, 5] if one == "cpu" else [2]
    for layer in cuts:
        found = run(native, two, name, made, (layer, n - layer))
        assert held(one, found) == whole, f"cut ahead of layer {layer}"
    if (three := stages(device, 3)) and (one == "cpu" or name != "assistant"):
        found = run(native, three, name, made, (1, 1, n - 2))
        assert held(one, found) == whole, "three stages"


# The first of the layers that lie together: of a model of E2B's kind layers 4 to 8 read cells of 2 and 3; an assistant
# reads those of the last layer of each kind.
JOINED = {"shared": 2, "assistant": len(tiny_gemma4.CASES["dense"][0].sliding) - 2}


def gemma4_files(folder: Path, name: str) -> tuple[Path, Path | None]:
    """Returns the files of a model, and of its assistant if it has one."""
    if name == "assistant":
        made, _ = files(folder, name)
        return made, folder / "assistant.gguf"
    config, seed = tiny_gemma4.CASES["per-layer"]
    return tiny_gemma4.write(folder / "model.gguf", config, tiny_gemma4.layout(config, seed)), None


@pytest.mark.parametrize("name", JOINED)
def test_auto_cuts_where_no_cells_pass(native: Library, device: str, name: str, tmp_path: Path) -> None:
    """By what is free each of two would have about half of the layers, and some would read the other's cells."""
    (model, assistant), two = gemma4_files(tmp_path, name), two_stages(device)
    with Files(model, assistant, two) as opened:
        chosen = opened.plan(Options(ctx=512, spec="mtp" if assistant else "off"))
    first, n = JOINED[name], len(tiny_gemma4.CASES["dense" if assistant else "per-layer"][0].sliding)
    assert 1 <= chosen.layers[0] <= first and sum(chosen.layers) == n


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("temp", ["0", "1"])
def test_gemma4_in_two_parts_writes_the_same_text(
    luce_: Callable[..., Any], device: str, name: str, temp: str, tmp_path: Path
) -> None:
    model, assistant = gemma4_files(tmp_path, name)
    words = ["generate", "Once upon a time", "--model", str(model), "-n", "40", "--ctx", "512", "--temp", temp]
    words += ["--mtp-gguf", str(assistant), "--mtp-gamma", "3"] if assistant else ["--spec", "off"]
    one, several = (luce_(*words, "--device", where) for where in (device.split(",")[0], two_stages(device)))
    assert (one.exit_code, several.exit_code) == (0, 0), several.stderr
    assert one.stdout == several.stdout and one.stdout


@pytest.mark.parametrize("name", JOINED)
def test_gpus_that_would_read_each_others_cells_are_refused(
    native: Library, device: str, name: str, tmp_path: Path
) -> None:
    (model, assistant), two = gemma4_files(tmp_path, name), two_stages(device)
    if two.startswith("cpu"):
        pytest.skip("a CPU reads all cells; tests/cuda/test_graphs.py has a GPU pretended")
    first, n = JOINED[name], n_layers((model, None), native)
    head: drive.Head = assistant or False
    with pytest.raises(UnsupportedError, match=f"layers {first} to {n - 1} lie on one GPU.* ahead of layer {first}"):
        drive.open_model(native, model, two, head=head, layers=(first + 1, n - first - 1))


def test_more_devices_than_parts_are_refused(native: Library, device: str, tmp_path: Path) -> None:
    two = two_stages(device)
    made, _ = files(tmp_path, "gemma4")
    with pytest.raises(ArgumentError, match="can be cut into 1 parts at most"), Files(made, device=two) as opened:
        opened.plan(Options(ctx=512))


def test_rows_pass_through_host_memory_where_devices_do_not_reach_each_other(
    native: Library, device: str, tmp_path: Path
) -> None:
    made, one = files(tmp_path, "dense"), device.split(",")[0]
    two, whole = two_stages(device), run(native, one, "dense", made)
    with op_run.parted_devices(native):
        found = run(native, two, "dense", made, (2, 2))
    assert held(one, found) == held(one, whole)


def test_a_saved_checkpoint_goes_on_in_another_split(native: Library, device: str, tmp_path: Path) -> None:
    made, prompt = files(tmp_path, "dense"), [7 + 3 * i % 200 for i in range(256)]
    two, logits, saved = two_stages(device), list[bytes](), b""
    for where, layers in ((device.split(",")[0], ()), (two, (1, 3)), (two, (3, 1))):
        model = drive.open_model(native, made[0], where, layers=layers)
        sequence = drive.open_sequence(model, n_ctx=1024, n_checkpoints=1)
        if saved:
            sequence.resume(sequence.engine.load_checkpoint(saved))
        else:
            drive.prefill(sequence, prompt)
            saved = bytes(sequence.checkpoint().save())
        logits.append(drive.step(sequence, 11).tobytes())
        sequence.engine.close()
        model.close()
    assert logits[0] == logits[1] == logits[2]


SAMPLED = ("--temp", "1", "--top-k", "40", "--seed", "5")


@pytest.mark.parametrize("asked", [("--spec", "off"), ("--mtp-gamma", "3", *SAMPLED), ("--spec", "auto", *SAMPLED)])
def test_a_split_model_writes_the_same_text(luce_: Callable[..., Any], device: str, asked: tuple[str, ...]) -> None:
    words = ("generate", "def is_even(n):\n", "-n", "40", "--ctx", "512", *asked)
    one, several = (luce_(*words, "--device", name) for name in (device.split(",")[0], two_stages(device)))
    assert (one.exit_code, several.exit_code) == (0, 0), several.stderr
    assert one.stdout == several.stdout and one.stdout
