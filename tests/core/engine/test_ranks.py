"""Gives each of several devices a part of every matrix: sums over the parts are added in one order, so that all that is
computed is the same in every mode, and near what one device computes. A CPU is named several times; GPUs are those of
--luce-device."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import drive
import numpy as np
import op_run
import pytest
import tiny
import tiny_dflash
import tiny_gemma4
from cut_models import DENSE, MODELS, files, run
from depth import deeper, deeper_but
from split import ranks, two_ranks

from luce.errors import ArgumentError, UnsupportedError
from luce.native import Library
from luce.planning.opened import Files
from luce.planning.plan import Options

CUT = ("dense", "quantised", "mixture", "unshared", "dflash", "dflash2", "dspark")  # Of cut_models.
PROMPT = [7 + 3 * i % 200 for i in range(256)]
# F32 sums are added in another order, over logits whose standard deviation is about 2. An activation that is rounded to
# 8 bits may be rounded to the other side: such rounding puts one device's logits 0.23 off those of the same weights in
# F32, and two ranks' 0.27 (0.067 and 0.068 rms), so that the two have to be nearer to each other than that.
NEAR = {"F32": 2e-4, "Q8_0": 0.2}
NEAR_RMS = {"F32": 2e-4, "Q8_0": 0.05}  # 0.031 was found.


GEMMA4 = ("dense", "own-v", "same-heads", "experts", "experts-apart", "untied")  # Of tiny_gemma4.CASES.


def logits(native: Library, device: str, name: str, made: tuple[Path, Path | None]) -> np.ndarray:
    """Returns those of a prompt's end and of a tree's rows, {5, V}."""
    model = drive.open_model(native, made[0], device)
    sequence = drive.open_sequence(model, n_ctx=1024)
    drive.prefill(sequence, PROMPT)
    found = [sequence.logits(0)]
    drive.verify(sequence, [5, 9, 8, 6], [-1, 0, 0, 2])
    found += [sequence.logits(row) for row in range(4)]
    sequence.engine.close()
    model.close()
    return np.stack(found)


@pytest.mark.parametrize("name", deeper_but(CUT, "dspark", "dflash2"))
def test_logits_are_near_those_of_one_device(native: Library, device: str, name: str, tmp_path: Path) -> None:
    made, two = files(tmp_path, name), two_ranks(device)
    kind = MODELS[name][1]
    one = logits(native, ranks(device, 1), name, made)
    several = logits(native, two, name, made)
    near = NEAR[kind] if device.startswith("cpu") else drive.CUDA_BOUND
    assert np.abs(several - one).max() < near
    assert not device.startswith("cpu") or np.sqrt(((several - one) ** 2).mean()) < NEAR_RMS[kind]
    assert one.std() > 1 and not np.array_equal(one, several)


@pytest.mark.parametrize("name", deeper_but(GEMMA4, "dense", "experts"))
def test_gemma4s_logits_are_near_those_of_one_device(native: Library, device: str, name: str, tmp_path: Path) -> None:
    config, seed = tiny_gemma4.CASES[name]
    made = tiny_gemma4.write(tmp_path / "model.gguf", config, tiny_gemma4.layout(config, seed)), None
    one = logits(native, ranks(device, 1), "dense", made)
    several = logits(native, two_ranks(device), "dense", made)
    assert np.abs(several - one).max() < (NEAR["F32"] if device.startswith("cpu") else drive.CUDA_BOUND)
    assert one.std() > 1 and not np.array_equal(one, several)


@pytest.mark.parametrize("name", deeper_but(GEMMA4, "own-v", "experts"))
def test_gemma4s_rows_have_the_same_bits_at_any_width(
    native: Library, device: str, name: str, tmp_path: Path
) -> None:
    config, seed = tiny_gemma4.CASES[name]
    path = tiny_gemma4.write(tmp_path / "model.gguf", config, tiny_gemma4.layout(config, seed))
    sequence = drive.open_sequence(drive.open_model(native, path, two_ranks(device)), n_ctx=512)
    drive.prefill(sequence, PROMPT[:40])
    tokens = [5, 9, 8, 6, 77, 3, 12, 200, 41]
    alone = [drive.step(sequence, token).tobytes() for token in tokens]
    sequence.reset()
    drive.prefill(sequence, PROMPT[:40])
    drive.verify(sequence, tokens)
    assert [sequence.logits(row).tobytes() for row in range(len(tokens))] == alone


def test_what_one_device_has_of_a_part_is_what_all_have_of_it(native: Library, device: str, tmp_path: Path) -> None:
    """Three ranks of a model that divides by three, and four of which two have each KV head."""
    three = replace(DENSE, n_head=6, n_head_kv=3, n_k_head=3, n_v_head=6, n_ff=384, head_dim=64)
    four = replace(DENSE, n_head=4, n_head_kv=2, n_k_head=4, n_v_head=8, n_ff=512, head_dim=64)
    for n, config in ((3, three), (4, four)):
        if (several := ranks(device, n)) is None:
            pytest.skip("there are too few GPUs")
        path = tiny.write(tmp_path / f"{n}.gguf", config, tiny.layout(config, 5))
        one = logits(native, ranks(device, 1), "dense", (path, None))
        found = logits(native, several, "dense", (path, None))
        assert np.abs(found - one).max() < (NEAR["F32"] if device.startswith("cpu") else drive.CUDA_BOUND)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "tied"])
@pytest.mark.parametrize("n", deeper_but([2, 3], 2))
def test_ranks_that_share_the_output_make_the_logits_of_one_that_has_it(
    native: Library, device: str, kind: str, n: int, tmp_path: Path
) -> None:
    """Of 600 rows, the last rank has as many tiles as others, or less. What drafts apart makes all logits there; with a
    drafter beside the layers the last rank has all rows, and multiplies with its part of them."""
    if (apart := ranks(device, n + 1)) is None:
        pytest.skip("there are too few GPUs")
    several, _, other = apart.rpartition("+")
    heads = {2: DENSE, 3: replace(DENSE, n_head=6, n_head_kv=3, n_k_head=3, n_v_head=6, n_ff=384, head_dim=64)}
    config = replace(heads[n], n_vocab=600, tied=kind == "tied")
    path = tiny.write(tmp_path / "model.gguf", config, tiny.layout(config, 5), "F32" if kind == "tied" else kind)
    found = []
    for head, draft_device in ((False, None), (True, None), (True, other)):
        model = drive.open_model(native, path, several, head=head, draft_device=draft_device)
        sequence = drive.open_sequence(model, n_ctx=1024, n_rows=9, **({"n_draft": 3} if head else {}))
        drive.prefill(sequence, PROMPT)
        rows = [sequence.logits(0)]
        drive.verify(sequence, [5, 9, 8, 6, 77, 3, 12, 200, 41], [-1, 0, 0, 2, 3, 4, 5, 6, 7])
        rows += [sequence.logits(row) for row in range(9)]
        found.append(np.stack(rows))
        assert found[-1].shape == (10, 600) and np.isfinite(found[-1]).all() and found[-1].std() > 1
        sequence.engine.close()
        model.close()
    assert found[0].tobytes() == found[1].tobytes()
    if device.startswith("cpu"):  # A GPU cuts K by how many rows a matrix has.
        assert found[0].tobytes() == found[2].tobytes()


@pytest.mark.parametrize("name", deeper_but(CUT, "quantised", "dflash", "dspark"))
def test_a_checkpoint_and_company_change_no_bit(native: Library, device: str, name: str, tmp_path: Path) -> None:
    """All that a model computes, twice: the second time from a checkpoint, over poisoned memory."""
    found = run(native, two_ranks(device), name, files(tmp_path, name))
    n = (len(found) - 1) // 2
    assert found[1 : 1 + n] == found[1 + n :] and len(set(found)) >= 7


@pytest.mark.parametrize("name", ["dense", "dflash"])
def test_what_drafts_apart_has_the_same_bits(native: Library, device: str, name: str, tmp_path: Path) -> None:
    if (three := ranks(device, 3)) is None:
        pytest.skip("there are too few GPUs")
    made = files(tmp_path, name)
    two, _, apart = three.rpartition("+")
    assert run(native, two, name, made, draft_device=apart) == run(native, two, name, made)


def test_parts_pass_through_host_memory_where_devices_do_not_reach_each_other(
    native: Library, device: str, tmp_path: Path
) -> None:
    made, two = files(tmp_path, "dense"), two_ranks(device)
    whole = run(native, two, "dense", made)
    with op_run.parted_devices(native):
        assert run(native, two, "dense", made) == whole


def test_two_engines_on_the_same_devices_take_turns(native: Library, device: str, tmp_path: Path) -> None:
    (path, _), two = files(tmp_path, "dense"), two_ranks(device)
    model = drive.open_model(native, path, two)
    sequences = [drive.open_sequence(model, n_ctx=512) for _ in range(2)]
    expected = drive.decode(sequences[0], PROMPT[:70], 24).tokens
    with ThreadPoolExecutor(2) as pool:
        twice = pool.map(lambda each: [drive.decode(each, PROMPT[:70], 24).tokens for _ in range(2)], sequences)
        assert list(twice) == [[expected] * 2] * 2


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path | None]:
    return tiny_dflash.files(tmp_path_factory.mktemp("models"), tiny_dflash.CASES["causal-windows"])


@pytest.mark.parametrize("temp", ["1", *deeper("0")])
def test_all_modes_have_the_same_tokens(
    luce_: Callable[..., Any], device: str, drafted: tuple[Path, Path | None], temp: str, tmp_path: Path
) -> None:
    made, _ = files(tmp_path, "dense")
    words = ["generate", "Once upon a time", "-n", "40", "--ctx", "512", "--temp", temp, "--json"]
    words += ["--seed", "3"] if temp != "0" else []
    words += ["--device", two_ranks(device).replace("+", ","), "--split", "tensor", "--model"]
    path, drafter = drafted
    for model, modes in (
        (made, (["--mtp-gamma", "3"], ["--spec", "lookup"], ["--spec", "auto"])),
        (path, (["--draft", str(drafter)], ["--draft", str(drafter), "--tree-budget", "8"])),
    ):
        texts = []
        for mode in (["--spec", "off"], *modes):
            done = luce_(*words, str(model), *mode)
            assert done.exit_code == 0, done.stderr
            texts.append(json.loads(done.stdout)["text"])
        assert len(texts[0]) > 10 and texts == [texts[0]] * len(texts)


# ---- what is refused


def test_a_checkpoint_of_another_split_is_refused(native: Library, device: str, tmp_path: Path) -> None:
    (path, _), two = files(tmp_path, "dense"), two_ranks(device)
    saved = {}
    for where in (two, ranks(device, 1)):
        sequence = drive.open_sequence(drive.open_model(native, path, where), n_ctx=512, n_checkpoints=1)
        drive.prefill(sequence, PROMPT, last=False)
        saved[where] = sequence, bytes(sequence.checkpoint().save())
    for where, other in ((two, ranks(device, 1)), (ranks(device, 1), two)):
        with pytest.raises(ArgumentError, match=r"the checkpoint was computed on .*, this engine is on"):
            saved[where][0].engine.load_checkpoint(saved[other][1])
    sequence, own = saved[two]
    sequence.engine.load_checkpoint(own)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(DENSE, n_head=6, n_head_kv=3), "3 KV heads, of which 2 devices cannot have equal parts"),
        (replace(DENSE, n_k_head=1), "1 key heads of DeltaNet, of which 2 devices cannot have equal parts"),
        (replace(DENSE, n_ff=257), "257 values between the products of a feed-forward layer"),
    ],
)  # fmt: skip
def test_what_has_no_equal_parts_is_named(
    native: Library, device: str, config: tiny.Config, said: str, tmp_path: Path
) -> None:
    path = tiny.write(tmp_path / "model.gguf", config, tiny.layout(config, 5))
    with pytest.raises(UnsupportedError, match=f"{said}.*: give each device layers of its own"):
        drive.open_model(native, path, two_ranks(device))


def test_blocks_that_no_cut_goes_through_are_named(native: Library, device: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "model.gguf", DENSE, tiny.layout(DENSE, 5), "Q4_K")
    said = r"tensor blk.\d.* lies in blocks of 256 values along 256, of which 2 devices"
    with pytest.raises(UnsupportedError, match=said):
        drive.open_model(native, path, two_ranks(device))


@pytest.mark.parametrize(
    ("name", "said"),
    [("gemma4", "has embeddings of each layer: luce does not share matrices of such models out"),
     ("assistant", "an assistant reads cells of the model's layers, of which each of several devices")],
)  # fmt: skip
def test_what_is_not_cut_so_yet_is_named(
    native: Library, device: str, name: str, said: str, tmp_path: Path
) -> None:
    made, _ = files(tmp_path, name)
    head = tmp_path / "assistant.gguf" if name == "assistant" else None
    with pytest.raises(UnsupportedError, match=f"{said}.*: give each device layers of its own"):
        drive.open_model(native, made, two_ranks(device), head=head)


def test_the_command_line_says_what_helps(luce_: Callable[..., Any], device: str, tmp_path: Path) -> None:
    made = tiny.write(tmp_path / "model.gguf", DENSE, tiny.layout(DENSE, 5), "Q4_K")
    devices = two_ranks(device).replace("+", ",")
    done = luce_("generate", "x", "--model", str(made), "--device", devices, "--split", "tensor")
    assert done.exit_code == 1
    assert done.stderr.strip().endswith("give each device layers of its own; --split auto does")


def test_lists_of_devices_are_of_one_kind(native: Library, tmp_path: Path) -> None:
    made, _ = files(tmp_path, "dense")
    with pytest.raises(ArgumentError, match=r"cpu\+cpu,cpu: a model's devices have layers each"):
        drive.open_model(native, made, "cpu+cpu,cpu")
    with pytest.raises(ArgumentError, match="a part of each matrix on 9 devices: at most 8 have one"):
        drive.open_model(native, made, "+".join(["cpu"] * 9))
    with pytest.raises(ArgumentError, match="was to have a part of each matrix on 2 devices, and numbers of layers"):
        drive.open_model(native, made, "cpu+cpu", layers=(2, 2))


# ---- what is said


def test_probe_says_what_each_device_has(luce_: Callable[..., Any], native: Library, tmp_path: Path) -> None:
    config = replace(DENSE, n_head=4, n_head_kv=2, n_vocab=512)
    made = tiny.write(tmp_path / "model.gguf", config, tiny.layout(config, 5))
    done = luce_("probe-gguf", made, "--ctx", "512", "--device", "cpu,cpu", "--split", "tensor")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("cpu has room for a part of each of 4 layers") == 4
    with Files(made, device="cpu,cpu") as opened:
        plan = opened.plan(Options(ctx=512, split="tensor", spec="off"))
        assert plan.device == "cpu+cpu" and plan.layers == ()
        assert plan.reasons["layers"] == "each device has an equal part of every layer, as asked"
        first, last = opened.memory(plan).devices
    with Files(made, device="cpu") as opened:
        (one,) = opened.memory(opened.plan(Options(ctx=512, spec="off"))).devices
    assert first.kv == last.kv == one.kv // 2
    assert one.weights // 3 < first.weights < one.weights and first.weights == last.weights
    with Files(made, device="cpu,cpu") as opened:  # A head drafts with all of the output.
        first, last = opened.memory(opened.plan(Options(ctx=512, split="tensor", spec="mtp"))).devices
    assert first.weights < last.weights - 2 * config.n_embd * config.n_vocab
