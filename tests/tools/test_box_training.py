"""Runs the training code of the model in the box, on the CPU with toy sizes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.references

from box import corpus, delta, dflash, nextn, tokens, train  # noqa: E402
from box import store as box_store  # noqa: E402
from box.model import Cache, Config, Trunk, full_block, linear, rms, rope_table, token_loss  # noqa: E402
from box.optim import Optimizer  # noqa: E402
from box.store import Store  # noqa: E402
from box.trunk import Windows  # noqa: E402

from luce.convert.dflash import convert  # noqa: E402
from luce.files.probe import probe  # noqa: E402
from luce.native import File  # noqa: E402

TOY = train.Sizes(toy=True)
torch.set_num_threads(1)  # At toy sizes, more threads only wait for each other.


@pytest.fixture
def trunk() -> Trunk:
    torch.manual_seed(0)
    model = Trunk(TOY.config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.2)
    return model.requires_grad_(False)


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randint(0, TOY.config.n_vocab, (2, 96), generator=torch.Generator().manual_seed(3))


def random_delta_inputs(alike: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    q, k, v = draw(2, 128, 2, 32), draw(2, 128, 2, 32), draw(2, 128, 4, 32)
    g, beta = -0.3 * draw(2, 128, 4).sigmoid(), draw(2, 128, 4).sigmoid()
    if alike:  # The keys of a chunk are nearly equal and hardly decay: naive inverses blow up there.
        k, g, beta = k[:, :1].expand_as(k) + 0.01 * k, g * 1e-3, 0.9 + 0.1 * beta
    return [t.detach().requires_grad_() for t in (q, k, v, g, beta)]


@pytest.mark.parametrize("alike", [False, True])
def test_chunked_delta_rule_equals_the_recurrence_and_its_gradients(alike):
    inputs = random_delta_inputs(alike)
    out, state = delta.chunked(*inputs)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    s, rows = torch.zeros(2, 4, 32, 32), []
    for i in range(128):
        row, s = delta.step(*(t[:, i].float() for t in exact), s)
        rows.append(row)
    expected = torch.stack(rows, 1)
    assert torch.allclose(out, expected, atol=2e-5)
    assert torch.allclose(state, s, atol=2e-5)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, theirs in zip(inputs, exact, strict=True):
        assert (mine.grad - theirs.grad).norm() < 1e-4 * theirs.grad.norm()


def test_delta_rule_goes_on_from_a_state():
    inputs = [t.detach() for t in random_delta_inputs(False)]
    whole, last = delta.chunked(*inputs)
    _, middle = delta.chunked(*(t[:, :64] for t in inputs))
    second, end = delta.chunked(*(t[:, 64:] for t in inputs), first=middle)
    assert torch.allclose(second, whole[:, 64:], atol=1e-5)
    assert torch.allclose(end, last, atol=1e-5)


def test_trunk_loads_into_transformers_and_gives_the_same_logits(trunk, batch):
    config = transformers.Qwen3_5TextConfig(**TOY.config.hf(eos_id=2))
    reference = transformers.Qwen3_5ForCausalLM(config).float().eval()
    missing, unexpected = reference.load_state_dict(trunk.state_dict(), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    told = reference(batch, output_hidden_states=True)
    hidden, tapped = trunk(batch, taps=(1, 2))
    assert torch.allclose(trunk.logits(hidden), told.logits, atol=1e-4)
    for layer, mine in zip((1, 2), tapped, strict=True):
        assert torch.allclose(mine, told.hidden_states[layer + 1], atol=1e-4)


def test_steps_after_a_prefill_equal_one_forward(trunk, batch):
    whole, _ = trunk(batch)
    cache = Cache(batch.shape[1])
    trunk(batch[:, :64], cache=cache)
    for i in range(64, batch.shape[1]):
        assert torch.allclose(trunk.step(batch[:, i], cache), whole[:, i], atol=1e-4)


def test_chained_passes_equal_drafting_from_one_anchor(trunk, batch):
    torch.manual_seed(1)
    head = nextn.NextN(TOY.config)
    hidden, _ = trunk(batch)
    length, anchor = batch.shape[1], 50
    cos, sin = nextn.head_rope(TOY.config, length, "cpu")
    masks = [nextn.chain_mask(length, j, "cpu") for j in (1, 2, 3)]
    passes = nextn.chain(hidden, trunk.embed(batch), head.weights(), masks, cos, sin)

    # A round drafts row by row: rows 1 .. anchor come from the trunk's hidden states, then from the head's
    # own.
    fed = [None, *hidden[0, :anchor]]
    w = head.weights()
    drafted = []
    for row in range(anchor, anchor + 3):
        x = torch.stack(
            [
                linear(
                    torch.cat(
                        [
                            rms(trunk.embed(batch[0, r]), w["pre_fc_norm_embedding.weight"]),
                            rms(fed[r], w["pre_fc_norm_hidden.weight"]),
                        ]
                    ),
                    w["fc.weight"],
                )
                for r in range(1, row + 1)
            ]
        )[None]
        out, _, _ = full_block(x, w, cos[1 : row + 1], sin[1 : row + 1])
        drafted.append(rms(out[0, -1], w["norm.weight"]))
        fed.append(drafted[-1])
    for j, mine in enumerate(drafted):
        assert torch.allclose(passes[j][0, anchor + j], mine, atol=1e-4)


def test_blocks_drafted_together_equal_one_block_alone(trunk, batch):
    torch.manual_seed(2)
    drafter = dflash.Drafter(TOY.config, TOY.drafter)
    _, tapped = trunk(batch, drafter.taps)
    w, c = drafter.weights(), TOY.config
    table = rope_table(torch.arange(batch.shape[1]), c.head_dim, c.rope_base)

    def draft(anchors: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        rows = dflash.block_rows(anchors)
        mask = dflash.block_mask(anchors, context.shape[1])
        x = trunk.embed(dflash.block_tokens(batch, anchors))
        return dflash.draft_hidden(context, x, w, TOY.drafter.n_layer, mask, table, rows)

    context = dflash.features(tapped, w)
    both = draft(torch.tensor([40, 70]), context)
    alone = draft(torch.tensor([70]), context[:, :70])
    assert torch.allclose(both[:, dflash.BLOCK :], alone, atol=1e-5)


def test_taps_follow_the_rule():
    assert dflash.target_layers(4, 12) == [1, 4, 6, 9]
    assert dflash.target_layers(5, 64) == [1, 16, 31, 46, 61]


def test_rounds_walk_over_the_accepted_drafts():
    assert nextn.walk(np.array([9, 9, 2, 0, 0, 1, 0]), first=2) == [3, 2]
    assert nextn.leading(np.array([[True, True, False, True], [False, True, True, True]])).tolist() == [2, 0]


def test_optimizer_learns_a_repeated_text():
    torch.manual_seed(0)
    model = Trunk(Config(n_vocab=32, n_embd=64, n_ff=64, n_layer=2, interval=2, n_head=1, n_head_kv=1,
                         n_k_head=1, n_v_head=1, state_size=16))  # fmt: skip
    optimizer = Optimizer(model)
    text = torch.randint(0, 32, (4, 32)).repeat(1, 2)
    losses = []
    for _ in range(60):
        hidden, _ = model(text[:, :-1])
        loss = token_loss(hidden, model.embedding, text[:, 1:])
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_windows_resume_where_they_were():
    ids, starts = np.arange(4000, dtype=np.int16), np.arange(0, 4000, 100)
    first = Windows(ids, starts, 32, 4, seed=1, device="cpu")
    drawn = [first.next() for _ in range(40)]
    second = Windows(ids, starts, 32, 4, seed=1, device="cpu")
    second.drawn = 20 * 4
    assert all(torch.equal(second.next(), batch) for batch in drawn[20:])
    assert all((batch.diff() == 1).all() for batch in drawn)


# ---- data


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"License-Expression": "BSD-3-Clause AND MIT"}, True),
        ({"License-Expression": "MPL-2.0 AND MIT"}, False),
        ({"License-Expression": "Apache-2.0 OR GPL-2.0"}, True),
        ({"License-Expression": "Apache-2.0 WITH LLVM-exception"}, True),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, True),
        ({"Classifier": "License :: Other/Proprietary License"}, False),
        ({"License": "Apache 2.0 License"}, True),
        ({"License": "LGPL-3.0"}, False),
        ({}, False),
    ],
)
def test_only_permissive_metadata_is_accepted(fields, accepted):
    import email.message

    meta = email.message.Message()
    for key, value in fields.items():
        meta[key] = value
    assert (corpus.licence_of(meta) is not None) is accepted


def test_humaneval_is_recognised():
    assert corpus.derived_from_humaneval("def has_close_elements(numbers, threshold):\n    pass\n")
    assert corpus.derived_from_humaneval("def strlen(s):\n\ndef flip_case(s):\n\ndef factorize(n):\n")
    assert not corpus.derived_from_humaneval("def factorize(n):\n    return []\n")


def document(name: str, text: str) -> corpus.Document:
    return corpus.Document("p", name, text, corpus.shingles(text), [])


def test_a_file_mostly_seen_before_is_dropped():
    lines = [f"value_{i} = compute({i})" for i in range(40)]
    changed = [*lines[:35], "one()", "two()", "three()", "four()", "five()"]
    other = [f"thing_{i} = {i}" for i in range(40)]
    documents = [document(str(i), "\n".join(text)) for i, text in enumerate((lines, changed, other))]
    kept, dropped = corpus.deduplicate(documents)
    assert ([d.digest for d in kept], dropped) == (["0", "2"], 1)


def test_control_tokens_spelled_in_a_file_stay_text(tmp_path):
    text = "END = '<|endoftext|>'\n" + "x = 1\n" * 50
    tokenizer = tokens.train_tokenizer([text])
    ids, starts, _ = tokens.encode_documents(tokenizer, [document("a", text)], 0, extras=False)
    assert ids.tolist().count(tokens.special_id(tokens.END)) == 1
    assert tokenizer.get_vocab_size() == tokens.N_VOCAB
    assert tokenizer.token_to_id(tokens.MASK) == tokens.special_id(tokens.MASK)
    assert starts.tolist() == [0]


# ---- stages


def test_stages_run_and_resume_from_returned_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(box_store, "PART_BYTES", 500_000)  # Then there are several parts.
    here, there = tmp_path / "here", tmp_path / "there"
    run = lambda work, *more: train.main(["--toy", "--workers", "1", "--work", str(work), *more])  # noqa: E731
    run(here, "--out", str(here / "out"), "--stage", "data", "trunk", "pool", "nextn", "dflash", "dflash2", "dspark",
        "export")  # fmt: skip
    assert len(list((here / "out").glob("state.tar.*"))) > 1
    assert {p.name for p in (here / "export" / "box").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    for kind in ("dflash", "dflash2", "dspark"):  # Converted, each is what it was trained as.
        out = tmp_path / f"{kind}.gguf"
        convert(here / "export" / f"box-{kind}", out, "F16", target=here / "export" / "box")
        with File(out) as file:
            assert probe(file).dflash.kind.lower() == kind

    (here / "corpus").rename(tmp_path / "corpus")
    there.mkdir()
    (tmp_path / "corpus").rename(there / "corpus")
    run(there, "--parts", str(here / "out"), "--final", "--stage", "trunk", "card", "--card", str(tmp_path))
    before, after = Store(here).report("trunk"), Store(there).report("trunk")
    assert after["tokens"] > before["tokens"]
    assert [call["final"] for call in after["calls"]] == [False, True]
    assert after["held_out"][-1][1] < before["held_out"][0][1]
    assert "Mean accepted length".lower() in (tmp_path / "CARD.md").read_text().lower()


def test_parts_of_different_saves_are_refused(tmp_path):
    place = Store(tmp_path / "work", tmp_path / "out")
    place.write_report("trunk", {"a": 1})
    place.publish()
    part = tmp_path / "out" / "state.tar.0"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="do not belong together"):
        Store(tmp_path / "other", parts=tmp_path / "out")


def test_split_line_ends_are_the_same_text() -> None:
    text = "def f(n):\n    return g(\n        n, [1]\n    )\n\n\n" * 200
    tokenizer = tokens.train_tokenizer([text])
    ids = np.array(tokenizer.encode(text).ids, np.int16)
    ends = tokens.line_ends(tokenizer)
    split = tokens.split_line_ends(ids, ends, np.random.default_rng(1))
    assert tokenizer.decode(split.tolist()) == text
    kept = np.isin(split, list(ends)).sum() / np.isin(ids, list(ends)).sum()
    assert abs(1 - kept - tokens.SPLIT_SHARE) < 0.05


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    place = Store(tmp_path / "work")
    with pytest.raises(FloatingPointError, match="head"):
        place.write_weights("trunk", {"head": torch.tensor([1.0, float("nan")])})
    assert place.weights("trunk") is None
