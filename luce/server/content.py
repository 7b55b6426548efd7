"""Content of messages, in every API's parts, as text for a model that reads text alone.

Text, text documents and search results are read; an image, another document or a part that nobody knows
becomes a short note in its place, so that a conversation with one goes on. Only an image in the newest
message of a user is refused: an answer about it would be made up.

A model with a vision tower gets images of users and of tools as parts of their own (content_of): bytes, which came in
base64 or data URLs, or addresses, of which Served fetches those that are allowed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from luce.server.ask import refuse

TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
KINDS = {  # Notes name these parts so.
    **dict.fromkeys(("image", "image_url", "input_image", "image_file", "computer_screenshot"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
}
READABLE = (
    "application/json",
    "application/xml",
    "application/yaml",
    "application/x-yaml",
    "application/javascript",
    "application/toml",
)  # Beside text/*, documents of these types are text.
LINE_ENDS = {ord("\r"): None, ord("\n"): None}  # The command base64 writes them.
OPAQUE = ("type", "encrypted_content", "encrypted_index")  # They say nothing to a model.


def text_of(content: Any, param: str, between: str = "") -> str:
    """Returns the text of a message's content: of a string, or of a list of parts, with `between` them. What
    is no part of text stands on lines of its own. Thoughts are left out. Refused names `param` where content
    is neither."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    said, after_text = "", True
    for part in content if isinstance(content, list) else [content]:
        if (text := _told(part, param)) is None:
            continue
        is_text = _kind(part) in TEXTS
        if said:
            said += between or ("" if is_text and after_text or said.endswith("\n") else "\n")
        said, after_text = said + text, is_text
    return said


def content_of(
    content: Any, param: str, sees: bool, between: str = "", role: Any = "user"
) -> str | list[dict[str, Any]]:
    """Returns what text_of() does, or where the model `sees` and there are images, parts: {"type": "text", "text"}
    and {"type": "image"} with the bytes of one as "data" or its address as "url". Raises Refused where it has neither,
    and where the message is the system's. One of the assistant's is read as text."""
    content = [content] if sees and _is_image(content) else content
    if sees and role in ("system", "developer") and isinstance(content, list) and any(map(_is_image, content)):
        raise refuse(f"a message of the {role} has an image: those of users and tools may have some", param)
    sees = sees and role in ("user", "tool", "function")
    if not sees or not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, param, between)
    parts: list[dict[str, Any]] = []
    for image, group in groupby(content, _is_image):
        if image:
            parts += [{"type": "image", **_source_of(part, param)} for part in group]
        else:
            parts.append({"type": "text", "text": text_of(list(group), param, between)})
    return parts


def told_of(output: Any, param: str, sees: bool) -> str | list[dict[str, Any]]:
    """Returns what output_of() does, or parts as content_of() does."""
    held = output["content"] if isinstance(output, Mapping) and isinstance(output.get("content"), list) else output
    if sees and (_is_image(held) or (isinstance(held, list) and any(map(_is_image, held)))):
        return content_of(held, param, sees, "\n")
    return output_of(output, param)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and KINDS.get(_kind(part)) == "image"


