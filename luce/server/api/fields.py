"""Fields of requests, in one table: what each does here, or why it is refused.

The checks of bodies, the texts of refusals, the names of unknown fields in the log and in a header, and
docs/server-fields.md all come from TABLE. A field is one of three kinds:

  honoured   it acts, as its API documents it; a field with a `target` is another name of that one
  refused    it would change the answer and is not there: 400 names it, unless its value asks for nothing
  harmless   the answer is right without it

A name that is in no row of an API is unknown there: it is ignored, logged once and named in X-Luce-Ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from luce.server.ask import refuse

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_SHOW = "/api/chat", "/api/generate", "/api/show"
EMBEDDINGS, OLLAMA_EMBED, OLLAMA_EMBEDDINGS = "/v1/embeddings", "/api/embed", "/api/embeddings"
INFILL, TEMPLATE, TOKENIZE, DETOKENIZE = "/infill", "/apply-template", "/tokenize", "/detokenize"

HEADER = "X-Luce-Ignored"
MAX_TOLD, MAX_NAME = 16, 64  # The header has at most so many names, each of at most so many letters.
LONGEST = 2**53  # Whole numbers up to it are the same in every JSON library.
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})  # These values of a refused field ask for nothing.


class State(Enum):
    HONOURED = "honoured"
    REFUSED = "refused"
    HARMLESS = "harmless"


@dataclass(frozen=True)
class Field:
    """One field of some APIs; a dot in `name` leads into an object. `why` is what it does, why it is refused,
    or why it changes nothing. `example` is a value that acts, or would elsewhere.

    `whole` numbers may be written as 5.0; `bounds` are the least and the most. `values` are the only ones
    that are allowed, each with what it means here or to `target`. `neutral` are those that ask for nothing.
    `prompt` says that it changes the prompt of a conversation, which is all that some routes look at."""

    apis: tuple[str, ...]
    name: str
    state: State
    why: str
    example: Any
    target: str = ""
    values: tuple[tuple[Any, Any], ...] = ()
    whole: bool = False
    bounds: tuple[float, float] | None = None
    neutral: tuple[Any, ...] = OFF
    prompt: bool = False


Apis = tuple[str, ...]
Rows = Iterator[Field]


def honoured(apis: Apis, name: str, why: str, example: Any, **more: Any) -> Field:
    return Field(apis, name, State.HONOURED, why, example, **more)


def renamed(apis: Apis, target: str, examples: Mapping[str, Any], **more: Any) -> Rows:
    """Yields rows of other names of `target`, each with an example."""
    why = f"Another name of `{target}`."
    return (honoured(apis, name, why, example, target=target, **more) for name, example in examples.items())


def refused(apis: Apis, why: str, examples: Mapping[str, tuple[Any, ...]]) -> Rows:
    """Yields rows of refused fields, each with an example and what asks for nothing beside OFF."""
    return (
        Field(apis, name, State.REFUSED, why, example, neutral=(*OFF, *also))
        for name, (example, *also) in examples.items()
    )


def fixed(apis: Apis, why: str, examples: Mapping[str, tuple[Any, ...]]) -> Rows:
    """Yields rows of refused fields of which nothing but null and the given values asks for nothing."""
    return (
        Field(apis, name, State.REFUSED, why, example, neutral=(None, *only))
        for name, (example, *only) in examples.items()
    )


def harmless(apis: Apis, why: str, examples: Mapping[str, Any]) -> Rows:
    return (Field(apis, name, State.HARMLESS, why, example) for name, example in examples.items())


def of_options(rows: Rows) -> Rows:
    """Yields rows as fields of Ollama's options."""
    return (replace(row, name=f"options.{row.name}") for row in rows)


TALK = (CHAT, RESPONSES)
HELD = (CHAT, COMPLETIONS, RESPONSES)  # Their texts may be held to grammars of several forms.
SAMPLED = (CHAT, RESPONSES, COMPLETIONS, INFILL)  # They sample as vLLM's and llama.cpp's routes do.
WRITING = (*SAMPLED, MESSAGES)
RAW = (COMPLETIONS, INFILL)
OLLAMA = (OLLAMA_CHAT, OLLAMA_GENERATE)
EMBED = (EMBEDDINGS, OLLAMA_EMBED, OLLAMA_EMBEDDINGS)

TOKENS: dict[str, Any] = {"whole": True, "bounds": (-1, LONGEST)}
TOP_K: dict[str, Any] = {"whole": True, "bounds": (-1, 2**31 - 1)}
SEED: dict[str, Any] = {"whole": True, "bounds": (-(2**63), 2**64 - 1)}
ON_OFF = ((True, True), (False, False))
THINKING = (("enabled", True), ("adaptive", True), ("disabled", False))
FORMATS = (("deepseek", "deepseek"), ("auto", "deepseek"), ("none", "none"))

_SAMPLER = "luce samples by temperature, top_k, top_p and min_p"
_BEAMS = "there is no beam search"
_CODE = "requests bring no code"
_WHOLE_PROMPT = "prompts are read whole"
_LISTED = "the answer does not list them"
_RAW_TEXT = f"completions are raw text: {CHAT} has it"
_CLUSTER = "it says where the work is done"
_CONTEXT = "a prompt that does not fit into the context is an error, whatever it says"
_LOADED = "it says how a model is loaded: options of `luce serve` do here"
_QUEUE = "requests are served in the order in which they come"
_CACHE = "a prompt that was kept gives the tokens of one that is read again"
_BOOKS = "it is for a provider's books"
_DRAFTS = "drafts change no token, and luce chooses them"
_TEXT_ALONE = "models here read and write text alone"
_IMAGES = "it says how images are read"
_BUDGET = "Thoughts are ended after so many tokens; -1: they are not."

