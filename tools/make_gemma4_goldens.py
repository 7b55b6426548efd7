#!/usr/bin/env python3
"""Writes tests/goldens/gemma4-*.npz: what transformers' Gemma4ForCausalLM computes, F32 on the CPU, for the tiny random
models of tests/support/tiny_gemma4.py. Needs torch and transformers 5.17 or later; run it after changing CASES or
LONG_CASES: python tools/make_gemma4_goldens.py

Each file: prompt (40 tokens, or 600 of LONG_CASES), logits (rows, vocab) of its positions `at`, greedy (48 tokens that
follow the prompt) and gap, the distance between the two largest logits where each of them was chosen. The prompt goes
in as one piece and then token by token through transformers' cache; both have to agree. A seed whose logits or experts
a GPU's rounding may move too far is refused (gemma4_rounding.py). With experts, `sure` counts the
greedy tokens ahead of the first one for which a GPU may choose other experts.

gemma4-assistant.npz is of an assistant (MTP) of the model `dense`: prompt, lengths `at` of its beginnings, and behind
each the greedy drafts (lengths, 4) and their logits (lengths, 4, vocab) by Gemma4AssistantForCausalLM. A draft sees the
keys that a sliding layer of the target would see from its position: transformers alone would let it see two more.
gemma4-assistant-ordered.npz is the same of one with an ordered vocabulary, of the model `per-layer`: there a draft's
clusters are ahead of the next one by MARGIN or more, so that rounding leaves them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # Its modules are used below.

import drive
import numpy as np
import tiny_gemma4
from make_goldens import choices
from tiny_gemma4 import CASES, LONG_CASES

from luce.convert.gemma4_layout import Config

ROOT = Path(__file__).resolve().parent.parent

N_PROMPT = 40
N_LONG = 600
N_GREEDY = 48
# These are indices of a long prompt's tokens: beside the edges of windows of 100 and 256 and of pages of 256.
LONG_AT = (63, 99, 100, 101, 199, 255, 256, 257, 355, 356, 511, 512, 513, 599)


def build(c: Config, seed: int):  # type: ignore[no-untyped-def]
    """Returns transformers' model with the weights of tiny_gemma4.weights(c, seed)."""
    import torch
    import transformers

    keys = tiny_gemma4.hf_config(c) | ({"experts_implementation": "eager"} if c.n_expert else {})
    config = transformers.Gemma4TextConfig(**keys, attn_implementation="eager")
    model = transformers.Gemma4ForCausalLM(config).eval().float()
    state = {name: torch.from_numpy(x) for name, x in tiny_gemma4.weights(c, seed).items()}
    if c.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def random_prompt(c: Config, seed: int, n: int) -> np.ndarray:
    raw = np.random.PCG64(1000 + seed).random_raw(n)
    return (raw % np.uint64(c.n_vocab)).astype(np.int32)


def golden(c: Config, seed: int, n_prompt: int, at: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Returns prompt, at, logits, greedy and gap. A choice that is close, or a cache that differs, is an error."""
    import torch

    torch.set_num_threads(1)
    model, prompt = build(c, seed), random_prompt(c, seed, n_prompt)
    with torch.no_grad():
        whole = model(torch.from_numpy(prompt).long()[None], use_cache=False).logits[0].numpy()
        cache, rows, greedy = None, [], []
        for i in range(n_prompt + N_GREEDY - 1):
            token = int(prompt[i]) if i < n_prompt else greedy[-1]
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1].numpy())
            if i >= n_prompt - 1:
                greedy.append(int(rows[-1].argmax()))
    worst = np.abs(np.stack(rows[:n_prompt]) - whole).max()
    if worst > 5e-4:
        raise RuntimeError(f"transformers' cache moves logits by {worst}")
    made = {"prompt": prompt, "at": np.array(at), "logits": whole[list(at)]}
    made |= choices(np.stack(rows[n_prompt - 1 :]))
    return made | bounded(model, made)


def bounded(model, made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    """Returns `sure` of a model with experts. A golden that a GPU's rounding may move too far is an error."""
    import gemma4_rounding  # It needs torch.

    n_prompt = len(made["prompt"])
    moved = gemma4_rounding.moved(model, np.append(made["prompt"], made["greedy"][:-1]))
    by = {kind: float(error[made["at"]].max()) for kind, error in moved.logits.items()}
    if max(by.values()) > drive.CUDA_BOUND or moved.doubtful[:n_prompt].any():
        raise RuntimeError(f"F16 rounding moves logits by {by}, and the experts of rows "
                           f"{np.flatnonzero(moved.doubtful[:n_prompt])}: take another seed")  # fmt: skip
    print("rounding moves logits by " + ", ".join(f"{most:.3f} in {kind}" for kind, most in by.items()), end="; ")
    # Token i of `greedy` is chosen from row n_prompt - 1 + i.
    doubtful = np.flatnonzero(moved.doubtful[n_prompt - 1 :])
    return {"sure": np.array(min(doubtful, default=N_GREEDY))} if model.config.enable_moe_block else {}


N_DRAFTS = 4
ASSISTED_AT = (2, 12, 13, 25, 40)  # Windows are of 12.
MARGIN = 0.1
# A model of CASES, its assistant, and that one's seed.
ASSISTED = {
    "assistant": ("dense", tiny_gemma4.ASSISTANT, tiny_gemma4.ASSISTANT_SEED),
    "assistant-ordered": ("per-layer", tiny_gemma4.ORDERED, tiny_gemma4.ORDERED_SEED),
}


def build_assistant(c: Config, seed: int):  # type: ignore[no-untyped-def]
    """Returns transformers' assistant with the weights of tiny_gemma4.weights(c, seed)."""
    import torch
    import transformers

    text = transformers.Gemma4TextConfig(**tiny_gemma4.hf_config(c), attn_implementation="eager")
    whole = transformers.Gemma4AssistantConfig(text_config=text, **tiny_gemma4.hf_assistant_config(c))
    whole._attn_implementation = "eager"
    assistant = transformers.Gemma4AssistantForCausalLM(whole).eval().float()
    state = {name: torch.from_numpy(x) for name, x in tiny_gemma4.weights(c, seed).items()}
    assistant.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, strict=True)
    return assistant


