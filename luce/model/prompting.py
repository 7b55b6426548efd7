"""Requests of what users write: text, tokens or messages, tools, and options."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any

from luce.decode.request import Request
from luce.errors import ArgumentError, ContextFull, FileError, UnsupportedError, about
from luce.images.opening import MAX_BYTES
from luce.images.pixels import Picture
from luce.images.sight import Placed, Sight, marks_of, with_places
from luce.model.defaults import penalties_of, sampling_of
from luce.model.loaded import Loaded
from luce.model.options import Chosen, How, HowChat, Image, chosen
from luce.planning.opened import Files
from luce.prompts.scorer import Scorer, longest_of
from luce.text.conversation import arguments_of, ordered
from luce.text.dialects import QWEN, Opening
from luce.text.held import Held
from luce.text.prompt import BoundedTemplate, chat_template, opening_of, prompt_ids
from luce.text.speech import Speech
from luce.text.structured import Constraint, Grammar, JsonSchema
from luce.text.tool import Tool

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, with the fields that chat templates read.
Schema = Mapping[str, Any] | str  # A JSON schema, or its text.
MAX_TOKENS, MAX_CHAT_TOKENS = 512, 2048  # So many tokens follow at most where nothing was said.
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Asked:
    """A request, and the parser of its answer; without one, text is text."""

    request: Request
    parser: Speech | None = None


class Prompting:
    """Makes requests for one model, in any thread. It is a context manager."""

    def __init__(
        self, files: Files, loaded: Loaded, sight: Sight | None = None, scorer: str | Path | None = None
    ):
        self._files, self._loaded, self._tokenizer, self._sight = files, loaded, files.tokenizer, sight
        self._closed = False
        self._template: BoundedTemplate | None = None
        self._turn = Lock()  # A template renders one prompt at a time.
        self._opened = ExitStack()
        self._scorer: Scorer | None = None
        if scorer is not None:
            how = loaded.engine.plan
            longest = longest_of(files.facts.context_length, loaded.info.n_ctx)
            self._scorer = self._opened.enter_context(
                Scorer(scorer, files.tokenizer, files.file.kv, longest, files.device, how.threads)
            )

    # ---- text

    def text(self, prompt: str | Sequence[int], schema: Schema | None, how: How) -> Asked:
        """Returns the request that continues a text, or tokens. Raises ArgumentError, ContextFull, and TypeError
        for an option that there is not."""
        options = chosen(how, self._tokenizer.n_vocab, MAX_TOKENS)
        ids, images = self.tokens(prompt, self._longest(options.keep)), _images_of(how)
        if images:
            ids = with_places(ids, len(images), self._marks(), self._tokenizer.bos_id)
        placed = self._placed(ids, images)
        return Asked(self._request(placed, options, Held(constraint=_constraint(schema, options))))

    def beginning(self, beginning: str | Sequence[Message], tools: Sequence[Tool]) -> Asked:
        """Returns the request that reads a beginning, of a text or of messages with `tools`."""
        options = chosen({"max_tokens": 0}, self._tokenizer.n_vocab, MAX_TOKENS)
        if isinstance(beginning, str):
            return Asked(self._request(Placed(self.tokens(beginning), []), options, Held()))
        said = said_of(beginning)
        ids = self._rendered(said, tools, {"add_generation_prompt": False})
        return Asked(self._request(self._placed(ids, images_among(said)), options, Held()))

    def tokens(self, prompt: str | Sequence[int], most: int | None = None) -> list[int]:
        """Returns the tokens of a text, which begin with the model's first token where it has one, or tokens as
        they are: at most so many, or a context."""
        most, n_vocab = most or self._loaded.info.n_ctx, self._tokenizer.n_vocab
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt, special=False, add_bos=True, most=most)
        elif isinstance(prompt, bytes | bytearray) or not _is_of(Integral, prompt):
            raise ArgumentError(f"the prompt is {prompt!r:.80}: it is a text, or token ids")
        else:
            ids = [int(token) for token in prompt]
            for token in ids:
                if not 0 <= token < n_vocab:
                    raise ArgumentError(f"the prompt has the token {token}, which is none of the model's {n_vocab}")
        return self._fitting(ids, most)

    # ---- conversations

    def chat(self, messages: Sequence[Message], how: HowChat) -> Asked:
        """Returns the request that answers messages. Raises as text() does, UnsupportedError where the file has
        no chat template, and TemplateFailed where it refuses them."""
        options = chosen(how, self._tokenizer.n_vocab, MAX_CHAT_TOKENS, self._recommended, HowChat)
        declared = [tool_of(tool) for tool in how.get("tools", ())]
        tool_choice, think = how.get("tool_choice", "auto"), how.get("think")
        names = [tool.name for tool in declared]
        if tool_choice not in ("auto", "none", "required", *names):
            raise ArgumentError(f"tool_choice is {tool_choice!r:.80}: it is auto, none, required or a tool's name")
        if tool_choice not in ("auto", "none") and not declared:
            raise ArgumentError(f"tool_choice is {tool_choice}, and there are no tools")
        held = Held(declared, tool_choice, constraint=_constraint(how.get("schema"), options))
        shown = [] if tool_choice == "none" else declared
        said, most = said_of(messages, _images_of(how)), self._longest(options.keep)
        ids = self._rendered(said, shown, {} if think is None else {"enable_thinking": think}, most)
        if think is not None and ids == self._rendered(said, shown, {"enable_thinking": not think}, most):
            raise UnsupportedError(f"think is {think}, which the chat template cannot turn on or off: leave it None")
        placed = self._placed(ids, images_among(said))
        opening = opening_of(self._tokenizer, placed.tokens)
        return Asked(self._request(placed, options, held, opening), held.parser(opening))

    def _rendered(
        self, said: Sequence[Message], tools: Sequence[Tool], how: Mapping[str, Any], most: int | None = None
    ) -> list[int]:
        """Returns the tokens of a conversation, as the chat template writes it, with one for each image: at most so
        many, or a context. `how` is as in prompt_ids."""
        shown, most = [tool.as_template for tool in tools] or None, most or self._loaded.info.n_ctx
        image = self._marks() if images_among(said) else ()
        with self._turn, about(self._files.file.path):
            if self._template is None:
                self._template = chat_template(self._files.file.kv)
                self._opened.callback(self._template.close)
            given = said, shown, most, False, True, image
            ids = prompt_ids(self._template, self._tokenizer, *given, **how)
        return self._fitting(ids, most)

    # ---- images

    def _marks(self) -> tuple[int, int, int]:
        if self._sight is None:
            raise ArgumentError("the model was loaded without mmproj, the file of its vision tower: it sees no images")
        return marks_of(self._tokenizer.control.get)

    def _placed(self, ids: list[int], images: Sequence[Image]) -> Placed:
        """Returns a prompt's tokens, with names in the places of images, which are opened."""
        if self._sight is None or not images:
            return Placed(ids, [])
        placed = self._sight.placed(ids, self._marks()[1], [self._picture(image) for image in images])
        self._fitting(placed.tokens, self._loaded.info.n_ctx)
        return placed

    def _picture(self, image: Image) -> Picture:
        assert self._sight is not None
        if isinstance(image, bytes):
            return self._sight.picture(image)
        path = Path(image)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise FileError(f"{path}: {error.strerror}") from error
        with about(path):
            return self._sight.picture(data)

    def _recommended(self) -> dict[str, Any]:
        """Returns what the file says of sampling in a chat, else what Qwen recommends."""
        with about(self._files.file.path):
            kv = self._files.file.kv
            return sampling_of(kv) | {f"{name}_penalty": value for name, value in penalties_of(kv).items()}

    # ---- both

    def _request(self, placed: Placed, options: Chosen, held: Held, opening: Opening | None = None) -> Request:
        """Returns a request, whose images are encoded here. Raises Cancelled where the model is closed meanwhile."""
        if options.keep is not None and placed.at:
            raise ArgumentError("prefill_keep: a prompt with images is read whole")
        images = self._sight.shown(placed, lambda part: self._closed) if self._sight else ()
        lark = None if held.is_free else held.lark(opening or Opening(QWEN))
        ids, kept = placed.tokens, None
        if options.keep is not None:
            assert self._scorer is not None  # _longest() has asked.
            kept = self._scorer.compressed(ids, options.keep, lambda: self._closed)
            ids = self._fitting(list(kept.of(ids)), self._loaded.info.n_ctx)
        return Request(
            tuple(ids),
            options.max_tokens,
            options.sampling,
            options.stops,
            options.ignore_eos,
            options.penalties,
            self._loaded.grammars.lark(lark) if lark else None,
            options.logprobs,
            images=images,
            compressed=kept,
        )

    def _longest(self, keep: float | None) -> int:
        """Returns how many tokens a prompt may have of which the share `keep` is read. ArgumentError: nothing chooses
        it."""
        if keep is None:
            return self._loaded.info.n_ctx
        if self._scorer is None:
            raise ArgumentError("prefill_keep: load the model with prefill_model, which chooses what is read")
        return self._scorer.n_ctx

    def _fitting(self, ids: list[int], n_ctx: int) -> list[int]:
        """Returns the tokens of a prompt, which an engine with so long a context can read. The rest of one that is far
        too long was not even encoded."""
        if not ids:
            raise ArgumentError("the prompt is empty")
        if len(ids) > n_ctx:
            trained = self._files.facts.context_length or n_ctx
            remedy = "luce.load with a larger ctx has room for more" if n_ctx < trained else "the model takes no more"
            raise ContextFull(f"a prompt of at least {len(ids)} tokens, a context of {n_ctx}: {remedy}")
        return ids

    def close(self) -> None:
        self._closed = True
        self._opened.close()