CONVERSATION = (
    honoured((CHAT, MESSAGES, OLLAMA_CHAT), "messages", "The conversation.",
             [{"role": "user", "content": "import os"}], prompt=True),
    honoured((RESPONSES,), "input", "The conversation, as text or as items.", "import os"),
    honoured((RESPONSES,), "instructions", "A system message before the input.", "Write Python."),
    honoured((MESSAGES, OLLAMA_GENERATE), "system", "The system message.", "Write Python.", prompt=True),
    *fixed((CHAT,), "the model's own template is used: put other prompts into /v1/completions",
           {"chat_template": ("{{ 'x' }}", "")}),
    *refused((CHAT, RESPONSES), "documents are put into messages",
             {"documents": ([{"title": "a", "text": "b"}],)}),
    *refused((CHAT,), "a template brings the control tokens that it needs",
             {"add_special_tokens": (True,), "generation_prompt": ("x",)}),
    *refused((CHAT,), "a last message of the assistant is continued without it", {"echo": (True,)}),
    *refused((RESPONSES,), "send the whole conversation as input", {"conversation": ("conv_1",)}),
    *refused((RESPONSES,), "answers are waited for", {"background": (True,)}),
    *refused((RESPONSES,), "no prompts are stored: send instructions and input",
             {"prompt": ({"id": "pmpt_1"},)}),
    *refused((MESSAGES,), "no code is run here, and no other servers are asked",
             {"mcp_servers": ([{"type": "url", "url": "x"}],), "container": ("c",)}),
    *refused((MESSAGES,), "send the whole conversation as messages", {"thread": ("t",)}),
    *refused((OLLAMA_GENERATE,), "the model's own template is used: `raw` prompts need none",
             {"template": ("{{ .Prompt }}",)}),
    *refused((OLLAMA_GENERATE,), "send the whole conversation to /api/chat", {"context": ([1, 2],)}),
    *refused((OLLAMA_GENERATE,), "send images to /api/chat", {"images": (["AAAA"],)}),
    *refused((OLLAMA_GENERATE,), "models here make no images", {"width": (64,), "height": (64,), "steps": (4,)}),
    *refused((CHAT,), _TEXT_ALONE, {"audio": ({"voice": "a"},), "modalities": (["audio"], ["text"])}),
    *refused((RESPONSES,), _TEXT_ALONE, {"image": ({"size": "a"},)}),
    *refused(TALK, "nothing is looked up on the "
             "web", {"web_search_options": ({"search_context_size": "low"},)}),
    *refused(TALK, "texts are not judged", {"moderation": ({"model": "a"},)}),
    *harmless(TALK, "luce tells models nothing of it", {"verbosity": "low"}),
    honoured((CHAT, COMPLETIONS, MESSAGES), "prefill.keep", "Only this share of the prompt is read, above 0 and at "
             "most 1: lines that the model of `luce serve --prefill-model` chooses. It is lossy.", 0.1),
    honoured((CHAT, COMPLETIONS, MESSAGES), "prefill.model", "The model that has to choose, by the name of its file.",
             "small.gguf"),
    *refused((RESPONSES, INFILL, *OLLAMA), f"prompts are read whole here: {CHAT} has it",
             {"prefill": ({"keep": 0.1},)}),
    *harmless((RESPONSES,), "luce tells models nothing of it", {"text.verbosity": "low"}),
    *harmless((RESPONSES,), _CONTEXT, {"truncation": "auto", "context_management": [{"type": "compaction"}]}),
    *harmless((MESSAGES,), _CONTEXT, {"context_management": {"edits": []}, "compaction": {"type": "auto"}}),
    *harmless(OLLAMA, _CONTEXT, {"truncate": False, "shift": False}),
    *harmless((CHAT,), "other models' tokens are meant", {"task": "title"}),
    *harmless(TALK, _IMAGES, {"mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"image": {}},
                              "images_config": {"a": 1}, "max_dynamic_patch": 4, "min_dynamic_patch": 1,
                              "use_audio_in_video": True}),
)  # fmt: skip