def assistant_golden(name: str) -> dict[str, np.ndarray]:
    """Returns prompt, at, drafts and logits."""
    import torch

    torch.set_num_threads(1)
    case, c, own_seed = ASSISTED[name]
    config, seed = CASES[case]
    target, prompt = build(config, seed), random_prompt(config, seed, max(ASSISTED_AT))
    assistant, made = build_assistant(c, own_seed), []
    with torch.no_grad(), margins_between_clusters(assistant) as margins:
        for n in ASSISTED_AT:
            ids = torch.from_numpy(prompt[:n]).long()[None]
            out = target.model(ids[:, :-1], use_cache=False, return_shared_kv_states=True)
            made.append(drafted(assistant, out, target.model.embed_tokens, ids[:, -1:], n - 1))
    return {"prompt": prompt, "at": np.array(ASSISTED_AT)} | chosen(made, margins)


@contextmanager
def margins_between_clusters(assistant) -> Iterator[list[float]]:  # type: ignore[no-untyped-def]
    """Gives a list of how far the last cluster that a draft looks at is ahead of the next one, for each draft that is
    made meanwhile; of a vocabulary that is not ordered it stays empty."""
    margins: list[float] = []
    if assistant.masked_embedding is None:
        yield margins
        return
    k = assistant.config.centroid_intermediate_top_k

    def look(module, args, scores) -> None:  # type: ignore[no-untyped-def]
        best = scores.flatten().sort(descending=True).values
        margins.append(float(best[k - 1] - best[k]))

    hook = assistant.masked_embedding.centroids.register_forward_hook(look)
    yield margins
    hook.remove()


def drafted(assistant, out, embed, token, position: int) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Returns the logits (N_DRAFTS, V) of the drafts behind `token` at a position, as transformers' candidate generator
    makes them, from what the target made of all before: `out`, with its keys and values."""
    import torch

    window = assistant.config.text_config.sliding_window
    kv, hidden, logits = dict(out.shared_kv_states), out.last_hidden_state[:, -1:], []
    kv["sliding_attention"] = tuple(x[:, :, 1 - window :] for x in kv["sliding_attention"])
    for _ in range(N_DRAFTS):
        both = torch.cat([embed(token), hidden], -1)
        step = assistant(inputs_embeds=both, position_ids=torch.tensor([[position]]), shared_kv_states=kv)
        token, hidden = step.logits.argmax(-1), step.last_hidden_state
        logits.append(step.logits[0, 0].numpy())
    return np.stack(logits)


def chosen(made: list[np.ndarray], margins: list[float]) -> dict[str, np.ndarray]:
    """Returns drafts and logits, of each text's logits. A draft that is close, or a cluster, is an error."""
    if min(margins, default=MARGIN) < MARGIN:
        raise RuntimeError(f"a cluster is ahead of the next one by {min(margins)} alone: take another seed")
    rows = np.stack(made)  # (texts, N_DRAFTS, V)
    drafts = choices(rows.reshape(-1, rows.shape[-1]))["greedy"].reshape(rows.shape[:2])
    return {"drafts": drafts, "logits": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "goldens")
    parser.add_argument("names", nargs="*", help="of the cases to write; all where none are given")
    args = parser.parse_args()
    for name in ASSISTED:
        if not args.names or name in args.names:
            made = assistant_golden(name)
            np.savez_compressed(args.out / f"gemma4-{name}.npz", **made)
            print(f"{name}: {len(set(made['drafts'].ravel().tolist()))} different drafts")
    for name, (config, seed) in (CASES | LONG_CASES).items():
        if args.names and name not in args.names:
            continue
        long = name in LONG_CASES
        at = LONG_AT if long else tuple(range(N_PROMPT))
        made = golden(config, seed, N_LONG if long else N_PROMPT, at)
        path = args.out / f"gemma4-{name}.npz"
        np.savez_compressed(path, **made)
        top, different = np.abs(made["logits"]).max(), len(set(made["greedy"].tolist()))
        print(f"{name}: {path.stat().st_size} bytes, smallest gap {made['gap'].min():.4f}, largest logit {top:.2f} of "
              f"{config.softcap}, {different} different tokens")  # fmt: skip


if __name__ == "__main__":
    main()