def _is_of(kind: type, values: object) -> bool:
    return isinstance(values, Sequence) and all(isinstance(each, kind) for each in values)


def _constraint(schema: Schema | None, options: Chosen) -> Constraint | None:
    if schema is not None and options.grammar is not None:
        raise ArgumentError("schema and grammar both say what the answer has to be: give one of them")
    if options.grammar is not None:
        return Grammar(options.grammar)
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"the schema is no JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise ArgumentError("the schema is no JSON object")
    return JsonSchema(dict(schema))


def tool_of(given: Mapping[str, Any]) -> Tool:
    """Returns a tool of {"name", "description", "parameters"}, which may stand below "function", as OpenAI's
    clients write it."""
    found = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        raise ArgumentError(f"a tool is {given!r:.80}: it is a mapping with a name and parameters")
    parameters = found.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ArgumentError(f"the parameters of {found['name']} are no JSON schema, which is an object")
    return Tool(found["name"], parameters, str(found.get("description") or ""), bool(found.get("strict")))


def message_of(given: Message) -> dict[str, Any]:
    """Returns a message as chat templates take it. The arguments of its calls may be JSON, as OpenAI's clients
    write them."""
    if not isinstance(given, Mapping) or given.get("role") not in ROLES:
        raise ArgumentError(f"a message is {given!r:.80}: it is a mapping whose role is one of {', '.join(ROLES)}")
    content = given.get("content")
    if isinstance(content, list | tuple):
        content = _parts_of(content, given["role"])
    elif content is not None and not isinstance(content, str):
        raise ArgumentError(f"the content of a message is {content!r:.80}: it is a text, or a list of parts")
    if content is None and given["role"] != "assistant":
        raise ArgumentError(f"a message is {given!r:.80}: it has no content, which is a text")
    found = {**given, "content": content or ""}
    if calls := given.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def said_of(messages: Sequence[Message], images: Sequence[Image] = ()) -> list[Message]:
    """Returns messages as chat templates take them, with `images` before the text of the user's newest one."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise ArgumentError(f"the messages are {messages!r:.80}: they are a list of messages")
    said = [message_of(each) for each in messages]
    if not said:
        raise ArgumentError("there are no messages")
    if images:
        newest = next((each for each in reversed(said) if each["role"] == "user"), None)
        if newest is None:
            raise ArgumentError("images are shown with a message of the user, and there is none")
        content = newest["content"]
        text = [{"type": "text", "text": content}] if isinstance(content, str) else content
        newest["content"] = [*({"type": "image", "image": image} for image in images), *text]
    return ordered(said)


def images_among(said: Sequence[Message]) -> list[Image]:
    """Returns the images of messages, in their order."""
    contents = (message["content"] for message in said)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if part["type"] == "image"]


def _images_of(how: How) -> list[Image]:
    """Returns the images among the options of a call."""
    given = how.get("images", ())
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise ArgumentError(f"images is {given!r:.80}: it is a list of files, or of their bytes")
    return [_image_of(each) for each in given]


def _image_of(given: object) -> Image:
    if not isinstance(given, str | bytes | PathLike):
        raise ArgumentError(f"an image is {given!r:.80}: it is the path of a file, or its bytes")
    return given


def _parts_of(parts: Sequence[Any], role: str) -> str | list[dict[str, Any]]:
    """Returns the parts of a content, or their text where there is no image among them."""
    found: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            found.append({"type": "text", "text": part["text"]})
        elif kind == "image":
            found.append({"type": "image", "image": _image_of(part.get("image"))})
        elif kind == "image_url":
            found.append({"type": "image", "image": _data_of(part.get("image_url"))})
        else:
            known = "text with a text, image with an image, image_url with a data URL"
            raise ArgumentError(f"a part of a content is {part!r:.80}: its type is one of {known}")
    if not any(part["type"] == "image" for part in found):
        return "".join(part["text"] for part in found)
    if role not in ("user", "tool"):
        raise ArgumentError(f"a message of the {role} has an image: those of users and tools may have some")
    return found


def _data_of(given: Any) -> bytes:
    """Returns the bytes of a data URL, which may stand below "url", as OpenAI's clients write it."""
    url = given.get("url") if isinstance(given, Mapping) else given
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    try:
        if head.startswith("data:") and head.lower().endswith(";base64"):
            return b64decode(data, validate=True)
    except ValueError:
        pass
    raise ArgumentError(f"the URL of an image is {url!r:.60}: it is a data URL in base64; luce fetches none")


def _call(given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ArgumentError(f"a call of a message is {given!r:.80}: it has a function with a name and arguments")
    return {**given, "function": {**function, "arguments": arguments_of(function.get("arguments"))}}