PROMPTS = (
    honoured((COMPLETIONS,), "prompt", "The prompt, or several of them, as text or tokens. It is complete: "
             "no chat template is added.", "import os"),
    honoured((OLLAMA_GENERATE,), "prompt", "The user's message; with `raw`, the whole prompt.", "import os"),
    honoured((OLLAMA_GENERATE,), "raw", "The prompt is complete: it is put into no chat template, and "
             "control tokens that it spells are such.", True),
    honoured((COMPLETIONS,), "parse_special", "Whether control tokens that the prompt spells are such, which "
             "they are by default, or letters.", False),
    honoured((COMPLETIONS,), "add_special_tokens", "Whether the model's first token (BOS) is put before "
             "text, where it has one. By default it is.", False),
    honoured((COMPLETIONS,), "echo", "The text begins with the prompt. With `logprobs` its tokens have "
             "theirs too, null for the first.", True),
    honoured((COMPLETIONS, OLLAMA_GENERATE), "suffix", "What follows the text that is written, for models "
             "that have tokens for it.", "\n    return c\n"),
    honoured((INFILL,), "input_prefix", "The code before the gap that is filled.", "def f("),
    honoured((INFILL,), "input_suffix", "The code behind the gap.", "    return c\n"),
    honoured((INFILL,), "prompt", "What the gap begins with.", "    c ="),
    honoured((INFILL,), "input_extra", "Other files that stand before the code, each {filename, text}.",
             [{"filename": "a.py", "text": "x = 1\n"}]),
    honoured((TOKENIZE,), "content", "The text.", "def f("),
    *renamed((TOKENIZE,), "content", {"prompt": "def f("}),
    honoured((TOKENIZE,), "parse_special", "Whether control tokens that the text spells are such; by default "
             "they are letters.", True),
    honoured((TOKENIZE,), "add_special", "Whether the model's first token (BOS) is put before the text.",
             True),
    *renamed((TOKENIZE,), "add_special", {"add_special_tokens": True}),
    honoured((TOKENIZE,), "with_pieces", "Each token is {id, piece}; a piece that is no text is a list of "
             "bytes.", True),
    *refused((TOKENIZE,), "/apply-template has the tokens of a conversation",
             {"messages": ([{"role": "user", "content": "a"}],)}),
    *refused((TOKENIZE,), "`with_pieces` lists them", {"return_token_strs": (True,)}),
    honoured((DETOKENIZE,), "tokens", "The tokens.", [5]),
    *refused(RAW, _RAW_TEXT, {
        "chat_template": ("x",), "chat_template_kwargs": ({"enable_thinking": False},), "tools": ([{}],),
        "tool_choice": ("required", "none", "auto"), "functions": ([{}],), "reasoning_effort": ("low",),
        "reasoning": ({"effort": "low"},), "documents": ([{}],), "continue_final_message": (True,),
        "top_logprobs": (5,),
    }),
    *fixed(RAW, _RAW_TEXT, {
        "enable_thinking": (False,), "preserve_thinking": (True,), "include_reasoning": (False, True),
        "separate_reasoning": (False, True), "reasoning_format": ("none", ""), "thinking_budget": (3, -1),
        "reasoning_budget_tokens": (3, -1), "thinking_budget_tokens": (3, -1),
        "thinking_token_budget": (3, -1), "add_generation_prompt": (False, True),
    }),
    *fixed((COMPLETIONS,), "`echo` with `logprobs` gives them", {"prompt_logprobs": (1,)}),
    *fixed((INFILL,), "/v1/completions has it", {"prompt_logprobs": (1,), "logprobs": (5, False)}),
)  # fmt: skip

LENGTH = (
    honoured((CHAT, COMPLETIONS, INFILL), "max_tokens", "At most so many tokens are written; -1: until the "
             "context is full, as without it, but for the 16 of /v1/completions.", 2, **TOKENS),
    honoured((CHAT,), "max_completion_tokens", "As `max_tokens`; where both are given, this counts.", 2, **TOKENS),
    *renamed((CHAT, COMPLETIONS, INFILL), "max_tokens", {"n_predict": 2}, **TOKENS),
    honoured((RESPONSES,), "max_output_tokens", "At most so many tokens are written.", 2, **TOKENS),
    *renamed((RESPONSES,), "max_output_tokens",
             {"max_tokens": 2, "max_completion_tokens": 2, "n_predict": 2}, **TOKENS),
    honoured((MESSAGES,), "max_tokens", "At most so many tokens are written.", 2, whole=True,
             bounds=(1, LONGEST)),
    honoured(OLLAMA, "options.num_predict", "At most so many tokens are written; below 0: until the context "
             "is full.", 2, whole=True, bounds=(-LONGEST, LONGEST)),
    honoured(SAMPLED, "stop", "The text ends before any of these: 16 at most, of 1 to 1024 letters.", ["\n"]),
    honoured((MESSAGES,), "stop_sequences", "The text ends before any of these.", ["\n"]),
    honoured(OLLAMA, "options.stop", "The text ends before any of these.", ["\n"]),
    honoured(SAMPLED, "include_stop_str_in_output", "The text ends with the `stop` that ended it, and not "
             "before it.",
             True),
    *renamed(SAMPLED, "include_stop_str_in_output", {"no_stop_trim": True}),
    honoured(SAMPLED, "ignore_eos", "The model's end of the text is a token like others.", True),
    *refused(WRITING, "an end of the text is not held back", {"min_tokens": (4,)}),
    *refused(WRITING, "give texts as `stop`", {"stop_token_ids": ([5],), "stop_regex": ("[0-9]",)}),
    *refused(WRITING, "answers would depend on the machine's speed: `max_tokens` bounds them",
             {"t_max_predict_ms": (5, -1)}),
    *refused(WRITING, "repeated text is not looked for",
             {"repetition_detection": ({"max_pattern_size": 3},)}),
)  # fmt: skip

CHOICES = (
    honoured((CHAT, COMPLETIONS), "n", "So many answers to each prompt, which run together. Where there is a "
             "`seed`, answer i has seed + i.", 2, whole=True, bounds=(1, 128)),
    *renamed((CHAT, COMPLETIONS), "n", {"n_cmpl": 2}, whole=True, bounds=(1, 128)),
    honoured((COMPLETIONS,), "best_of", "What `n` is: no answer is thrown away.", 1, whole=True,
             bounds=(1, 128)),
    *refused((RESPONSES, INFILL, MESSAGES), "one answer for a request: send as many requests",
             {"n": (2, 1), "n_cmpl": (2, 1)}),
    *refused((CHAT, RESPONSES, INFILL, MESSAGES), "no answer is thrown away", {"best_of": (2, 1)}),
)  # fmt: skip

