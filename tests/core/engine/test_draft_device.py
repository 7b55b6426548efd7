"""What drafts on a device of its own, which has no layers of the model: it gets rows of the stages before it, its
drafts are those of one device, and so are all bits and tokens. A CPU is named once more for it; of GPUs the last of
--luce-device drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import box_model
import drive
import op_run
import pytest
from cut_models import files, n_layers, run
from depth import deeper, deeper_but
from split import drafts_apart, held, stages

from luce.errors import ArgumentError, OutOfMemory, UnsupportedError
from luce.native import Library, Source
from luce.planning.memory import fits
from luce.planning.opened import Files
from luce.planning.plan import Options

MIB = 1 << 20
APART = ("dense", "quantised", "mixture", "gemma4", "dflash", "dflash2", "dspark")  # Of cut_models.
PROMPT = [7 + 3 * i % 200 for i in range(256)]


@pytest.mark.parametrize("name", deeper_but(APART, "dspark"))
def test_what_drafts_apart_has_the_bits_of_one_device(native: Library, device: str, name: str, tmp_path: Path) -> None:
    made, one = files(tmp_path, name), device.split(",")[0]
    whole = held(one, run(native, one, name, made))
    where, drafts = drafts_apart(device)
    assert held(one, run(native, where, name, made, draft_device=drafts)) == whole
    if stages(device, 3) and (one == "cpu" or name != "gemma4"):
        where, drafts = drafts_apart(device, 2)
        n = n_layers(made, native)
        assert held(one, run(native, where, name, made, (1, n - 1), drafts)) == whole, "behind two stages"


def test_its_rows_pass_through_host_memory_where_devices_do_not_reach_each_other(
    native: Library, device: str, tmp_path: Path
) -> None:
    made, one = files(tmp_path, "dflash"), device.split(",")[0]
    whole, (where, drafts) = run(native, one, "dflash", made), drafts_apart(device)
    with op_run.parted_devices(native):
        found = run(native, where, "dflash", made, draft_device=drafts)
    assert held(one, found) == held(one, whole)


def test_chunks_of_a_prompt_follow_each_other_to_it(native: Library, device: str, tmp_path: Path) -> None:
    """On a CPU its stage has a thread here, which sleeps: a wait that is missing shows in the bits."""
    (path, drafter), one = files(tmp_path, "dflash"), device.split(",")[0]
    if one != "cpu":
        pytest.skip("a GPU's stage has a stream, and test_prompt_pipeline.py what overlaps there")

    def read(drafts: str | None) -> list[bytes]:
        model = drive.open_model(native, path, one, drafter=drafter, draft_device=drafts)
        sequence = drive.open_sequence(model, n_ctx=1024, n_chunk=256, n_rows=16, blocks=1)
        for at in range(0, 512, 64):
            sequence.prefill(PROMPT[:64] if at % 128 else PROMPT[64:128], at == 448)
        found = [sequence.logits(0).tobytes(), repr(drive.draft(sequence, 5, 3, Source.DFLASH)).encode()]
        drive.verify_draft(sequence, 3)
        return [*found, sequence.logits(3).tobytes()]

    whole = read(None)
    for slow in range(2):
        with op_run.threads_of_stages(native, slow):
            assert read(one) == whole, f"stage {slow} is slow"


def test_a_saved_checkpoint_goes_on_where_drafts_are_made_elsewhere(
    native: Library, device: str, tmp_path: Path
) -> None:
    (path, drafter), (where, drafts) = files(tmp_path, "dflash"), drafts_apart(device)
    found, saved = list[bytes](), b""
    for on in (None, drafts, None):
        model = drive.open_model(native, path, where, drafter=drafter, draft_device=on)
        sequence = drive.open_sequence(model, n_ctx=1024, n_checkpoints=1, n_rows=16, blocks=1)
        if saved:
            sequence.resume(sequence.engine.load_checkpoint(saved))
        else:
            drive.prefill(sequence, PROMPT)
        saved = bytes(sequence.checkpoint().save())
        found.append(repr(drive.draft(sequence, 5, 3, Source.DFLASH)).encode())
        drive.verify_draft(sequence, 3)
        found[-1] += sequence.logits(3).tobytes()
        sequence.engine.close()
        model.close()
    assert found[0] == found[1] == found[2]


COUNTED = ("rounds", "drafted", "accepted", "accepted_by_position", "by_source")
SAMPLED = ("--temp", "1", "--top-k", "40", "--seed", "5")


@pytest.mark.parametrize(
    "asked",
    [*deeper((("--spec", "dflash"),), (("--spec", "dflash", "--tree-budget", "12", *SAMPLED),),
             (("--mtp-gamma", "3", *SAMPLED),)),
     ("--spec", "auto", *SAMPLED)],
)  # fmt: skip
def test_the_same_text_is_written(luce_: Callable[..., Any], device: str, asked: tuple[str, ...]) -> None:
    words = ("generate", "def is_even(n):\n", "-n", "40", "--ctx", "512", *asked, "--json")
    where, drafts = drafts_apart(device)
    one = luce_(*words, "--device", where)
    other = luce_(*words, "--device", where, "--draft-device", drafts)
    assert (one.exit_code, other.exit_code) == (0, 0), other.stderr
    told, same = json.loads(one.stdout), json.loads(other.stdout)
    assert told["tokens"] and told["tokens"] == same["tokens"]
    if "auto" not in asked:  # That goes by what steps took.
        assert [told["stats"][name] for name in COUNTED] == [same["stats"][name] for name in COUNTED]


def test_an_assistant_stays_with_the_layers_whose_cells_it_reads(
    luce_: Callable[..., Any], native: Library, device: str, tmp_path: Path
) -> None:
    made, _ = files(tmp_path, "assistant")
    where, drafts = drafts_apart(device)
    with pytest.raises(UnsupportedError, match=f"reads cells of the model's layers.*{drafts}"):
        drive.open_model(native, made, where, head=tmp_path / "assistant.gguf", draft_device=drafts)
    words = ("generate", "x", "--model", made, "--draft", tmp_path / "assistant.gguf", "--device", where)
    said = luce_(*words, "--draft-device", drafts)
    assert said.exit_code == 1 and "leave --draft-device out" in said.stderr


def test_a_device_for_drafts_wants_a_drafter(luce_: Callable[..., Any], device: str, tmp_path: Path) -> None:
    made, _ = files(tmp_path, "gemma4")
    where, drafts = drafts_apart(device)
    said = luce_("generate", "x", "--model", made, "--device", where, "--draft-device", drafts)
    assert said.exit_code == 1 and "there is none; leave --draft-device out" in said.stderr


def test_it_is_of_the_kind_of_the_others(native: Library, device: str) -> None:
    other, said = ("cuda:0", "cuda:0") if device.startswith("cpu") else ("cpu", "are of two kinds")
    with pytest.raises(ArgumentError, match=said):
        drive.open_model(native, box_model.GGUF, device, head=True, draft_device=other)


# ---- memory, on pretended devices

LAYERS, DRAFTS = "fake:0,fake:1", "fake:2"


def test_memory_is_counted_where_it_lies(native: Library) -> None:
    """What drafts, its KV and the output count on its device alone; layers are shared out by what the others have."""
    free = {"fake:0": 200 * MIB, "fake:1": 200 * MIB, "fake:2": 100 * MIB}
    with op_run.pretended_devices(native, free):
        found = {}
        for drafts in (None, DRAFTS):
            with Files(box_model.GGUF, None, LAYERS, box_model.DRAFTER, drafts) as files:
                chosen = files.plan(Options(ctx=2048, spec="dflash"))
                found[drafts] = chosen, files.memory(chosen).devices
    (_, (first, last)), (chosen, (one, two, own)) = found[None], found[DRAFTS]
    assert len(chosen.layers) == 2 and sum(chosen.layers) == first.n_layers + last.n_layers
    assert two.n_layers > last.n_layers, "it has no output and no drafter now"
    assert own.name == "fake:2" and own.n_layers == 0 and own.kv > 0
    assert one.kv + two.kv + own.kv == first.kv + last.kv
    drafter = box_model.DRAFTER.stat().st_size
    assert own.weights > 0.9 * drafter
    assert one.weights + two.weights + own.weights >= first.weights + last.weights


@pytest.mark.long
def test_a_device_that_lacks_memory_for_drafts_is_named(native: Library) -> None:
    free = {"fake:0": 200 * MIB, "fake:2": MIB}
    options = Options(ctx=512, spec="dflash")
    with (
        op_run.pretended_devices(native, free),
        Files(box_model.GGUF, None, "fake:0", box_model.DRAFTER, DRAFTS) as files,
    ):
        chosen = files.plan(options)
        with pytest.raises(OutOfMemory, match=r"^fake:2 lacks [\d,]+ bytes: the output, the drafters and what"):
            files.load([chosen])
        ways = {way.mode: way for way in fits(files, Options(ctx=512))}
    assert ways["plain"].fits and len(ways["plain"].memory.devices) == 1
    way = ways["dflash"]
    assert not way.fits and [each.parts <= each.free for each in way.memory.devices] == [True, False]


def test_probe_says_what_lies_on_it(luce_: Callable[..., Any]) -> None:
    words = ("probe-gguf", box_model.GGUF, "--draft", box_model.DRAFTER, "--device", "cpu", "--draft-device", "cpu")
    said = luce_(*words)
    assert said.exit_code == 0, said.stderr
    assert said.stdout.count("cpu has room for the output and the drafters: ") == 2  # With the head, and with blocks.
