#!/usr/bin/env python3
"""Makes the model in the box, stage by stage; each stage is one resumable command.

    weights the committed luce/data/*.gguf as checkpoints, instead of training them
    data    Python of this machine -> tokenizer, token streams           (work/corpus)
    trunk   next-token training; --final in its last call
    pool    the trunk's own continuations, for all drafters              (work/pool)
    nextn   the NextN head            dflash  the DFlash drafter
    dflash2 the DFlash2 drafter       dspark  the DSpark drafter; both begin as the DFlash drafter
    plot    curves to PNG             export  published-style folders    card  luce/data/CARD.md

Several stages may be named, in order: `--stage pool nextn dflash --until 100 270 560`; --until says when
each has to end, in seconds since the command began.
--out gets everything needed to go on elsewhere, as parts below 16 MiB, at every save; --parts takes them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

BEGAN = time.monotonic()  # It is taken before the imports that take long.
ROOT = Path(__file__).resolve().parent.parent
sys.path.extend([str(ROOT), str(ROOT.parent)])  # The box's modules, and luce's where it is not installed.
STAGES = ("weights", "data", "trunk", "pool", "nextn", "dflash", "dflash2", "dspark", "plot", "export", "card")

DRAFTERS = ("dflash", "dflash2", "dspark")


def read_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--stage", nargs="+", choices=STAGES, required=True)
    parser.add_argument("--until", nargs="+", type=float, default=[560.0], help="one for each stage, or one")
    parser.add_argument("--final", action="store_true", help="trunk: this call decays the rate to zero")
    parser.add_argument("--work", type=Path, default=Path(".box"))
    parser.add_argument("--parts", type=Path, help="where returned parts lie (default: WORK/parts)")
    parser.add_argument("--out", type=Path, help="where parts to be returned go")
    parser.add_argument("--card", type=Path, default=ROOT.parent / "luce" / "data", help="weights, card: the folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=0, help="data: read about so many files (default: all)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--smoke", action="store_true", help="real shapes, a handful of steps")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, for a CPU")
    arguments = parser.parse_args(argv)
    if len(arguments.until) not in (1, len(arguments.stage)):
        parser.error("--until takes one number, or one for each stage")
    return arguments


if __name__ == "__main__":
    read_arguments()  # --help needs no torch.

from box import conditional, corpus, dflash, export, generate, nextn, store, tokens, trunk  # noqa: E402
from box.card import write_card  # noqa: E402
from box.model import Config  # noqa: E402
from box.store import Store, say  # noqa: E402


class Sizes:
    """These are settings of every stage. smoke: the real shapes, a handful of steps. toy: for a CPU in
    seconds."""

    def __init__(self, smoke: bool = False, toy: bool = False):
        self.config, self.drafter, self.terms = Config(), dflash.Sizes(), conditional.Terms()
        self.trunk, self.nextn, self.dflash = trunk.Settings(), nextn.Settings(), dflash.Settings()
        self.pool, self.file_limit = generate.Pool(), 0
        if smoke:
            self.file_limit = 3000
            self.trunk = trunk.Settings(held_out_windows=8, max_steps=20)
            self.pool = generate.Pool(batch=128, batches=3, held_out=16, held_out_count=64, compile=False)
            # Both run eagerly, since compiling takes a minute for each.
            self.nextn = nextn.Settings(max_steps=4, compile=False)
            self.dflash = dflash.Settings(max_steps=4, compile=False)
        if toy:
            self.file_limit = 200
            self.config = Config(n_embd=64, n_ff=128, n_layer=6, interval=2, n_head=2, n_head_kv=1,
                                 n_k_head=1, n_v_head=2, state_size=16)  # fmt: skip
            self.drafter, self.terms = dflash.Sizes(n_layer=2, n_ff=64), conditional.Terms(rank=8, top_k=5)
            self.trunk = trunk.Settings(4, 128, held_out_windows=4, max_steps=20, reserve=0, compile=False)
            self.pool = generate.Pool(length=256, prompts=(64, 128), batch=8, batches=2, held_out=4,
                                      held_out_count=64, compile=False)  # fmt: skip
            self.nextn = nextn.Settings(batch=4, max_steps=4, reserve=0, compile=False)
            self.dflash = dflash.Settings(batch=4, anchors=4, max_steps=4, reserve=0, compile=False)


def data(place: Store, limit: int, workers: int, seed: int) -> None:
    """Makes work/corpus and state/tokenizer.json. A tokenizer that is there already is kept."""
    training, held_out, facts = corpus.collect(workers, limit)
    say(f"{len(training)} training files, {facts['training_bytes']} bytes")
    path = place.state / "tokenizer.json"
    if not path.exists():
        tokens.train_tokenizer(tokens.sample_texts(training)).save(str(path))
        say("tokenizer trained")
    tokenizer = tokens.load_tokenizer(path)
    folder = place.work / "corpus"
    ids, starts, counts = tokens.encode_documents(tokenizer, training, seed)
    tokens.save_tokens(folder, "train", ids, starts)
    held, held_starts, _ = tokens.encode_documents(tokenizer, held_out, seed, extras=False)
    tokens.save_tokens(folder, "held-out", held, held_starts)
    facts |= {"training_tokens": len(ids), "held_out_tokens": len(held), **counts}
    place.write_report("data", facts)
    place.publish()
    say(f"{len(ids) / 1e6:.1f}M training tokens, {len(held) / 1e6:.2f}M held out, {counts}")


def drafter_of(kind: str, sizes: Sizes) -> tuple[dflash.Drafter, dflash.LossOf]:
    """Returns a fresh drafter of a kind, and its loss."""
    if kind == dflash.Drafter.kind:
        return dflash.Drafter(sizes.config, sizes.drafter), dflash.block_loss
    made = {"dflash2": conditional.DFlash2, "dspark": conditional.DSpark}[kind]
    return made(sizes.config, sizes.drafter, sizes.terms), conditional.block_loss


def run(stage: str, place: Store, sizes: Sizes, until: float, arguments: argparse.Namespace) -> None:
    """Runs one stage, which is ended `until` seconds after the command began."""
    seed = arguments.seed
    if stage == "weights":
        from box import from_gguf  # It needs gguf, and no other stage does.

        from_gguf.write(place, sizes.config, arguments.card)
    elif stage == "data":
        data(place, arguments.files or sizes.file_limit, arguments.workers, seed)
    elif stage == "trunk":
        trunk.train(place, sizes.config, sizes.trunk, until, arguments.final, seed)
    elif stage == "pool":
        device = store.prepare_torch(seed)
        model = trunk.load_trunk(place, sizes.config, device, sizes.pool.compile)
        generate.build_pool(place, model, sizes.pool, until, seed, device)
    elif stage == "nextn":
        nextn.train(place, sizes.config, sizes.nextn, until, seed)
    elif stage in DRAFTERS:
        device = store.prepare_torch(seed)
        dflash.train(place, *drafter_of(stage, sizes), sizes.dflash, until, seed, device)
    elif stage == "plot":
        export.plot(place)
        place.publish()
    elif stage == "export":
        drafters = [drafter_of(kind, sizes)[0] for kind in DRAFTERS]
        export.export(place, sizes.config, drafters, place.work / "export")
    elif stage == "card":
        write_card(place, arguments.card)


def main(argv: list[str] | None = None) -> int:
    arguments = read_arguments(argv)
    ends = arguments.until * (len(arguments.stage) // len(arguments.until))
    store.STARTED = BEGAN
    place = Store(arguments.work, arguments.out, arguments.parts or arguments.work / "parts")
    sizes = Sizes(arguments.smoke, arguments.toy)
    for stage, until in zip(arguments.stage, ends, strict=True):
        say(f"stage {stage}")
        run(stage, place, sizes, until, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