SAMPLING = (
    honoured(WRITING, "temperature", "0 takes the most probable token.", 2.0, bounds=(0, 100)),
    honoured(WRITING, "top_p", "The most probable tokens that together have this probability; 1: all.", 0.01,
             bounds=(0, 1)),
    honoured(WRITING, "top_k", "So many of the most probable tokens; 0 and -1: all.", 1, **TOP_K),
    honoured(SAMPLED, "min_p", "Tokens at least so probable as the most probable one times this.", 1.0,
             bounds=(0, 1)),
    honoured(SAMPLED, "seed", "The same seed gives the same answer. -1: a random one, as without it.", 5,
             **SEED),
    honoured(SAMPLED, "presence_penalty", "Is taken, once, from the logits of tokens that were written.", 2.0,
             bounds=(-2, 2)),
    honoured(SAMPLED, "frequency_penalty", "Is taken from the logits of tokens as often as they were written.", 2.0,
             bounds=(-2, 2)),
    honoured(SAMPLED, "repetition_penalty", "Divides the logits of tokens of the prompt and the answer where "
             "they are positive, else multiplies them; 1: off.", 2.0, bounds=(0.01, 100)),
    *renamed(SAMPLED, "repetition_penalty", {"repeat_penalty": 2.0}, bounds=(0.01, 100)),
    honoured(SAMPLED, "logit_bias", "Is added to logits: {token: bias}, or [[token, bias], ...], where false "
             "bans the token.", {"198": 100.0}),
    *(honoured(OLLAMA, f"options.{name}", f"As `{other}` of /v1/completions.", example, **more)
      for name, other, example, more in (
          ("temperature", "temperature", 2.0, {"bounds": (0, 100)}),
          ("top_p", "top_p", 0.01, {"bounds": (0, 1)}),
          ("top_k", "top_k", 1, TOP_K),
          ("min_p", "min_p", 1.0, {"bounds": (0, 1)}),
          ("seed", "seed", 5, SEED),
          ("presence_penalty", "presence_penalty", 2.0, {"bounds": (-2, 2)}),
          ("frequency_penalty", "frequency_penalty", 2.0, {"bounds": (-2, 2)}),
          ("repeat_penalty", "repetition_penalty", 2.0, {"bounds": (0.01, 100)}),
      )),
)  # fmt: skip

# These are llama.cpp's, vLLM's, SGLang's and Ollama's; each with an example and what asks for nothing.
_OTHER_SAMPLERS = {
    "typical_p": (0.1, 1), "top_n_sigma": (1.0, -1), "top_a": (0.2,), "tfs_z": (0.5, 1),
    "xtc_probability": (0.5,), "xtc_threshold": (0.3, 0.1), "dry_multiplier": (0.8,), "dry_base": (2.0, 1.75),
    "dry_allowed_length": (3, 2), "dry_penalty_last_n": (128, -1, 64),
    "dry_sequence_breakers": (["x"], ["\n", ":", '"', "*"], '["\\n", ":", "\\"", "*"]'), "mirostat": (2,),
    "mirostat_tau": (3.0, 5), "mirostat_eta": (0.3, 0.1), "dynatemp_range": (0.5,),
    "dynatemp_exponent": (2.0, 1), "adaptive_target": (0.5, -1), "min_keep": (2, 1), "samplers": (["top_k"],),
}  # fmt: skip
OTHER_SAMPLING = (
    *refused(WRITING, _SAMPLER, _OTHER_SAMPLERS),
    *of_options(refused(OLLAMA, _SAMPLER, _OTHER_SAMPLERS)),
    *refused(WRITING, "penalties are over the whole text", {"repeat_last_n": (5, -1, 64)}),
    *of_options(refused(OLLAMA, "penalties are over the whole text", {"repeat_last_n": (5, -1, 64)})),
    *fixed(WRITING, "line breaks are penalised like other tokens", {"penalize_nl": (False, True)}),
    *of_options(fixed(OLLAMA, "line breaks are penalised like other tokens",
                      {"penalize_newline": (False, True)})),
    *refused(WRITING, _BEAMS, {"use_beam_search": (True,), "length_penalty": (2.0, 1),
             "early_stopping": (True,)}),
    *refused(WRITING, "`logit_bias` makes tokens more and less probable",
             {"bad_words": (["def"],), "allowed_token_ids": ([5],)}),
    *refused(WRITING, _CODE, {"custom_logit_processor": ("x",), "custom_params": ({"a": 1},),
                              "vllm_xargs": ({"a": 1},)}),
    *refused(WRITING, "texts are not marked", {"watermarking": (True,)}),
    *refused(WRITING, "lines are not held to an indentation", {"n_indent": (4,)}),
    *refused(WRITING, "no adapters are loaded", {"lora": ([{"id": 0, "scale": 1.0}],), "lora_path": ("a",)}),
    *refused(WRITING, "/v1/completions takes tokens as `prompt`",
             {"prompt_embeds": ("AAAA",), "input_ids": ([5],)}),
    *refused(WRITING, _WHOLE_PROMPT, {"truncate_prompt_tokens": (2, -1)}),
    *harmless(WRITING, "it acts with truncate_prompt_tokens alone", {"truncation_side": "left"}),
    *refused((MESSAGES,), f"Anthropic's API has no such field: {CHAT} has it", {
        "seed": (5, -1), "min_p": (1.0,), "stop": (["\n"],), "presence_penalty": (2.0,),
        "frequency_penalty": (2.0,), "repetition_penalty": (2.0, 1), "repeat_penalty": (2.0, 1),
        "logit_bias": ({"198": 100.0},), "ignore_eos": (True,), "logprobs": (True,), "top_logprobs": (5,),
        "response_format": ({"type": "json_object"}, {"type": "text"}), "n_predict": (2, -1),
        "max_completion_tokens": (2,), "include_stop_str_in_output": (True,), "no_stop_trim": (True,),
        "reasoning_effort": ("low",), "prompt_logprobs": (1,),
    }),
)  # fmt: skip

