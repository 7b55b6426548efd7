"""Models that tests cut into stages, and all that one computes: logits, drafts, and what its sequences hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import drive
import op_run
import tiny
import tiny_dflash
import tiny_dflash2
import tiny_gemma4

from luce.convert.gemma4_layout import Config as Gemma4
from luce.files.probe import probe
from luce.native import File, Library, Prompt, Source

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
    "dflash2": (tiny_dflash2.CASES["dflash2"], "F32", {}),
    "dspark": (tiny_dflash2.CASES["dspark-reduced"], "F32", {}),
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
    return (tiny_dflash2 if isinstance(made, tiny_dflash2.More) else tiny_dflash).files(folder, made)


def n_layers(made: tuple[Path, Path | None], native: Library) -> int:
    """Returns how many layers the model's trunk has."""
    facts = probe(File(made[0], native))
    return (facts.block_count or 0) - facts.nextn_predict_layers


def run(
    native: Library,
    device: str,
    name: str,
    made: tuple[Path, Path | None],
    layers: Sequence[int] = (),
    draft_device: str | None = None,
) -> list[bytes]:
    """Returns all that a model computes: logits of a prompt, of a row, a tree and verified drafts, and what a sequence
    holds, and another one beside it; then the same again from a checkpoint, over scratch, pages and slots that are
    poisoned."""
    path, drafter = made
    head: drive.Head = drafter is None and not isinstance(MODELS[name][0], Gemma4)
    if name == "assistant":  # Its layers read cells of both stages.
        head = path.with_name("assistant.gguf")
    model = drive.open_model(
        native, path, device, head=head, drafter=drafter, layers=layers, draft_device=draft_device, **MODELS[name][2]
    )
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
