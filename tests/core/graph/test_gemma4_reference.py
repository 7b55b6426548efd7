"""Checks the goldens of Gemma 4, and of an assistant, by forwards in numpy, and that each mistake that was made with
such models moves them."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import tiny_gemma4
from checkout import GOLDENS
from gemma4_reference import AssistantReference, Reference, gelu
from tiny_gemma4 import ASSISTANT, ASSISTANT_SEED, CASES, LONG_CASES, ORDERED, ORDERED_SEED

TOLERANCE = 2e-3  # Logits of the core have to be as close to transformers'.


def logits(name: str, kind: type[Reference] = Reference) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a reference computes at a golden's positions, and the golden's logits."""
    golden = dict(np.load(GOLDENS / f"gemma4-{name}.npz"))
    config, seed = (CASES | LONG_CASES)[name]
    found = kind(config, tiny_gemma4.layout(config, seed)).logits(golden["prompt"])
    return found[golden["at"]], golden["logits"]


@pytest.mark.parametrize("name", CASES | LONG_CASES)
def test_the_reference_computes_what_transformers_does(name):
    found, expected = logits(name)
    assert np.abs(found - expected).max() < TOLERANCE / 4


def having(**methods: Callable) -> type[Reference]:
    """Returns a Reference with other methods."""
    return type("Mistaken", (Reference,), methods)


def changed(change: Callable) -> type[Reference]:
    """Returns a Reference whose weights `change` has changed."""

    class Mistaken(Reference):
        def __init__(self, c, weights):
            super().__init__(c, weights)
            change(self.w)

    return Mistaken


def ones(*ends: str) -> type[Reference]:
    """Returns a Reference with tensors of 1, as of a file that lacks them."""

    def change(weights):
        named = [name for name in weights if name.endswith(ends)]
        assert named
        for name in named:
            weights[name][:] = 1

    return changed(change)


def _normed_v_of_rotated_k(self, i, x):
    k, v = Reference.keys_values(self, i, x)
    return k, v if self.c.has_v(i) else self.norm(k)


def _raw_v(self, i, x):
    k, v = Reference.keys_values(self, i, x)
    p = f"blk.{i}.attn_"
    return k, self.heads(i, x @ self.w[p + ("v" if self.c.has_v(i) else "k") + ".weight"].T)


def _scale_of_the_added_part(self, i, x, per_layer, kv):
    y = Reference.block(self, i, x, per_layer, kv) / Reference.scale_of(self, i)
    return x + (y - x) * Reference.scale_of(self, i)


def _norm_after_the_sum(self, i, x, per_layer, kv):
    p = f"blk.{i}."
    a = self.norm(x + self.attention(i, self.norm(x, p + "attn_norm.weight"), kv), p + "post_attention_norm.weight")
    return self.norm(a + self.ffn(i, a), p + "post_ffw_norm.weight") * self.scale_of(i)


def _turned_first(self, i):
    """Turns the first quarter of a global head, as of a partial RoPE, rather than a quarter of its pairs."""
    rates, half = Reference.rates(self, i), self.c.head(i) // 2
    if self.c.sliding[i]:
        return rates
    turning = int(half * self.c.rope_partial)
    return np.where(np.arange(half) < turning, self.c.rope_base ** (-np.arange(half) / turning), 0)


def _router_of_the_normed_row(self, i, a):
    return Reference.routed(self, i, self.norm(a, f"blk.{i}.ffn_norm.weight"))


def _unscaled_per_layer(self, tokens, x):
    made = Reference.per_layer(self, tokens, x)
    own = self.w["per_layer_token_embd.weight"][tokens].reshape(made.shape)
    return made + own * (1 - self.c.n_embd_per_layer**0.5) / 2**0.5


def _normed_over_layers(self, tokens, x):
    shape, e = (len(tokens), self.c.n_layer, self.c.n_embd_per_layer), self.c.n_embd
    projected = self.norm(x @ self.w["per_layer_model_proj.weight"].T / e**0.5).reshape(shape)
    own = self.w["per_layer_token_embd.weight"][tokens].reshape(shape) * self.c.n_embd_per_layer**0.5
    return (projected * self.w["per_layer_proj_norm.weight"] + own) / 2**0.5


