"""Has a Python library do a turn with a tool, in each way that it knows: the tool writes a file.

Run it as `python libraries.py litellm|langchain|instructor|ollama URL`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

PROPERTIES = {"path": {"type": "string"}, "content": {"type": "string"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}
TOOL = {
    "type": "function",
    "function": {"name": "write", "description": "Writes a file.", "parameters": SCHEMA},
}
MODEL, KEY = "scripted", "local"


def write(path: str, content: str) -> str:
    """Writes a file."""
    Path(path).write_text(content)
    return "written"


def asked(name: str) -> dict[str, str]:
    return {"role": "user", "content": f"Please SAY {name}"}


def litellm(url: str) -> str:
    import litellm

    texts = []
    for model, base in (
        ("openai", f"{url}/v1"),
        ("hosted_vllm", f"{url}/v1"),
        ("anthropic", url),
        ("ollama_chat", url),
    ):
        how: dict[str, Any] = {"model": f"{model}/{MODEL}", "api_base": base, "api_key": KEY, "tools": [TOOL]}
        messages: list[Any] = [asked("litellm")]
        message = litellm.completion(messages=messages, **how).choices[0].message
        (call,) = message.tool_calls
        result = write(**json.loads(call.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        texts.append(litellm.completion(messages=messages, **how).choices[0].message.content)
        streamed = litellm.completion(messages=messages, stream=True, **how)
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in streamed))
    return same(texts)


def langchain(url: str) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    texts = []
    for how in ({}, {"use_responses_api": True}, {"use_responses_api": True, "output_version": "v1"}):
        model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY, **how).bind_tools([write])
        messages: list[Any] = [HumanMessage(asked("langchain")["content"])]
        messages.append(model.invoke(messages))
        (call,) = messages[-1].tool_calls
        messages.append(ToolMessage(write(**call["args"]), tool_call_id=call["id"]))
        texts.append(model.invoke(messages).text)
        texts.append("".join(chunk.text for chunk in model.stream(messages)))
    return same(texts)


def instructor(url: str) -> str:
    import instructor
    import openai
    import pydantic

    class Write(pydantic.BaseModel):
        path: Literal["instructor.txt"]
        content: Literal["copied by instructor"]

    openai_client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
        Path("instructor.txt").unlink(missing_ok=True)
        client = instructor.from_openai(openai_client, mode=mode)
        how = {
            "max_output_tokens" if mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens": 400,
            "max_retries": 0,
        }
        found = client.create(model=MODEL, response_model=Write, messages=[asked("instructor")], **how)
        write(found.path, found.content)
    return "instructor is done."


def ollama(url: str) -> str:
    import ollama

    client = ollama.Client(url)
    listed = {model.model: model.digest for model in client.list().models}
    assert [*listed] == [MODEL] and len(listed[MODEL] or "") == 64, listed
    assert client.show(f"{MODEL}:latest").capabilities
    texts = []
    for think in (None, False, True, "low"):
        messages: list[Any] = [asked("ollama")]
        how: dict[str, Any] = {"model": f"{MODEL}:latest", "tools": [write], "think": think}
        message = client.chat(messages=messages, **how).message
        (call,) = message.tool_calls or ()
        messages += [message, {"role": "tool", "tool_name": "write", "content": write(**arguments(call))}]
        texts.append(client.chat(messages=messages, **how).message.content)
        texts.append(
            "".join(part.message.content or "" for part in client.chat(messages=messages, stream=True, **how))
        )
    client.generate(MODEL, keep_alive=0)
    assert not client.ps().models
    return same(texts)


def arguments(call: Any) -> Mapping[str, str]:
    found: Mapping[str, str] = call.function.arguments
    return found


def same(texts: list[str]) -> str:
    """Returns the text that each way gave."""
    (text,) = set(texts)
    return text


if __name__ == "__main__":
    name, url = sys.argv[1:]
    print({"litellm": litellm, "langchain": langchain, "instructor": instructor, "ollama": ollama}[name](url))
