"""Options of a generation by the names that the command line has too, and what they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict, cast

from luce.errors import ArgumentError
from luce.native.structs import MAX_U32, Penalties, Sampling

if TYPE_CHECKING:
    from luce.native import Progress

Image = str | bytes | PathLike[str]  # A file's path, or its bytes.
MAX_LOGPROBS = 1 << 20  # No vocabulary has so many tokens.


class How(TypedDict, total=False):
    """How an answer is generated; what is not given is the default, and means nothing is changed.

    max_tokens: at most so many tokens follow, by default 512, and 2048 in a chat; None: until the context is
        full
    temperature: the scale of sampling, 0 or more; 0 takes the most probable token
    top_k, top_p, min_p: which tokens are sampled from: the k most probable; the fewest that reach p, above 0
        and at most 1; those at least p times as probable as the first, below 1
    seed: gives the same sampled tokens on every run, 0 to 2**64 - 1, by default 0
    repetition_penalty: divides the logits of tokens that occurred, above 0 and at most 100; 1 is off
    presence_penalty, frequency_penalty: are subtracted from the logits of tokens that were generated, once, or
        as often as they were, -2 to 2
    logit_bias: what is added to the logits of tokens, by their ids, -100 to 100
    stop: the text ends before this string, or before any of these
    logprobs: log-probabilities of each token, and so many of the most probable ones beside it
    grammar: the text is of this grammar, in llguidance's form of Lark or in llama.cpp's GBNF
    ignore_eos: an end-of-text token is a token like any other
    images: files of images, or their bytes, that stand before the prompt, in a chat before the text of the user's
        newest message; the model was loaded with mmproj
    prefill_keep: only this share of the prompt is read, above 0 and at most 1, which the model's scorer chooses;
        None reads it whole. This is lossy
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    logprobs: int | None
    grammar: str | None
    ignore_eos: bool
    images: Sequence[Image]
    prefill_keep: float | None


class HowReply(How, total=False):
    """How a message is answered in a conversation whose tools are known: as luce.How says, and

    tool_choice: "auto" (the default), "none", "required" or the name of a tool that has to be called
    schema: a JSON schema, or its text, that the answer fits after all reasoning
    think: turns reasoning on or off; None leaves it to the chat template
    """

    tool_choice: str
    schema: Mapping[str, Any] | str | None
    think: bool | None


class HowChat(HowReply, total=False):
    """How messages are answered: as luce.HowReply says, and

    tools: what the model may call, {"name", "description", "parameters"} each, which may stand below "function"
    """

    tools: Sequence[Mapping[str, Any]]


class Loading(TypedDict, total=False):
    """How a model is opened: luce.load says what each of these is."""

    device: str
    draft_device: str | None
    ctx: int | None
    parallel: int
    draft: str
    drafter: Any
    head: Any
    gamma: int | None
    budget: int | None
    kv_type: str | None
    threads: int | None
    cpu_experts: int | str | None
    expert_slots: int | str | None
    prompt_copies: bool | None
    checkpoints: int
    prefill_model: Any
    max_waiting: int | None
    progress: Progress | None
    mmproj: Any
    image_tokens: int | None


@dataclass(frozen=True)
class Range:
    """Numbers within `low` and `high`, themselves among them but where they are `open`. `whole` are integers."""

    low: float
    high: float
    whole: bool = False
    open: str = ""

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        least = "above" if "low" in self.open else "at least"
        most = "below" if "high" in self.open else "at most"
        upper = f", {most} {_spelled(self.high)}" if math.isfinite(self.high) else ""
        return f"{kind}, {least} {_spelled(self.low)}{upper}"

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        number = int(value) if self.whole else float(value)  # type: ignore[call-overload, arg-type]
        above = number > self.low if "low" in self.open else number >= self.low
        below = number < self.high if "high" in self.open else number <= self.high
        return above and below and math.isfinite(number)


def _spelled(number: float) -> str:
    return f"{number:g}" if abs(number) < 1e6 else f"{int(number):,}"