CONSTRAINTS = (
    honoured((CHAT, COMPLETIONS), "response_format", "{type: json_object} or json_schema: the text is such "
             "JSON.", {"type": "json_object"}),
    honoured((RESPONSES,), "text.format", "{type: json_object} or json_schema: the text is such JSON.",
             {"type": "json_object"}),
    honoured((MESSAGES,), "output_config.format", "{type: json_schema, schema}: the text is such JSON.",
             {"type": "json_schema", "schema": {"enum": [1]}}),
    honoured((MESSAGES,), "output_format", "The older place of `output_config.format`.",
             {"type": "json_schema", "schema": {"enum": [1]}}),
    honoured(OLLAMA, "format", "\"json\" or a JSON schema: the text is such JSON.", {"enum": [1]}),
    honoured((CHAT, OLLAMA_CHAT), "tools", "Functions that the model may call.",
             [{"type": "function", "function": {"name": "f"}}], prompt=True),
    honoured((RESPONSES,), "tools", "Functions that the model may call; others are left out.",
             [{"type": "function", "name": "f"}]),
    honoured((MESSAGES,), "tools", "Functions that the model may call; others are left out.",
             [{"name": "f", "input_schema": {"type": "object"}}], prompt=True),
    honoured(TALK, "tool_choice", "Whether a call is required, and which.", "none", prompt=True),
    honoured((MESSAGES,), "tool_choice", "Whether a call is required, and which.", {"type": "none"},
             prompt=True),
    honoured(HELD, "structured_outputs", "vLLM's: one of json, regex, choice, grammar, json_object and "
             "structural_tag, which the text is held to.", {"regex": "[0-9]{3}"}),
    *(honoured(HELD, name, f"{whose}: the text is held to {what}.", example) for whose, what, examples in (
        ("vLLM's older name and llama.cpp's", "JSON of this schema",
         {"guided_json": {"enum": [1]}, "json_schema": {"enum": [1]}}),
        ("vLLM's older name and SGLang's", "this regular expression",
         {"guided_regex": "[0-9]{3}", "regex": "[0-9]{3}"}),
        ("vLLM's older name", "one of these texts", {"guided_choice": ["yes", "no"]}),
        ("The names of vLLM, llama.cpp and SGLang", "this grammar, in llguidance's Lark or in GBNF",
         {"guided_grammar": 'root ::= "a"', "grammar": 'root ::= "a"', "ebnf": 'root ::= "a"'}),
        ("vLLM's and SGLang's", "JSON of a schema behind each of these triggers",
         {"structural_tag": {"structures": [{"begin": each, "schema": {"enum": [1]}, "end": "!"} for each in "`dr"],
                             "triggers": ["`", "d", "r"]}}),
        ("vLLM's older name", "this whitespace between the parts of its JSON",
         {"guided_whitespace_pattern": " "}),
    ) for name, example in examples.items()),
    *harmless(SAMPLED, "there is one engine for grammars", {"guided_decoding_backend": "auto"}),
    *refused((INFILL,), "what is filled in is code", {
        "structured_outputs": ({"regex": "a"},), "guided_json": ({"enum": [1]},), "guided_regex": ("a",),
        "guided_choice": (["a"],), "guided_grammar": ("root ::= [a]",), "grammar": ("root ::= [a]",),
        "json_schema": ({"enum": [1]},), "regex": ("a",), "ebnf": ("root ::= [a]",),
        "structural_tag": ("{}",), "guided_whitespace_pattern": (" ",),
    }),
    *refused((RESPONSES,), "it is `text.format` here",
             {"response_format": ({"type": "json_object"}, {"type": "text"})}),
    honoured(TALK, "parallel_tool_calls", "Whether there may be several calls in an answer.", False),
    *fixed((CHAT,), "give functions as `tools`",
           {"functions": ([{"name": "f"}], []), "function_call": ({"name": "f"}, "none", "auto")}),
    *harmless((RESPONSES,), "it bounds calls of the server's own tools", {"max_tool_calls": 1}),
    *refused(TALK, "they are of llama.cpp's own rendering", {
        "chat_format": ("x",), "chat_parser": ("x",), "grammar_lazy": (True,),
        "grammar_triggers": ([{"type": 0}],), "preserved_tokens": ([5],),
    }),
)  # fmt: skip

