"""Cuts a model into stages: each has its layers' caches, inputs and backend, and all that is computed, drafted and
saved has the bits that it has in one stage. A CPU is named several times; GPUs are those of --luce-device, each of
which has one stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import drive
import op_run
import pytest
import tiny_gemma4
from cut_models import MODELS, files, n_layers, run
from depth import deeper, deeper_but
from split import held, stages, two_stages

from luce.errors import ArgumentError, UnsupportedError
from luce.native import Library
from luce.planning.opened import Files
from luce.planning.plan import Options


@pytest.mark.parametrize("name", deeper_but(MODELS, "quantised"))
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
@pytest.mark.parametrize("temp", [*deeper("0"), "1"])
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


@pytest.mark.parametrize(
    "asked", [*deeper((("--spec", "off"),), (("--mtp-gamma", "3", *SAMPLED),)), ("--spec", "auto", *SAMPLED)]
)
def test_a_split_model_writes_the_same_text(luce_: Callable[..., Any], device: str, asked: tuple[str, ...]) -> None:
    words = ("generate", "def is_even(n):\n", "-n", "40", "--ctx", "512", *asked)
    one, several = (luce_(*words, "--device", name) for name in (device.split(",")[0], two_stages(device)))
    assert (one.exit_code, several.exit_code) == (0, 0), several.stderr
    assert one.stdout == several.stdout and one.stdout
