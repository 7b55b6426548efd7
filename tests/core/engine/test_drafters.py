"""An engine's drafters are a list: any order, the same kind twice, and none that another one stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import drive
import numpy as np
import pytest
import tiny
import tiny_dflash
from tiny_dflash import CASES

from luce.errors import ArgumentError, StateError
from luce.native import CHOSEN, Drafts, Engine, File, Library, Model, Rows, Source
from luce.native import Sequence as Timeline
from luce.native.structs import DrafterParams, EngineParams


class Files(NamedTuple):
    """A target with a NextN head, a head of other weights, and two DFlash drafters of other weights and blocks."""

    target: Path
    head: Path
    blocks: tuple[Path, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("drafters")
    case = CASES["causal-windows"]
    config = replace(case.target, n_nextn=1)
    case = replace(case, target=config)
    target, one = tiny_dflash.files(folder, case)
    head = tiny.write(folder / "head.gguf", config, tiny.layout(config, case.seed + 1))
    other = replace(case, drafter=replace(case.drafter, block_size=5), seed=case.seed + 2)
    return Files(target, head, (one, tiny_dflash.write(folder / "other.gguf", other, tiny_dflash.weights(other))))


# The model's list, in an order of its own: a block of 5, the file's own head, a block of 8, another head.
BLOCK_5, OWN_HEAD, BLOCK_8, OTHER_HEAD = range(4)
KINDS = ["dflash", "nextn", "dflash", "nextn"]
# The engine's: two uses of one head, the other one between blocks.
USES = (
    DrafterParams(BLOCK_8),
    DrafterParams(OWN_HEAD, 3, 128),
    DrafterParams(OTHER_HEAD, 5),
    DrafterParams(BLOCK_5),
    DrafterParams(OWN_HEAD, 2),
)
MOST = [7, 3, 5, 4, 2]
SIZES = {"n_ctx": 512, "n_rows": 12, "n_threads": 1, "kv_type": "f32", "n_chunk": 256}


@pytest.fixture(scope="module")
def model(native: Library, files: Files, device: str) -> Model:
    file = File(files.target, native)
    others = [File(path, native) for path in (*files.blocks, files.head)]
    return Model(file, device, drafters=[(others[1], "dflash"), (file, "nextn"), (others[0], None), (others[2], None)])


def engine_of(model: Model, uses: Sequence[DrafterParams], **more: int) -> Engine:
    return Engine(model, EngineParams(**SIZES | more, drafters=tuple(uses)))  # type: ignore[arg-type]


def tokens_of(n: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, n)]


def drafts_of(sequence: Timeline, index: int, anchor: int, n: int) -> list[int]:
    sequence.engine.draft([Drafts(sequence, anchor, n, index)])
    return sequence.drafted(n)


def test_lists_say_what_their_drafters_are(model: Model) -> None:
    engine = engine_of(model, USES)
    assert [each.kind for each in model.info.drafters] == KINDS
    assert [each.drafter for each in engine.drafters] == [each.drafter for each in USES]
    assert [each.n_draft for each in engine.drafters] == MOST
    assert [each.n_part for each in engine.drafters] == [0, 128, 0, 0, 0]
    assert [each.n_block for each in engine.drafters] == [8, 0, 0, 5, 0]
    assert [each.form for each in engine.drafters] == [1, 0, 0, 1, 0], "a block's lists are independent, a head chains"
    assert all(each.has_kv for each in engine.drafters)
    costs = engine.library.ffi.new("luce_cost[]", 256)
    n = engine.library.ffi.new("uint32_t *", 256)
    engine.library.check(engine.library.lib.luce_engine_costs(engine.handle, costs, n))
    assert sorted({cost.step for cost in costs[0 : n[0]]}) == list(range(2 + len(USES))), "a verify, each, and a feed"


def test_each_drafts_what_it_drafts_as_the_only_one(native: Library, files: Files, model: Model, device: str) -> None:
    """Its drafts depend on no neighbour in the list, and differ from those of its like."""
    prompt, engine = tokens_of(270), engine_of(model, USES)
    sequence, found = engine.sequence(), []
    anchor = drive.start(sequence, prompt)
    for index, n in enumerate(MOST):
        found.append(drafts_of(sequence, index, anchor, n))
    loaded = {BLOCK_5: ("dflash", files.blocks[1]), OWN_HEAD: ("nextn", files.target),
              BLOCK_8: ("dflash", files.blocks[0]), OTHER_HEAD: ("nextn", files.head)}  # fmt: skip
    for index, (use, n) in enumerate(zip(USES, MOST, strict=True)):
        kind, path = loaded[use.drafter]
        one = Model(File(files.target, native), device, drafters=[(File(path, native), kind)])
        alone = engine_of(one, [replace(use, drafter=0)]).sequence()
        assert drive.start(alone, prompt) == anchor
        assert drafts_of(alone, 0, anchor, n) == found[index], index
    assert found[0][:4] != found[3] and found[2][:2] != found[4], "the weights of two of a kind are others"


def test_any_turns_leave_the_tokens_and_bytes_of_plain_decoding(model: Model) -> None:
    """Chains, blocks, plain rounds and trees take turns, each drafter with debts that the others left. After all of it
    each drafts what it drafts after plain decoding."""
    engine = engine_of(model, USES, n_sequences=2)
    sequence, plain = engine.sequence(), engine.sequence()
    rng, prompt = np.random.default_rng(5), tokens_of(240)
    assert drive.start(sequence, prompt) == drive.start(plain, prompt)
    for number in range(24):
        rows = tokens_of(int(rng.integers(1, 12)), int(rng.integers(1 << 30)))
        for index in rng.permutation(len(USES))[: int(rng.integers(0, 4))]:
            drafts_of(sequence, int(index), rows[0], int(rng.integers(1, MOST[index] + 1)))
        parents = drive.random_tree(rng, len(rows))
        drive.verify(sequence, rows, parents)
        path = drive.root_path(parents, int(rng.integers(len(rows))))
        sequence.commit(path)
        for token in (rows[row] for row in path):
            drive.step(plain, token)
        if number % 6 == 5:
            assert sequence.dump() == plain.dump()
    for index, n in enumerate(MOST):
        assert drafts_of(sequence, index, 9, n) == drafts_of(plain, index, 9, n), index


def test_rounds_that_draft_on_the_device_name_their_drafter(model: Model) -> None:
    """Rounds after an anchor, and after what the round ahead chooses, give the tokens of plain decoding with any."""
    engine = engine_of(model, USES, n_sequences=2)
    sequence, plain = engine.sequence(), engine.sequence()
    expected = drive.greedy(plain, tokens_of(60), 40)
    for index, n in enumerate(MOST):
        sequence.reset()
        out = [drive.start(sequence, tokens_of(60))]
        engine.begin([Rows(sequence, n=n + 1, anchor=out[0], source=index)])
        while len(out) < len(expected):
            engine.begin([Rows(sequence, n=n + 1, anchor=CHOSEN, source=index)])
            (done,) = engine.wait()
            assert not isinstance(done, Exception) and engine.under_way == 1
            path, following = sequence.accept(done.tokens, None, done.choices)
            out += [*(done.tokens[row] for row in path[1:]), following]
        engine.wait()
        assert out[: len(expected)] == expected, index


def test_a_checkpoint_is_refused_without_its_drafters(model: Model) -> None:
    """It names the kind of the first that differs, whichever place it has."""
    kept = engine_of(model, USES, n_checkpoints=1)
    sequence = kept.sequence()
    drive.prefill(sequence, tokens_of(256), last=False)
    data = sequence.checkpoint().save()
    for left_out, said in ((BLOCK_5, "a DFlash drafter"), (OTHER_HEAD, "a NextN head"), (BLOCK_8, "a DFlash drafter")):
        without = engine_of(model, [use for use in USES if use.drafter != left_out], n_checkpoints=1)
        with pytest.raises(ArgumentError, match=f"saved with {said}, this engine is without one"):
            without.load_checkpoint(data)
    reordered = engine_of(model, USES[::-1], n_checkpoints=1)
    resumed = reordered.sequence()
    resumed.resume(reordered.load_checkpoint(data))
    for index, n in enumerate(MOST):
        assert drafts_of(resumed, len(USES) - 1 - index, 9, n) == drafts_of(sequence, index, 9, n), index


def test_what_is_not_in_a_list_is_refused(native: Library, files: Files, model: Model, device: str) -> None:
    engine = engine_of(model, USES[:2])
    sequence = engine.sequence()
    anchor = drive.start(sequence, tokens_of(20))
    with pytest.raises(ArgumentError, match="drafter 2: the engine was opened with 2"):
        engine.draft([Drafts(sequence, anchor, 1, 2)])
    with pytest.raises(ArgumentError, match="drafter 7: the engine was opened with 2"):
        engine.begin([Rows(sequence, n=2, anchor=anchor, source=7)])
    with pytest.raises(StateError, match="n_draft 0"):
        engine.draft([Drafts(sequence, anchor, 1, Source.NEXTN)])
    with pytest.raises(ArgumentError, match=r"drafters\[0\] is drafter 4 of the model, which has 4"):
        engine_of(model, [DrafterParams(4)])
    for wrong, said in ((DrafterParams(OWN_HEAD, 9), "n_draft is 9"), (DrafterParams(BLOCK_8, 3), "n_draft is 3"),
                        (DrafterParams(OWN_HEAD, 2, 100), "n_part is 100"),
                        (DrafterParams(BLOCK_8, 0, 128), "n_part is 128")):  # fmt: skip
        with pytest.raises(ArgumentError, match=said):
            engine_of(model, [wrong])
    file = File(files.target, native)
    with pytest.raises(ArgumentError, match="drafter 'eagle': luce has dflash, assistant, nextn"):
        Model(file, device, drafters=[(file, "eagle")])
    with pytest.raises(ArgumentError, match="at most 16 drafters"):
        Model(file, device, drafters=[(file, "nextn")] * 17)


def test_memory_counts_each_drafter_once(native: Library, files: Files, model: Model, device: str) -> None:
    """Uses of one drafter share its KV; another drafter of the same kind has KV of its own."""
    file, head = File(files.target, native), File(files.head, native)
    drafters = [(file, "nextn"), (head, "nextn")]

    def kv(*uses: DrafterParams) -> int:
        params = EngineParams(**SIZES, drafters=uses)  # type: ignore[arg-type]
        return file.plan_memory(device, params, drafters=drafters).kv

    one, twice = kv(DrafterParams(0, 2)), kv(DrafterParams(0, 2), DrafterParams(0, 2, 128))
    assert one == twice and kv(DrafterParams(0, 2), DrafterParams(1, 2)) - one == one - kv()