def _scaled_ahead(self, i, x, per_layer, kv):
    p, y = f"blk.{i}.", Reference.block(self, i, x, None, kv)
    gated = self.act(y @ self.w[p + "inp_gate.weight"].T) * per_layer
    return y + self.norm(gated @ self.w[p + "proj.weight"].T, p + "post_norm.weight")


def _neighbours_turned(self, i, x):
    """Turns pairs (2 j, 2 j + 1) in place of (j, j + D / 2)."""
    halves = np.concatenate([x[..., 0::2], x[..., 1::2]], -1)
    turned, half, y = Reference.rotated(self, i, halves), x.shape[-1] // 2, np.empty_like(x)
    y[..., 0::2], y[..., 1::2] = turned[..., :half], turned[..., half:]
    return y


# What is mistaken, of which case, and how. A factor of a whole row of experts does not show: their sum is normed.
MISTAKES: dict[str, tuple[str, type[Reference]]] = {
    "plain RoPE without rope_freqs": ("dense", ones("rope_freqs.weight")),
    "the first dims of global heads turn": ("dense", having(rates=_turned_first)),
    "the sliding layers' base everywhere": (
        "dense", having(rates=lambda self, i: 1e4 ** (-np.arange(self.c.head(i) // 2) / (self.c.head(i) // 2)))),
    "a window that is longer by one": (
        "dense", having(visible=lambda self, i, n: Reference.visible(self, i, n) | (
            self.c.sliding[i] & np.eye(n, k=-self.c.window, dtype=bool)))),
    "a window that is shorter by one": (
        "dense", having(visible=lambda self, i, n: Reference.visible(self, i, n) & ~(
            self.c.sliding[i] & np.eye(n, k=1 - self.c.window, dtype=bool)))),
    "no windows": ("dense", having(visible=lambda self, i, n: np.tri(n, dtype=bool))),
    "scores scaled by 1/sqrt(D)": ("dense", having(scores=lambda self, i, q, k: Reference.scores(
        self, i, q, k) * self.c.head(i) ** -0.5)),
    "scores capped at 50": ("dense", having(scores=lambda self, i, q, k: 50 * np.tanh(Reference.scores(
        self, i, q, k) / 50))),
    "neighbours turn": ("dense", having(rotated=_neighbours_turned)),
    "embeddings not scaled": ("dense", having(embedded=lambda self, t: self.w["token_embd.weight"][t])),
    "embeddings scaled twice": (
        "dense", having(embedded=lambda self, t: Reference.embedded(self, t) * self.c.n_embd**0.5)),
    "V not normed": ("dense", having(keys_values=_raw_v)),
    "V of the normed and turned K": ("dense", having(keys_values=_normed_v_of_rotated_k)),
    "V not normed where it is its own": ("own-v", having(keys_values=_raw_v)),
    "no norms of Q": ("dense", ones("attn_q_norm.weight")),
    "no norms of K": ("dense", ones("attn_k_norm.weight")),
    "no norms after attention": ("dense", ones("post_attention_norm.weight")),
    "no norms after the FFN": ("dense", ones("post_ffw_norm.weight")),
    "norms after the sum": ("dense", having(block=_norm_after_the_sum)),
    "no scale of the stream": ("dense", ones("layer_output_scale.weight")),
    "the stream's scale on what a layer adds": ("dense", having(block=_scale_of_the_added_part)),
    "no cap": ("dense", having(capped=lambda self, z: z)),
    "a cap where there is none": ("experts-apart", having(capped=lambda self, z: 30 * np.tanh(z / 30))),
    "norms stored less 1": ("dense", changed(lambda w: [x.__iadd__(1) for n, x in w.items() if "norm" in n])),
    "SiLU": ("dense", having(act=staticmethod(lambda x: x / (1 + np.exp(-x))))),
    "the embedding as head": ("untied", having(head=lambda self: self.w["token_embd.weight"])),
    "a router of the normed row": ("experts", having(routed=_router_of_the_normed_row)),
    "no scale of the router": ("experts", ones("ffn_gate_inp.scale")),
    "a router that is not divided by sqrt(E)": (
        "experts", changed(lambda w: [x.__imul__(x.size**0.5) for n, x in w.items() if n.endswith("gate_inp.scale")])),
    "no scales of experts": ("experts", ones("ffn_down_exps.scale")),
    "experts on what the dense FFN reads": (
        "experts", changed(lambda w: [w.update({n: w[n.replace("pre_ffw_norm_2", "ffn_norm")]})
                                      for n in list(w) if "pre_ffw_norm_2" in n])),
    "up before gate": (
        "experts", changed(lambda w: [w.update({n: np.roll(x, x.shape[1] // 2, 1)})
                                      for n, x in list(w.items()) if "gate_up" in n])),
    "no norm of the mixture": ("experts", ones("post_ffw_norm_2.weight")),
    "no norm of the dense FFN beside it": ("experts", ones("post_ffw_norm_1.weight")),
    "no per-layer embeddings": ("per-layer", having(per_layer=lambda self, t, x: None)),
    "per-layer embeddings not scaled": ("per-layer", having(per_layer=_unscaled_per_layer)),
    "per-layer embeddings normed over all layers": ("per-layer", having(per_layer=_normed_over_layers)),
    "no norm of what per-layer embeddings are projected from": ("per-layer", ones("per_layer_proj_norm.weight")),
    "no norms after per-layer embeddings": ("per-layer", ones("post_norm.weight")),
    "the stream's scale ahead of per-layer embeddings": ("per-layer", having(block=_scaled_ahead)),
    "shared layers read the first layer of their kind": (
        "per-layer", having(kv_layer=lambda self, i: i if i < self.c.n_layer_kv else self.c.sliding.index(
            self.c.sliding[i]))),
    "plain RoPE in a long text": ("long", ones("rope_freqs.weight")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_shows(mistake):
    name, kind = MISTAKES[mistake]
    found, expected = logits(name, kind)
    assert np.abs(found - expected).max() > 20 * TOLERANCE


def _f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


GELUS: dict[str, Callable] = {
    "looked up by F16, as ggml's CPU does": lambda x: _f16(gelu(_f16(x))),
    "by the error function": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5)),
}


@pytest.mark.parametrize("other", GELUS)
@pytest.mark.parametrize("name", ["dense", "own-v", "per-layer"])
def test_another_gelu_shows(name, other):
    """It moves logits little, and by more than those of the core may be off."""
    found, expected = logits(name, having(act=staticmethod(GELUS[other])))
    assert np.abs(found - expected).max() > 5 * TOLERANCE


# ---- an assistant's drafts


GOLDEN = {
    "assistant": ("dense", ASSISTANT, ASSISTANT_SEED),
    "assistant-ordered": ("per-layer", ORDERED, ORDERED_SEED),
}


def drafted(
    name: str, kind: type[AssistantReference] = AssistantReference
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns, for each beginning of the golden's prompt, the logits of its drafts by a reference and the golden's."""
    golden, (case, own, own_seed) = dict(np.load(GOLDENS / f"gemma4-{name}.npz")), GOLDEN[name]
    (config, seed), n = CASES[case], golden["drafts"].shape[1]
    target = Reference(config, tiny_gemma4.layout(config, seed))
    assistant = kind(own, tiny_gemma4.layout(own, own_seed), target)
    found = [assistant.drafts(golden["prompt"][:at], n)[1] for at in golden["at"]]
    assert {len(each) for each in found} == {n} == {4}
    return list(zip(found, golden["logits"], strict=True))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_reference_drafts_what_transformers_does(name):
    assert max(np.abs(found - expected).max() for found, expected in drafted(name)) < TOLERANCE / 4


def drafting(**methods: Callable) -> type[AssistantReference]:
    """Returns an AssistantReference with other methods."""
    return type("Mistaken", (AssistantReference,), methods)


def _unnormed(self, x, normed):
    return AssistantReference.passed_on(self, normed, x)


def _of_target_unnormed(self, normed):
    return normed / self.target.w["output_norm.weight"]  # but for its length, which the norm has taken


def _moved(self, x, normed):
    self.first += 1
    return AssistantReference.passed_on(self, x, normed)


def _state_first(self, token, state):
    return self.w["nextn.pre_projection.weight"] @ np.concatenate([state, self.target.embedded(np.array(token))])


def _unscaled(self, token, state):
    both = np.concatenate([self.target.w["token_embd.weight"][token], state])
    return self.w["nextn.pre_projection.weight"] @ both


def _of_first_layers(self, i, kv):
    first = min(j for j in kv if self.target.c.sliding[j] == self.c.sliding[i])
    return AssistantReference.seen(self, i, {first: kv[first]})


def _window_longer(self, i, kv):
    k, v = kv[max(j for j in kv if self.target.c.sliding[j] == self.c.sliding[i])]
    first = max(0, self.first - self.c.window) if self.c.sliding[i] else 0
    return k[:, first:], v[:, first:]


ASSISTANTS_MISTAKES: dict[str, type[AssistantReference]] = {
    "the state before the embedding": drafting(projected=_state_first),
    "embeddings not scaled": drafting(projected=_unscaled),
    "a position that moves": drafting(passed_on=_moved),
    "a state from before the last norm": drafting(passed_on=_unnormed),
    "the target's state from before its last norm": drafting(first_state=_of_target_unnormed),
    "a cap": drafting(scored=lambda self, normed: 30 * np.tanh(AssistantReference.scored(self, normed) / 30)),
    "the keys of the first layers of a kind": drafting(seen=_of_first_layers),
    "a window that is longer by one": drafting(seen=_window_longer),
}


@pytest.mark.parametrize("mistake", ASSISTANTS_MISTAKES)
def test_each_mistake_of_an_assistant_shows(mistake):
    pairs = drafted("assistant", ASSISTANTS_MISTAKES[mistake])
    assert max(np.abs(found - expected).max() for found, expected in pairs) > 20 * TOLERANCE


def _order_turned_round(self):
    order = self.w["masked_embd_ordering"]
    return np.argsort(order).reshape(self.c.n_centroid, -1)


def _interleaved(self):
    return self.w["masked_embd_ordering"].reshape(-1, self.c.n_centroid).T


def _fewer_clusters(self, normed):
    return AssistantReference.best_clusters(self, normed)[:-1]


def _smallest_products(self, normed):
    return AssistantReference.best_clusters(self, -normed)


ORDERS_MISTAKES: dict[str, type[AssistantReference]] = {
    "the whole vocabulary": drafting(scored=lambda self, normed: self.capped(self.head() @ normed)),
    "the vocabulary as it lies": drafting(clusters=lambda self: np.arange(self.c.n_vocab).reshape(24, -1)),
    "the order turned round": drafting(clusters=_order_turned_round),
    "clusters that lie token by token": drafting(clusters=_interleaved),
    "a cluster less": drafting(best_clusters=_fewer_clusters),
    "the clusters with the smallest products": drafting(best_clusters=_smallest_products),
}


@pytest.mark.parametrize("mistake", ORDERS_MISTAKES)
def test_each_mistake_of_an_ordered_vocabulary_shows(mistake):
    """In logits, and but for a cluster that is seldom asked for, in drafts."""
    pairs = drafted("assistant-ordered", ORDERS_MISTAKES[mistake])
    assert max(np.abs(found - expected).max() for found, expected in pairs) > 20 * TOLERANCE
    assert any((found.argmax(-1) != expected.argmax(-1)).any() for found, expected in pairs)


# ---- the goldens themselves


@pytest.mark.references
@pytest.mark.parametrize("name", ["dense", "experts", "per-layer"])
def test_goldens_are_what_transformers_computes(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.17")
    import make_gemma4_goldens as make

    (config, seed), golden = CASES[name], dict(np.load(GOLDENS / f"gemma4-{name}.npz"))
    made = make.golden(config, seed, make.N_PROMPT, tuple(golden["at"]))
    assert made.keys() == golden.keys() and made["greedy"].tolist() == golden["greedy"].tolist()
    assert np.abs(made["logits"] - golden["logits"]).max() < TOLERANCE / 4


@pytest.mark.references
@pytest.mark.parametrize("name", GOLDEN)
def test_the_assistant_s_golden_is_what_transformers_computes(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.17")
    import make_gemma4_goldens as make

    made, golden = make.assistant_golden(name), dict(np.load(GOLDENS / f"gemma4-{name}.npz"))
    assert made.keys() == golden.keys() and made["drafts"].tolist() == golden["drafts"].tolist()
    assert np.abs(made["logits"] - golden["logits"]).max() < TOLERANCE / 4
