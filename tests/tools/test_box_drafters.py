"""Compares the drafters that tools/box trains with the equations that luce's core is tested by, and with the box."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.references

import box_model  # noqa: E402
import hf_checkpoint  # noqa: E402
import make_dflash2_goldens as equations  # noqa: E402
import tiny_dflash2  # noqa: E402
from box import conditional, dflash, export, from_gguf, nextn, tokens, train  # noqa: E402
from box.model import Config, Trunk, rope_table  # noqa: E402
from box.store import Store  # noqa: E402

from luce.convert import hf_dflash  # noqa: E402
from luce.files.tokenizer import Tokenizer  # noqa: E402
from luce.native import File  # noqa: E402

torch.set_num_threads(1)


def ids_of(text: str) -> list[int]:
    with File(box_model.GGUF) as file:
        return Tokenizer(file.kv).encode(text)


@pytest.mark.parametrize(("name", "made"), [("dflash2", conditional.DFlash2), ("dspark", conditional.DSpark)])
def test_a_block_is_drafted_as_the_goldens_equations_say(name, made, monkeypatch):
    case = tiny_dflash2.CASES[name]
    c, block, n = case.base.drafter, equations.Block(case), 20
    generator = torch.Generator().manual_seed(4)
    streams = [torch.randn(n, c.n_embd, generator=generator) for _ in range(max(c.target_layer_ids) + 1)]
    embedding = torch.randn(c.n_vocab, c.n_embd, generator=generator) * 0.3
    x = embedding[torch.tensor([5] + [c.mask_token_id] * (c.block_size - 1))]
    wanted = block.hidden(x, block.context(streams))
    first = c.block_size - case.n_draft
    path = equations.drafts(block, wanted[first:], (wanted @ embedding.T)[first:], 5)["path"]

    monkeypatch.setattr(dflash, "BLOCK", c.block_size)
    config = Config(n_vocab=c.n_vocab, n_embd=c.n_embd, n_layer=case.base.target.n_layer, n_head=c.n_head,
                    n_head_kv=c.n_head_kv, head_dim=c.head_dim)  # fmt: skip
    terms = conditional.Terms(case.rank, case.candidates, case.taps or 2, case.group or 16)
    drafter = made(config, dflash.Sizes(c.n_layer, c.n_ff), terms)
    missing, unexpected = drafter.load_state_dict(
        {hf_dflash.source_name(name): x for name, x in block.w.items()}, strict=False
    )
    assert not unexpected and all(name.startswith("confidence_head.") for name in missing)
    w, rows = drafter.weights(), torch.arange(n, n + c.block_size)
    table = rope_table(torch.arange(n + c.block_size), c.head_dim, c.rope_base)
    mask = torch.ones(c.block_size, n + c.block_size, dtype=torch.bool)
    with torch.no_grad():
        context = dflash.features([streams[i][None] for i in c.target_layer_ids], w)
        mine = dflash.draft_hidden(context, x[None], w, c.n_layer, mask, table, rows)
        assert torch.allclose(mine[0], wanted, atol=1e-4)
        behind = mine[:, None, drafter.first :]  # (1, 1, n, E)
        drafts = drafter.drafts(behind @ embedding.T, behind, torch.tensor([[5]]))
    assert drafter.first == first
    assert drafts[0, 0].tolist() == path.tolist()


def toy_blocks(drafter: dflash.Drafter) -> tuple[dflash.Blocks, torch.Tensor]:
    """Returns blocks of random tokens, and their anchors."""
    c = drafter.config
    torch.manual_seed(3)
    trunk, batch = Trunk(c).requires_grad_(False), torch.randint(0, c.n_vocab, (2, 96))
    hidden, tapped = trunk(batch, drafter.taps)
    anchors = torch.tensor([40, 70])
    rows = dflash.block_rows(anchors)
    x, table = trunk.embed(dflash.block_tokens(batch, anchors)), rope_table(torch.arange(96), c.head_dim, c.rope_base)
    mask = dflash.block_mask(anchors, 96)
    return dflash.Blocks(tapped, hidden, batch, trunk.embedding, x, mask, table, rows, drafter.first, 7.0), anchors


def toy(kind: str) -> dflash.Drafter:
    torch.manual_seed(1)
    drafter, _ = train.drafter_of(kind, train.Sizes(toy=True))
    with torch.no_grad():
        for p in drafter.parameters():  # Else what begins as zero would say nothing.
            p.add_(torch.randn_like(p) * 0.05)
    return drafter


@pytest.mark.parametrize(("kind", "first"), [("dflash", 1), ("dflash2", 1), ("dspark", 0)])
def test_rows_learn_the_token_that_they_draft(kind, first):
    drafter = toy(kind)
    blocks, anchors = toy_blocks(drafter)
    places = anchors[:, None] + torch.arange(first, 16) - first  # The tokens before the drafts: (A, n).
    assert torch.equal(blocks.at(blocks.batch), blocks.batch[:, places])
    assert torch.equal(blocks.at(blocks.batch, 1), blocks.batch[:, places + 1])
    mine, teacher = blocks.states(drafter.weights(), drafter.sizes.n_layer)
    assert mine.shape[:3] == teacher.shape[:3] == (2, 2, 16 - first)
    assert torch.allclose(teacher, (blocks.hidden @ blocks.embedding.T)[:, places], atol=1e-5)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_drafts_after_the_true_tokens_are_those_that_the_loss_counts(kind):
    """Where the path is the text, the scores of both are the same: the loss of a draft is that of what is drafted."""
    drafter = toy(kind)
    blocks, anchors = toy_blocks(drafter)
    w, n_layer = drafter.weights(), drafter.sizes.n_layer
    with torch.no_grad():
        mine, _ = blocks.states(w, n_layer)
        path = drafter.drafts(mine @ blocks.embedding.T, mine, blocks.batch[:, anchors])
        followed = blocks.batch.clone()
        followed[:, 40 + 1 : 40 + 1 + path.shape[-1]] = path[:, 0]  # Block 0 is now what it drafts.
        again = dataclasses.replace(blocks, batch=followed)
        codes = conditional.code(again.at(again.batch), mine, w)
        scores = drafter.scores(mine @ blocks.embedding.T, codes)
    assert torch.equal(scores[:, 0].argmax(-1), path[:, 0])
    assert not torch.equal((mine @ blocks.embedding.T).argmax(-1)[:, 0], path[:, 0])


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_every_tensor_learns(kind):
    drafter = toy(kind)
    blocks, _ = toy_blocks(drafter)
    loss, _ = conditional.block_loss(blocks, drafter.weights(), drafter.sizes.n_layer)
    loss.backward()
    still = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert still == []


def test_confidence_is_the_share_of_drafts_that_are_right():
    drafter = toy("dspark")
    blocks, _ = toy_blocks(drafter)
    head = [p for name, p in drafter.named_parameters() if name.startswith("confidence_head")]
    with torch.no_grad():
        for p in head:
            p.zero_()
    optimizer = torch.optim.Adam(head, 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        loss, _ = conditional.block_loss(blocks, drafter.weights(), drafter.sizes.n_layer)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        mine, teacher = blocks.states(drafter.weights(), drafter.sizes.n_layer)
        codes = conditional.code(blocks.at(blocks.batch), mine, drafter.weights())
        right = drafter.scores(mine @ blocks.embedding.T, codes).argmax(-1) == teacher.argmax(-1)
        chance = conditional.confidence(mine, codes, drafter.weights()).sigmoid()
    assert abs(float(chance.mean()) - float(right.float().mean())) < 0.02


def test_dflash2_and_dspark_begin_as_the_box_s_drafter(tmp_path):
    place = Store(tmp_path)
    from_gguf.write(place, Config(), box_model.DATA)
    sizes = train.Sizes()
    plain, _ = train.drafter_of("dflash", sizes)
    dflash.begin(place, plain)
    text = torch.tensor([ids_of(box_model.PROMPTS[0] * 3)[:48]])
    trunk = Trunk(Config())
    trunk.load_state_dict(place.weights("trunk"))
    anchors, table = torch.tensor([24, 30]), rope_table(torch.arange(48), 64, 1e6)
    rows, mask = dflash.block_rows(anchors), dflash.block_mask(anchors, 48)
    with torch.no_grad():
        _, tapped = trunk(text, plain.taps)
        x = trunk.embed(dflash.block_tokens(text, anchors))
        states = []
        for kind in ("dflash", "dflash2", "dspark"):
            drafter, _ = train.drafter_of(kind, sizes)
            dflash.begin(place, drafter)
            w = drafter.weights()
            states.append(dflash.draft_hidden(dflash.features(tapped, w), x, w, 4, mask, table, rows))
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


# ---- the box's files as checkpoints


@pytest.fixture(scope="module")
def taken(tmp_path_factory) -> Store:
    place = Store(tmp_path_factory.mktemp("box"))
    from_gguf.write(place, Config(), box_model.DATA)
    return place


def test_the_trunk_of_the_file_is_the_trunk_of_the_goldens(taken):
    golden = np.load(Path(__file__).parents[1] / "goldens" / "box.npz")
    trunk, head = Trunk(Config()), nextn.NextN(Config())
    trunk.load_state_dict(taken.weights("trunk"))
    head.load_state_dict(taken.weights("nextn"))
    with torch.no_grad():
        hidden, _ = trunk(torch.from_numpy(golden["prompt"]).long()[None])
        logits = trunk.logits(hidden[0])
    assert np.abs(logits.numpy() - golden["stored_logits"]).max() < 1e-3


def test_an_export_of_the_file_converts_to_the_same_file(taken, tmp_path):
    from luce.convert import dflash as convert_dflash
    from luce.convert import qwen35

    drafter, _ = train.drafter_of("dflash", train.Sizes())
    export.export(taken, Config(), [drafter], tmp_path)
    qwen35.convert(tmp_path / "box", tmp_path / "box.gguf", "Q8_0")
    convert_dflash.convert(tmp_path / "box-dflash", tmp_path / "d.gguf", "Q8_0", target=tmp_path / "box")
    for mine, theirs in ((tmp_path / "box.gguf", box_model.GGUF), (tmp_path / "d.gguf", box_model.DRAFTER)):
        found, wanted = hf_checkpoint.tensors_of(mine), hf_checkpoint.tensors_of(theirs)
        assert found.keys() == wanted.keys()
        for name, x in found.items():  # A_log is a logarithm of what the file has.
            assert np.array_equal(x, wanted[name]) or (name.endswith("ssm_a") and np.allclose(x, wanted[name], 1e-6))


def test_the_tokenizer_of_the_file_is_luce_s(taken):
    tokenizer = tokens.load_tokenizer(taken.state / "tokenizer.json")
    for text in (*box_model.PROMPTS, "naïve = 'Größe'  # 12345\r\n\tx\u0301 ≠ y", Path(__file__).read_text()):
        assert tokenizer.encode(text).ids == ids_of(text)
    assert [tokenizer.token_to_id(mark) for mark in tokens.SPECIAL] == [4092, 4093, 4094, 4095]