THOUGHTS = (
    honoured((CHAT,), "reasoning_effort", "How much to think: none, minimal, low, medium, high, xhigh, max.",
             "low", prompt=True),
    honoured((RESPONSES,), "reasoning.effort", "How much to think: none, minimal, low, medium, high, xhigh, "
             "max.", "low"),
    *renamed((CHAT,), "reasoning_effort", {"reasoning.effort": "low"}, prompt=True),
    *renamed((RESPONSES,), "reasoning.effort", {"reasoning_effort": "low"}),
    honoured(TALK, "enable_thinking", "Whether to think, for templates that read it.", False, values=ON_OFF,
             prompt=True),
    *renamed(TALK, "enable_thinking", {"reasoning.enabled": False}, values=ON_OFF, prompt=True),
    *renamed(TALK, "enable_thinking", {"thinking.type": "disabled"}, values=THINKING, prompt=True),
    honoured(TALK, "preserve_thinking", "Whether older thoughts stay in the prompt, for templates that read "
             "it.", True, values=ON_OFF, prompt=True),
    honoured(TALK, "thinking_budget", _BUDGET, 3, prompt=True, **TOKENS),
    *renamed(TALK, "thinking_budget", {
        "thinking_budget_tokens": 3, "thinking_token_budget": 3, "reasoning_budget_tokens": 3,
        "thinking.budget_tokens": 3, "reasoning.max_tokens": 3,
    }, prompt=True, **TOKENS),
    honoured(TALK, "chat_template_kwargs", "Variables of the chat template.", {"enable_thinking": False},
             prompt=True),
    honoured(TALK, "include_reasoning", "Whether thoughts are in the answer; they are counted anyway.", False,
             values=ON_OFF),
    *renamed(TALK, "include_reasoning", {"reasoning.exclude": True}, values=((True, False), (False, True))),
    honoured(TALK, "reasoning_format", "Where thoughts are: deepseek and auto, in a place of their own; "
             "none, in the text, between <think> and </think>.", "none", values=FORMATS),
    *renamed(TALK, "reasoning_format", {"separate_reasoning": False},
             values=((True, "deepseek"), (False, "none"))),
    honoured((MESSAGES,), "thinking.type", "enabled and adaptive think; disabled, as without it, does not.",
             "adaptive", prompt=True),
    honoured((MESSAGES,), "thinking.budget_tokens", _BUDGET, 1024, prompt=True, **TOKENS),
    honoured((MESSAGES,), "output_config.effort", "How much to think where `thinking` is on.", "low",
             prompt=True),
    honoured(OLLAMA, "think", "Whether to think, or how much: low, medium, high.", False),
    honoured((CHAT,), "add_generation_prompt", "Whether the prompt ends with the beginning of an answer.",
             False, values=ON_OFF, prompt=True),
    honoured((CHAT,), "continue_final_message", "Whether the answer goes on with the last message. By default "
             "it does where that is the assistant's.", False, values=ON_OFF, prompt=True),
    *refused(TALK, "thoughts that had their tokens end with the template's own mark",
             {"reasoning_budget_message": ("Enough.",)}),
    *refused(TALK, "nothing steers an answer under way", {"reasoning_control": (True,)}),
    *refused(TALK, "`reasoning_format` says where thoughts are",
             {"reasoning_in_content": (True,), "thinking_forced_open": (True,)}),
    *harmless(TALK, "thoughts are streamed as they come", {"stream_reasoning": False}),
    *harmless((RESPONSES,), "thoughts are given as they are", {
        "reasoning.summary": "auto", "reasoning.generate_summary": "auto", "reasoning.context": "auto",
        "reasoning.mode": "auto",
    }),
    *harmless((MESSAGES,), "thoughts are given as they are", {"thinking.display": "summarized"}),
    *harmless((MESSAGES,), "luce tells models nothing of it", {"output_config.task_budget": {"total": 1}}),
)  # fmt: skip

