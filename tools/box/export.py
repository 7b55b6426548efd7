"""Stages export and plot: checkpoint folders in the layout of published models, and the curves."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from box import tokens
from box.dflash import Drafter
from box.model import Config
from box.store import Store, say


def export(store: Store, config: Config, drafters: Sequence[Drafter], folder: Path) -> list[Path]:
    """Writes folder/box (trunk and NextN head, tokenizer, template) and folder/box-KIND of each drafter that
    was trained. Tensors are those of the checkpoints: matrices are F16, the rest F32."""
    written = []
    trunk = folder / "box"
    trunk.mkdir(parents=True, exist_ok=True)
    state = load_file(store.state / "trunk.safetensors")
    shared = config.hf(tokens.special_id(tokens.END_TURN))
    if (store.state / "nextn.safetensors").exists():
        head = load_file(store.state / "nextn.safetensors")
        state |= {f"mtp.{name}": value for name, value in head.items()}
    else:
        shared["mtp_num_hidden_layers"] = 0
    save_file(state, trunk / "model.safetensors", metadata={"format": "pt"})
    tokens.write_json(trunk / "config.json", shared)
    tokens.write_json(trunk / "tokenizer_config.json", tokens.tokenizer_config())
    shutil.copy(store.state / "tokenizer.json", trunk / "tokenizer.json")
    written.append(trunk)
    for drafter in drafters:
        if (store.state / f"{drafter.kind}.safetensors").exists():
            draft = folder / f"box-{drafter.kind}"
            draft.mkdir(parents=True, exist_ok=True)
            shutil.copy(store.state / f"{drafter.kind}.safetensors", draft / "model.safetensors")
            tokens.write_json(draft / "config.json", drafter.hf())
            written.append(draft)
    for path in written:
        size = sum(file.stat().st_size for file in path.iterdir())
        say(f"wrote {path.name}: {size / 1e6:.1f} MB")
    return written


def plot(store: Store) -> None:
    """Draws state/box-loss.png and state/box-acceptance.png from the reports."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    trunk = store.report("trunk")
    if trunk:
        axes[0].plot(*_columns(trunk["curve"], 1e6), lw=0.6, color="0.7", label="training")
        axes[0].plot(*_columns(trunk["held_out"], 1e6), "o-", ms=3, label="held-out files")
        losses = [loss for _, loss in trunk["held_out"]]
        axes[0].set(title="trunk", xlabel="million tokens", ylabel="loss (nats a token)",
                    ylim=(min(losses) * 0.8, min(losses) + 1.5))  # fmt: skip
        axes[0].legend()
    for axis, name, title in ((axes[1], "nextn", "NextN head"), (axes[2], "dflash", "DFlash drafter")):
        report = store.report(name)
        if report:
            axis.plot(*_columns(report["curve"], 1.0), lw=0.8)
            axis.set(title=title, xlabel="steps", ylabel="loss")
    figure.savefig(store.state / "box-loss.png", dpi=90)
    plt.close(figure)

    figure, axis = plt.subplots(figsize=(6, 3.6), constrained_layout=True)
    for name, title in (("nextn", "NextN head"), ("dflash", "DFlash drafter")):
        report = store.report(name)
        if report:
            rates = report["evaluation"]["acceptance_by_position"]
            axis.plot(range(1, len(rates) + 1), rates, "o-", ms=3, label=title)
    axis.set(xlabel="draft position", ylabel="accepted, given all before were", ylim=(0, 1))
    axis.set_title("greedy acceptance on held-out prompts")
    axis.legend()
    figure.savefig(store.state / "box-acceptance.png", dpi=90)
    plt.close(figure)
    say("plotted")


def _columns(pairs: list[list[float]], unit: float) -> tuple[list[float], list[float]]:
    return [x / unit for x, _ in pairs], [y for _, y in pairs]
