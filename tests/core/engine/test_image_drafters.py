"""What drafters keep of prompts with images whose rows have three axes of positions, and what they draft behind them:
against torch (tests/goldens/vision-nextn.npz, vision-dflash.npz; tools/make_vision_draft_goldens.py).

Behind an image rows of the target stand at less than their index: so does NextN, whose K of images' rows turns by all
axes, and DFlash stands at the index."""

from __future__ import annotations

import drive
import numpy as np
import pytest
import tiny_dflash
import tiny_vision
from checkout import GOLDENS
from image_prompts import check_chain, of_golden, open_engine

from luce.images.pixels import Processor
from luce.native import File, Source, Tower

pytest.importorskip("PIL.Image")
C, DFLASH = tiny_vision.TEXT, tiny_dflash.VISION
N_GREEDY = 32  # The last tokens of a golden were written behind the prompt.


@pytest.fixture(scope="module")
def bound(device):
    return 2e-4 if device.startswith("cpu") else drive.CUDA_BOUND


@pytest.fixture(scope="module")
def goldens():
    found = {}
    for name in ("nextn", "dflash"):
        with np.load(GOLDENS / f"vision-{name}.npz") as held:
            found[name] = dict(held)
    return found


@pytest.fixture(scope="module")
def models(native, tmp_path_factory, device):
    """Gives the model with its NextN head, and with a DFlash drafter."""
    folder = tmp_path_factory.mktemp("drafters")
    path = tiny_vision.write_sharp(folder / "model.gguf")
    drafter = folder / "drafter.gguf"
    tiny_dflash.write(drafter, DFLASH, tiny_dflash.sharp(tiny_dflash.weights(DFLASH)))
    with drive.open_model(native, path, device, head=True) as nextn:
        with drive.open_model(native, path, device, drafter=drafter) as dflash:
            yield {"nextn": nextn, "dflash": dflash}


@pytest.fixture(scope="module")
def asked(native, goldens, tmp_path_factory, device):
    """The goldens' text, with rows of luce's own tower."""
    weights = tiny_vision.layout(tiny_vision.TINY, tiny_vision.weights(tiny_vision.TINY, 5))
    path = tiny_vision.write(tmp_path_factory.mktemp("tower") / "mmproj.gguf", tiny_vision.TINY, weights)
    with File(path, native) as file, Tower(file, device) as tower:
        return of_golden(goldens["nextn"]["tokens"].tolist(), tiny_vision.IMAGE_PAD, tower, Processor())


def kept_of(sequence, name):
    """Returns K and V (2, layers, rows, Hkv, D) of all positions that a drafter keeps, out of a dump: they lie in one
    page, head by head, behind those of the target and at the dump's end."""
    n, layers, heads, size = sequence.info.n_past, 1, C.n_head_kv, C.head_dim
    if name == "nextn":
        n -= 1  # It keeps none of the first position.
    else:
        layers, heads, size = DFLASH.drafter.n_layer, DFLASH.drafter.n_head_kv, DFLASH.drafter.head_dim
    n_values = layers * 2 * heads * n * size
    values = np.frombuffer(sequence.dump()[-4 * n_values :], np.float32)
    return values.reshape(layers, 2, heads, n, size).transpose(1, 0, 3, 2, 4)


def read_prompt(sequence, asked, end):
    sequence.engine.prefill([asked.prompt(sequence, 0, end)._replace(last=True)])


def by_rounds(sequence, tokens, n, source):
    """Commits tokens by rounds, each with n drafts behind the first of n + 1 rows."""
    for at in range(0, len(tokens), n + 1):
        rows = tokens[at : at + n + 1]
        drive.draft(sequence, rows[0], n, source)
        drive.verify(sequence, rows)
        sequence.commit(range(len(rows)))


# How the text behind the prompt comes: as prompt, row by row, several in a step, and behind drafts.
WAYS = {
    "prompt": lambda sequence, asked, end, source: read_prompt(sequence, asked, len(asked.tokens)),
    "rows": lambda sequence, asked, end, source: drive.chain_logits(sequence, asked.tokens[end:], 1),
    "steps": lambda sequence, asked, end, source: drive.chain_logits(sequence, asked.tokens[end:], 7),
    "rounds": lambda sequence, asked, end, source: by_rounds(sequence, asked.tokens[end:], 3, source),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["nextn", "dflash"])
def test_keys_and_values_are_those_of_torch(models, goldens, asked, name, way, bound, record_property):
    """Of rows within both images, at their edges, and of text ahead of, between and behind them."""
    golden, end = goldens[name], len(asked.tokens) - N_GREEDY
    room = {"n_draft": 4} if name == "nextn" else {"blocks": 1}
    with open_engine(models[name], kv_type="f32", **room) as engine, engine.sequence() as sequence:
        if way != "prompt":
            read_prompt(sequence, asked, end)
        WAYS[way](sequence, asked, end, Source.NEXTN if name == "nextn" else Source.DFLASH)
        assert sequence.info.n_past == len(asked.tokens)
        rows = golden["rows"] - (1 if name == "nextn" else 0)
        kept = kept_of(sequence, name)[:, :, rows]
    errors = [np.abs(found - wanted).max() for found, wanted in zip(kept, (golden["k"], golden["v"]), strict=True)]
    record_property("max_abs_errors", [float(error) for error in errors])
    assert max(errors) <= bound


def test_chains_of_nextn_are_those_of_torch(models, goldens, asked, device, bound):
    golden, compared = goldens["nextn"], 0
    with open_engine(models["nextn"], n_draft=4, n_top=60) as engine, engine.sequence() as sequence:
        for at, drafts, logits in zip(golden["at"].tolist(), golden["drafts"], golden["logits"], strict=True):
            sequence.reset()
            read_prompt(sequence, asked, at - 1)
            drive.draft(sequence, asked.tokens[at - 1], len(drafts))
            compared += check_chain(sequence, drafts, logits, bound)
    # How many are compared depends on the golden and the bound alone.
    assert compared == golden["drafts"].size or (device != "cpu" and compared >= 2 * len(golden["at"]))


def test_blocks_of_dflash_are_those_of_torch(models, goldens, asked, bound):
    golden = goldens["dflash"]
    with open_engine(models["dflash"], blocks=1) as engine, engine.sequence() as sequence:
        for at, logits in zip(golden["at"].tolist(), golden["logits"], strict=True):
            sequence.reset()
            read_prompt(sequence, asked, at - 1)
            drive.draft(sequence, asked.tokens[at - 1], DFLASH.drafter.block_size - 1, Source.DFLASH)
            found = np.stack([sequence.logits(row) for row in range(len(logits))])
            assert np.abs(found - logits).max() <= bound, at


def test_wrong_positions_and_rows_would_be_seen(goldens, asked):
    """The goldens say how far each mistake moves what is drafted behind images."""
    for golden in goldens.values():
        behind = golden["at"] > asked.spans[0][0] + 1
        wrong = [golden[name] for name in golden if name.startswith("wrong-")]
        assert behind.sum() >= 6 and len(wrong) >= 3
        assert all(moved[behind].min() > 2 * drive.CUDA_BOUND for moved in wrong)


@pytest.mark.references
def test_goldens_are_what_torch_computes(goldens):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import make_vision_draft_goldens

    made = make_vision_draft_goldens.goldens()
    assert made.keys() == goldens.keys()
    for name, golden in goldens.items():
        assert made[name].keys() == golden.keys()
        assert all(np.allclose(made[name][key], value, atol=1e-3) for key, value in golden.items())