TOLD = (
    honoured((*WRITING, *OLLAMA), "stream", "Sends the text as it comes. Ollama's routes do unless it is "
             "false.", True),
    honoured((CHAT, COMPLETIONS), "stream_options.include_usage", "A last event has the usage.", True),
    honoured((CHAT, COMPLETIONS), "stream_options.continuous_usage_stats", "Each event has the usage so far.",
             True),
    *refused((CHAT, COMPLETIONS, RESPONSES), "it is a field of `stream_options`",
             {"continuous_usage_stats": (True,), "include_usage": (True,)}),
    *harmless((RESPONSES, INFILL, MESSAGES), "the last event has the usage",
              {"stream_options.include_usage": True, "stream_options.continuous_usage_stats": True}),
    *harmless((CHAT, COMPLETIONS, RESPONSES), "events have no padding",
              {"stream_options.include_obfuscation": False}),
    honoured((CHAT,), "logprobs", "Lists the log-probability of each token.", True),
    honoured((CHAT,), "top_logprobs", "Lists so many of the most probable tokens at each place; needs "
             "`logprobs`.", 2, whole=True, bounds=(0, 20)),
    honoured((COMPLETIONS,), "logprobs", "Lists the log-probabilities of each token, and of so many of the "
             "most probable ones at its place.", 2, whole=True, bounds=(0, 20)),
    honoured((CHAT,), "prompt_logprobs", "Lists the log-probabilities of the prompt's tokens, in vLLM's "
             "form; of a stream, in its last event.", 1, whole=True, bounds=(0, 20)),
    *refused((RESPONSES,), "/v1/chat/completions lists log-probabilities",
             {"top_logprobs": (2,), "logprobs": (True,)}),
    *fixed((RESPONSES,), "/v1/chat/completions lists log-probabilities", {"prompt_logprobs": (1,)}),
    *refused((INFILL,), "/v1/completions lists log-probabilities", {"logprob_token_ids": ([5],)}),
    *refused((CHAT, COMPLETIONS, RESPONSES, MESSAGES), "`top_logprobs` are the most probable tokens",
             {"logprob_token_ids": ([5],)}),
    *refused(WRITING, "`logprobs` lists probabilities, which are the model's own",
             {"n_probs": (5,), "post_sampling_probs": (True,)}),
    *refused(WRITING, _LISTED, {
        "return_token_ids": (True,), "return_tokens": (True,), "return_prompt_token_ids": (True,),
        "return_tokens_as_token_ids": (True,), "return_hidden_states": (True,),
        "return_routed_experts": (True,), "return_meta_info": (True,),
        "return_cached_tokens_details": (True,), "return_progress": (True,), "response_fields": (["a"],),
    }),
    *refused(WRITING, "/apply-template shows the prompt", {"return_prompt_text": (True,)}),
    *fixed(WRITING, "control tokens are not in the text", {"skip_special_tokens": (False, True)}),
    *refused(OLLAMA, f"{CHAT} lists log-probabilities", {"logprobs": (True,), "top_logprobs": (2,)}),
    honoured((RESPONSES,), "include", "What the answer has beside text. Thoughts are always there, and "
             "nothing of the server's own tools.", ["message.output_text.logprobs"]),
    honoured((RESPONSES,), "previous_response_id", "The conversation goes on from a recent answer.",
                 "resp_1"),
    honoured((RESPONSES,), "store", "Whether the answer can be gone on from.", False),
    *harmless(WRITING, "an event comes as soon as there is text", {"stream_interval": 4}),
    *harmless(WRITING, "a silent stream says every 15 seconds that it lives", {"sse_ping_interval": 5}),
    *harmless(WRITING, "the last event has the timings", {"timings_per_token": True}),
    *harmless(WRITING, "tokens are put together as they are spelled",
             {"spaces_between_special_tokens": False}),
    *harmless(WRITING, "it is for other routes of vLLM",
              {"return_token_offsets": True, "return_mm_kwargs": False, "routed_experts_prompt_start": 1}),
)  # fmt: skip

EMBEDDING = (
    honoured((EMBEDDINGS, OLLAMA_EMBED), "input", "A text or several; /v1/embeddings takes tokens too.",
             "def f("),
    *renamed((EMBEDDINGS,), "input", {"content": "def f("}),
    honoured((OLLAMA_EMBEDDINGS,), "prompt", "The text.", "def f("),
    honoured((EMBEDDINGS,), "encoding_format", "float, or base64 of little-endian F32.", "base64",
             values=(("float", "float"), ("base64", "base64"))),
    *refused((EMBEDDINGS, OLLAMA_EMBED), "a vector has as many numbers as the model's hidden states",
             {"dimensions": (8,)}),
    *fixed((EMBEDDINGS,), "vectors have the Euclidean norm 1", {"embd_normalize": (0, 2),
             "normalize": (False, True)}),
    *refused((EMBEDDINGS,), _WHOLE_PROMPT, {"truncate_prompt_tokens": (2, -1)}),
    *harmless((OLLAMA_EMBED,), _CONTEXT, {"truncate": False}),
    *harmless((OLLAMA_EMBED, OLLAMA_EMBEDDINGS), _LOADED, {"options": {"num_ctx": 512}}),
    *harmless((EMBEDDINGS,), _BOOKS, {"user": "a"}),
)  # fmt: skip

REST = (
    honoured((*WRITING, *OLLAMA, *EMBED, OLLAMA_SHOW, TOKENIZE, DETOKENIZE), "model",
             "Names the model; a server of one answers to any name.", "other", prompt=True),
    *renamed((OLLAMA_SHOW,), "model", {"name": "other"}),
    *harmless((OLLAMA_SHOW,), "all is shown", {"verbose": True}),
    *harmless(WRITING, _BOOKS, {
        "user": "a", "metadata": {"a": "b"}, "safety_identifier": "a", "service_tier": "auto",
        "request_id": "a",
        "rid": "a", "custom_labels": {"a": "b"},
    }),
    *harmless((CHAT,), _BOOKS, {"store": True}),
    *harmless((RESPONSES,), _BOOKS, {"access_programs": ["a"], "background_options": {}}),
    *harmless((MESSAGES,), _BOOKS, {
        "inference_geo": "us", "diagnostics": {}, "user_profile_id": "a", "workspace_id": "a",
        "billing_policy": "a", "fallback_credit_token": "a", "fallbacks": [], "betas": ["a"],
        "anthropic_version": "a", "anthropic_beta": ["a"],
    }),
    *harmless((MESSAGES,), "answers come as fast as they can", {"speed": "fast"}),
    *harmless(WRITING, _QUEUE, {"priority": 1}),
    *harmless(WRITING, _CACHE, {
        "cache_prompt": False, "cache_salt": "a", "id_slot": 0, "slot_id": 0, "n_cache_reuse": 256,
        "session_id": "a", "session_params": {"id": "a"}, "extra_key": "a", "prompt_cache_key": "a",
        "prompt_cache_options": {"a": 1}, "prompt_cache_retention": "24h",
    }),
    *harmless((MESSAGES,), _CACHE, {"cache_control": {"type": "ephemeral"}}),
    *harmless(WRITING, _CONTEXT, {"n_keep": 4, "n_discard": 4}),
    *harmless(WRITING, _DRAFTS, {
        "prediction": {"type": "content", "content": "x"}, "draft_model": "a", "ngram_corpus_id": "a",
        "speculative.n_max": 4, "speculative.n_min": 0, "speculative.p_min": 0.5, "speculative.type": "none",
        "backend_sampling": True,
    }),
    *harmless(WRITING, _CLUSTER, {
        "kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1}, "bootstrap_host": "a",
        "bootstrap_port": 1, "bootstrap_room": 1, "routed_dp_rank": 0, "disagg_prefill_dp_rank": 0,
        "data_parallel_rank": 0,
    }),
    *harmless(WRITING, "a model stays loaded until another one needs the memory", {"ttl": 60}),
    honoured(OLLAMA, "keep_alive", "0 unloads the model after the answer. With others it stays loaded until "
             "another model needs the memory.", 0),
    *harmless((OLLAMA_EMBED, OLLAMA_EMBEDDINGS), "a model stays loaded until another one needs the memory",
              {"keep_alive": "5m"}),
    *of_options(harmless(OLLAMA, _LOADED, {
        "num_ctx": 4096, "num_batch": 512, "num_gpu": 1, "main_gpu": 0, "low_vram": False, "f16_kv": True,
        "logits_all": False, "vocab_only": False, "use_mmap": True, "use_mlock": False, "num_thread": 1,
        "numa": False, "embedding_only": False, "num_gqa": 1, "rope_frequency_base": 1.0,
        "rope_frequency_scale": 1.0,
    })),
    *of_options(harmless(OLLAMA, _CONTEXT, {"num_keep": 4})),
)  # fmt: skip