RANGES = {
    "max_tokens": Range(0, MAX_U32, whole=True),
    "temperature": Range(0, math.inf),
    "top_k": Range(0, 2**31 - 1, whole=True),
    "top_p": Range(0, 1, open="low"),
    "min_p": Range(0, 1, open="high"),
    "seed": Range(0, 2**64 - 1, whole=True),
    "repetition_penalty": Range(0, 100, open="low"),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "logprobs": Range(0, MAX_LOGPROBS, whole=True),
    "prefill_keep": Range(0, 1, open="low"),
}
BIAS = Range(-100, 100)
NONE_MEANS = ("max_tokens", "logprobs", "grammar", "prefill_keep")  # These may be None, which is none of their values.


@dataclass(frozen=True)
class Chosen:
    """Options of one generation, checked. `grammar` is a text, or None."""

    max_tokens: int | None
    sampling: Sampling
    penalties: Penalties
    stops: tuple[str, ...]
    logprobs: int | None
    grammar: str | None
    ignore_eos: bool
    keep: float | None


def chosen(
    how: How,
    n_vocab: int,
    max_tokens: int,
    recommended: Callable[[], Mapping[str, Any]] = dict,
    kind: type[How] = How,
) -> Chosen:
    """Checks options of a `kind`, and fills in what is not given: `max_tokens`, and what `recommended` returns of
    the others. ArgumentError names an option that has no such value, TypeError one that there is not."""
    require_known(how, kind, "schema")
    given: dict[str, Any] = {**how}
    for name, allowed in RANGES.items():
        if name in given and not (given[name] is None and name in NONE_MEANS):
            require(name, given[name], allowed)
    value = {**recommended(), **given}
    temperature = float(value.get("temperature", 0.0))
    sampling = Sampling()
    if temperature > 0:
        filters = float(value.get("top_p", 1.0)), float(value.get("min_p", 0.0))
        sampling = Sampling(temperature, int(value.get("top_k", 0)), *filters, int(value.get("seed", 0)))
    logprobs, grammar = value.get("logprobs"), value.get("grammar")
    if grammar is not None and not isinstance(grammar, str):
        raise ArgumentError(f"grammar is {grammar!r:.80}: it is the text of a grammar")
    if grammar is not None and not grammar.strip():
        raise ArgumentError("the grammar is empty")
    most = value.get("max_tokens", max_tokens)
    return Chosen(
        max_tokens=None if most is None else int(most),
        sampling=sampling,
        penalties=Penalties(
            repetition=float(value.get("repetition_penalty", 1.0)),
            presence=float(value.get("presence_penalty", 0.0)),
            frequency=float(value.get("frequency_penalty", 0.0)),
            bias=_bias(value.get("logit_bias") or {}, n_vocab),
        ),
        stops=_stops(value.get("stop", ())),
        logprobs=None if logprobs is None else int(logprobs),
        grammar=grammar,
        ignore_eos=bool(value.get("ignore_eos", False)),
        keep=value.get("prefill_keep"),
    )


def require(name: str, value: object, allowed: Range) -> None:
    """Raises ArgumentError where an option has no such value."""
    if not allowed.holds(value):
        raise ArgumentError(f"{name} is {value!r:.80}: it is {allowed}")


def require_known(how: Mapping[str, Any], kind: Any, *also: str) -> None:
    """Raises TypeError, as of any call, where an option has no such name. `also` are names beside those of kind."""
    known = list(dict.fromkeys([*kind.__annotations__, *also]))
    for name in how:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
            raise TypeError(f"there is no option {name!r}{hint}")


def _bias(given: Any, n_vocab: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, Mapping):
        raise ArgumentError(f"logit_bias is {given!r:.80}: it is a mapping of token ids to numbers")
    for token, bias in given.items():
        if not Range(0, n_vocab - 1, whole=True).holds(token):
            raise ArgumentError(f"logit_bias has the token {token!r:.80}, which is none of the model's {n_vocab}")
        require(f"logit_bias[{token}]", bias, BIAS)
    return tuple((int(token), float(bias)) for token, bias in given.items())


def _stops(given: Any) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else given
    if not isinstance(stops, Sequence) or not all(isinstance(each, str) for each in stops):
        raise ArgumentError(f"stop is {given!r:.80}: it is a string, or a list of strings")
    if "" in stops:
        raise ArgumentError("a stop text is empty")
    return tuple(cast("Sequence[str]", stops))
