"""Runs `luce generate --draft`, and what the other commands say and do with a DFlash drafter."""

import json

import box_model
import pytest
from depth import deeper_but

PROMPT = "def fibonacci(n):\n"
RUN = ("generate", "--gguf", box_model.GGUF, PROMPT, "-n", 40, "--ctx", 512, "--json")


def tokens_and_draft(result):
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    return printed["tokens"], printed["stats"]["plan"]["draft"]["value"], printed["stats"]


SAMPLED = ("--temp", 0.7, "--top-k", 20, "--top-p", 0.95, "--seed", 3)


@pytest.mark.parametrize("sampling", deeper_but([(), SAMPLED], ()))
def test_draft_prints_the_tokens_of_plain_decoding(luce_, sampling):
    plain, _, _ = tokens_and_draft(luce_(*RUN, "--spec", "off", *sampling))
    for flags, budget in (((), None), *((("--spec", "dflash", "--tree-budget", n), n) for n in (1, 6, 63))):
        tokens, draft, stats = tokens_and_draft(luce_(*RUN, "--draft", box_model.DRAFTER, *flags, *sampling))
        assert tokens == plain
        assert draft == {"mode": "dflash", "path": str(box_model.DRAFTER), "block": 15, "budget": budget}
        assert stats["mode"] == "dflash" and stats["accepted"] > 0
        most = max(n for n, rounds in enumerate(stats["rounds_by_drafts"]) if rounds)
        assert most == (budget or 15)
        assert list(stats["by_source"]) == ["dflash"]


def test_a_file_that_is_no_drafter_is_refused(luce_):
    result = luce_(*RUN, "--draft", box_model.GGUF)
    assert result.exit_code == 1 and "is neither a DFlash drafter nor an assistant" in result.stderr
    result = luce_("generate", "--gguf", "{}", "x", "--draft", box_model.DRAFTER)
    assert result.exit_code == 1 and "drafts for models with embedding 256, vocabulary" in result.stderr
    assert "and this model has embedding 64, vocabulary 384, " in result.stderr


def test_probe_says_what_a_drafter_takes(luce_):
    text = luce_("probe-gguf", box_model.DRAFTER).stdout
    assert "supported       beside a model, with --draft: a dflash drafter" in text
    for line in ("block_size    16", "target_layers [2, 5, 7, 10]", "mask_token_id 4095", "target_blocks 10"):
        assert " ".join(line.split()) in " ".join(text.split())
    probed = json.loads(
        luce_("probe-gguf", box_model.GGUF, "--draft", box_model.DRAFTER, "--ctx", 512, "--json").stdout
    )
    ways = {way["mode"]: way for way in probed["fits"]}
    drafter = ways["dflash"]["memory"]["kv"] - ways["plain"]["memory"]["kv"]
    assert drafter % (4 * 2 * 2 * 64 * 2) == 0 and drafter >= 512 * 4 * 2 * 2 * 64 * 2


@pytest.mark.long
def test_bench_runs_blocks_beside_plain(luce_, tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "f", "prompt": PROMPT}) + "\n")
    result = luce_(
        "bench", "prompts", tmp_path / "p.jsonl", "--modes", "plain,dflash,dflash:4", "-n", 24, "--json",
        "--draft", box_model.DRAFTER, "--gguf", box_model.GGUF, "--quiet",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    modes = {row["mode"]: row for row in json.loads(result.stdout)["modes"]}
    assert set(modes) == {"plain", "dflash", "dflash:4"}