def _source_of(part: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Returns where an image is from: Anthropic's source, OpenAI's URL, or Ollama's base64."""
    source, url = part.get("source"), part.get("image_url")
    data: Any = part.get("data")
    if isinstance(source, Mapping):
        url, data = source.get("url"), source.get("data")
    url = url.get("url") if isinstance(url, Mapping) else url
    if data is None and isinstance(url, str) and url.startswith("data:"):
        head, _, data = url.partition(",")
        data = data if head.lower().endswith(";base64") else None
    elif data is None and isinstance(url, str):
        return {"url": url}
    if not isinstance(data, str):
        raise refuse(f"an image is neither base64 nor a URL: {_kinds_of(part)}", param)
    try:
        return {"data": base64.b64decode(data.translate(LINE_ENDS), validate=True)}
    except ValueError as error:
        raise refuse(f"an image is no base64: {error}", param) from error


def _kinds_of(part: Mapping[str, Any]) -> str:
    """Returns what a part says that it is: "image of file"."""
    source = part.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    return f"{_kind(part)} of {kind}"[:64] if isinstance(kind, str) else _kind(part)[:64]


def thoughts_of(content: Any) -> str:
    """Returns the thoughts among the parts of an assistant's content."""
    thoughts = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and _kind(part) in ("thinking", "reasoning"):
            told = next(
                (part[key] for key in ("thinking", "reasoning", "text", "content") if part.get(key)), ""
            )
            thoughts.append(told if isinstance(told, str) else text_of(told, "messages"))
    return "\n".join(filter(None, thoughts))


def output_of(output: Any, param: str) -> str:
    """Returns what a tool answered as text: a string, parts, or any other JSON, which is spelled."""
    if isinstance(output, Mapping) and "content" in output and output.keys() <= {"content", "success"}:
        output = output["content"]  # codex wrapped its text so.
    parts = output if isinstance(output, list) else [output]
    if output is None or isinstance(output, str) or all(map(_is_part, parts)):
        return text_of(output, param, "\n")
    return _spelled(output)


def require_readable(turns: Iterable[tuple[str, Any]], param: str) -> None:
    """Raises Refused where the newest message of a user has an image of its own, and nobody has answered it
    yet. `turns` are the roles and contents of messages as they were sent; a last one of an assistant is a
    beginning of the answer."""
    left = list(turns)
    if left and left[-1][0] == "assistant":
        left.pop()
    for role, content in reversed(left):
        if role == "assistant":
            return
        if role == "user":
            parts = content if isinstance(content, list) else [content]
            if any(isinstance(part, Mapping) and KINDS.get(_kind(part)) == "image" for part in parts):
                raise refuse("the newest message has an image: this model reads text alone", param)
            return


def note_of(kind: str, name: Any = None) -> str:
    """Returns what stands for a part that the model cannot read: "[image: this model reads text alone]"."""
    told = " ".join(filter(None, [kind[:64], name[:256] if isinstance(name, str) else ""]))
    return f"[{' '.join(told.split())}: this model reads text alone]"


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else "text"


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and (
        isinstance(part.get("type"), str) or isinstance(part.get("text"), str)
    )


def _told(part: Any, param: str) -> str | None:
    """Returns a part as text, or None where it has nothing for a reader."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise refuse(f"a part is {part!r:.100}: neither text nor an object with a type", param)
    kind = _kind(part)
    if kind in TEXTS:
        text = part.get("text", part.get("refusal", ""))
        if not isinstance(text, str):
            raise refuse("the text of a part is no string", param)
        return text
    if kind in THOUGHTS:
        return None
    if KINDS.get(kind) == "document":
        return _document(part, param)
    if kind in KINDS:
        return note_of(KINDS[kind])
    if kind == "search_result":
        return _lines(part.get("title"), part.get("source"), text_of(part.get("content"), param, "\n"))
    if kind.endswith("tool_use"):
        return f"[{part.get('name')} {_spelled(part.get('input') or {})}]"
    if kind.endswith("tool_result"):
        return _result(part.get("content"), param)
    if isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part.get("content"), str | list):  # A summary of what was said before has it.
        return text_of(part["content"], param, "\n")
    return note_of(kind)


def _result(content: Any, param: str) -> str:
    """Returns what a server's tool found: addresses of pages, a page's text, or a program's output."""
    if not isinstance(content, Mapping):
        each = content if isinstance(content, list) else [content]
        return "\n\n".join(
            _result(one, param) if isinstance(one, Mapping) else text_of(one, param) for one in each
        )
    if _kind(content) in TEXTS or _kind(content) in KINDS:
        return text_of([content], param)
    if content.get("content"):
        return _lines(content.get("title"), content.get("url"), output_of(content["content"], param))
    if "url" in content:
        return _lines(content.get("title"), content["url"])
    return _spelled({key: value for key, value in content.items() if key not in OPAQUE})


def _document(part: Mapping[str, Any], param: str) -> str:
    """Returns the text of a document that has some: Anthropic's source, or OpenAI's data URL."""
    held = part["file"] if isinstance(part.get("file"), Mapping) else part
    name = next((held[key] for key in ("title", "filename") if held.get(key)), None)
    source: Mapping[str, Any] = held["source"] if isinstance(held.get("source"), Mapping) else {}
    text: str | None = None
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        text = source["data"]
    elif source.get("type") == "content":
        text = text_of(source.get("content"), param, "\n")
    elif source.get("type") == "base64":
        text = _decoded(str(source.get("media_type")), source.get("data"))
    elif isinstance(data := held.get("file_data"), str) and data.startswith("data:"):
        head, _, data = data.removeprefix("data:").partition(",")
        text = _decoded(head.partition(";")[0], data) if head.endswith(";base64") else None
    elif isinstance(held.get("text"), str):
        text = held["text"]
    return note_of("document", name) if text is None else _lines(name, held.get("context"), text)


def _decoded(media_type: str, data: Any) -> str | None:
    """Returns the text of a document in base64, or None where it is none."""
    kind = media_type.partition(";")[0].strip().lower()
    if not isinstance(data, str) or not (kind.startswith("text/") or kind in READABLE):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except ValueError:
        return None


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