def _looked_at(rows: tuple[Field, ...], api: str, by: str) -> Rows:
    """Yields the rows of a route that takes the bodies of another one, `api`, and looks at the prompt "
    "alone."""
    for row in rows:
        if api in row.apis:
            idle = row.state is State.HONOURED and not row.prompt
            state, why = (State.HARMLESS, "it changes no prompt") if idle else (row.state, row.why)
            yield replace(row, apis=(by,), state=state, why=why)


_ASKED = (*CONVERSATION, *PROMPTS, *LENGTH, *CHOICES, *SAMPLING, *OTHER_SAMPLING, *CONSTRAINTS, *THOUGHTS,
          *TOLD, *EMBEDDING, *REST)  # fmt: skip
TABLE: tuple[Field, ...] = (
    *_ASKED,
    *_looked_at(_ASKED, CHAT, TEMPLATE),
    *_looked_at(_ASKED, MESSAGES, COUNT),
)


def _by_name() -> dict[str, dict[str, Field]]:
    found: dict[str, dict[str, Field]] = {}
    for row in TABLE:
        for api in row.apis:
            rows = found.setdefault(api, {})
            if row.name in rows:
                raise ValueError(f"{api} has {row.name} twice")
            rows[row.name] = row
    return found


ROWS = _by_name()  # The rows of each API, by name.
_OBJECTS = {api: {name.rpartition(".")[0] for name in rows} - {""} for api, rows in ROWS.items()}


# ---- checks


def checked(api: str, body: dict[str, Any]) -> list[str]:
    """Checks a body's fields by the table: makes whole numbers ints, and gives fields their first names.
    Returns the names that the API does not have. Raises Refused where a field is refused, or out of its
    bounds."""
    rows, unknown = ROWS[api], list[str]()
    for name, value in _fields(api, body):
        row = rows.get(name)
        if row is None:
            unknown.append(name)
        elif row.state is State.REFUSED:
            if value not in row.neutral:
                raise refuse(f"{name} is not supported: {row.why}", name)
            outer, _, inner = name.rpartition(".")
            (body[outer] if outer in body else body).pop(inner if outer in body else name)
        elif row.state is State.HONOURED and value is not None:
            _take(body, row, value)
    return unknown


def in_header(names: Sequence[str]) -> str:
    """Returns names as the header lists them."""
    told = [re.sub(r"[^!-+\--~]", "?", name[:MAX_NAME]) for name in names[:MAX_TOLD]]
    return ", ".join(told + ["..."] * (len(names) > MAX_TOLD))


def _fields(api: str, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a body, those of its objects by their whole names."""
    for name, value in list(body.items()):
        if name in ROWS[api] or name not in _OBJECTS[api]:
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in list(value.items()))
        elif value is not None:
            raise refuse(f"{name} is no object", name)


def _take(body: dict[str, Any], row: Field, value: Any) -> None:
    if row.values:
        value = _meant(row, value)
    if row.whole and isinstance(value, float):
        if not value.is_integer():
            raise refuse(f"{row.name} is {value}: it has to be a whole number", row.name)
        value = int(value)
    if row.bounds and type(value) in (int, float):
        low, high = row.bounds
        if not low <= value <= high:
            raise refuse(f"{row.name} is {value}: it has to be from {low} to {high}", row.name)
    *outer, last = (row.target or row.name).split(".")
    at = body
    for name in outer:
        at[name] = {} if at.get(name) is None else at[name]
        at = at[name] if isinstance(at[name], dict) else {}  # What is no object is refused itself.
    if not row.target or at.get(last) is None:  # What is given by its own name comes first.
        at[last] = value


def _meant(row: Field, value: Any) -> Any:
    for known, meant in row.values:
        if type(value) is type(known) and value == known:
            return meant
    listed = ", ".join(str(known) for known, _ in row.values)
    raise refuse(f"{row.name} is {value!r}: it has to be one of {listed}", row.name)
