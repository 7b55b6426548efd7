"""Reads what recorder.py wrote and what the server's log says of it, and judges the turns of one agent.

Run it as `python recorded.py FOLDER AGENT [images]`, FOLDER being that of a run. It prints what it saw, and fails where
an agent's calls came back changed, a tool failed, or an image was not seen or encoded again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from script import SIZE, calls

THOUGHTS = "reasoning", "reasoning_content", "encrypted_content", "thinking", "signature"
ROWS = SIZE[0] * SIZE[1] // 1024


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yields all objects within a body."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(each)


def images_of(body: Any) -> int:
    return sum(part.get("type") in ("input_image", "image_url", "image") for part in parts(body))


def calls_of(body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the calls of a conversation, as a client sends them back in its API's form."""
    found = []
    for part in parts([body.get("input", []), body.get("messages", [])]):
        if part.get("type") == "function_call":
            found.append((part["name"], json.loads(part["arguments"])))
        elif part.get("type") == "tool_use":
            found.append((part["name"], part["input"]))
        elif part.get("type") == "function":
            found.append((part["function"]["name"], json.loads(part["function"]["arguments"])))
    return found


def errors_of(body: dict[str, Any]) -> list[Any]:
    return [part for part in parts(body.get("messages", [])) if part.get("is_error")]


def turns_of(folder: Path, agent: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the numbers of an agent's turns and what it sent. Requests without tools ask for titles."""
    found = []
    for path in sorted((folder / "recorded").glob("*.json")):
        request = json.loads(path.read_text())
        if request["body"].get("tools") and f"SAY {agent}" in json.dumps(request["body"]):
            found.append((path.stem, request))
    return found


def main() -> None:
    work, agent, *images = sys.argv[1:]
    folder, told = Path(work), {}
    for line in (folder / "server.log").read_text().splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            told[record.get("id")] = record
    turns = [(request["body"], told[number]) for number, request in turns_of(folder, agent)]
    expected = calls(folder / "files", bool(images))[agent]
    assert len(turns) == len(expected) + 1, f"{len(turns)} turns"
    for n, (body, record) in enumerate(turns):
        assert record["status"] == 200 and calls_of(body) == expected[:n], f"turn {n}: {calls_of(body)}"
        assert not errors_of(body), f"turn {n}: {errors_of(body)}"
    shown = [(images_of(body), record.get("images", 0), record.get("encoded", 0)) for body, record in turns]
    if images:
        assert shown == [(0, 0, 0), (1, 1, 1), *[(1, 1, 0)] * (len(turns) - 2)], shown
        before, seen, after = (record for _, record in turns[:3])
        assert seen["prompt"] > before["prompt"] + ROWS, "its rows are no part of the prompt"
        assert after["cached"] > before["prompt"] + ROWS - 128, "its rows were read again"
        print(f"    image parts, images, encoded by turn: {shown}")
    thoughts = {kind for part in parts(turns[-1][0]) for kind in THOUGHTS if kind in (part.get("type"), *part)}
    print(f"    thoughts by turn: they come back as {', '.join(sorted(thoughts)) or 'nothing'}")
    print(f"    prompt, cached by turn: {[(record['prompt'], record['cached']) for _, record in turns]}")


if __name__ == "__main__":
    main()
