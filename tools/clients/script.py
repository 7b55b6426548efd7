"""Writes what the model says to each client, and what agents read: FOLDER/files/in.txt, or an image for each.

An agent thinks, reads a file by its own tool, writes another, calls a tool with a nested argument, and is done; a
library writes one.
Run it as `python script.py FOLDER qwen|gemma [images]`: with `images` agents read theirs. The script goes to stdout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

AGENTS = ("codex", "opencode", "claude", "pi")
LIBRARIES = ("aisdk", "litellm", "langchain", "ollama")
SIZE = 640, 512  # Of 320 tokens, whatever they hold.
THOUGHTS = {"qwen": "<think>\nIt has a file.\n</think>\n\n", "gemma": "<|channel>thought\nIt has a file.\n<channel|>"}
TASK = {"from": "in.txt", "sizes": [1, 2.5], "kept": True, "by": None, "note": {"quoted": 'a "b", {c: [d]}'}}


def spelled(value: Any) -> str:
    """Spells a value as Gemma 4 does."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spelled(each)}" for key, each in value.items()) + "}"
    return "[" + ",".join(map(spelled, value)) + "]" if isinstance(value, list) else json.dumps(value)


def call(dialect: str, name: str, values: dict[str, Any]) -> str:
    if dialect == "gemma":
        return f"<|tool_call>call:{name}{spelled(values)}<tool_call|>"
    words = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in values.items())
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in words)
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


def calls(folder: Path, images: bool) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Returns the calls of each agent: the name of a tool and its arguments."""
    read = {name: str(folder / (f"{name}.png" if images else "in.txt")) for name in AGENTS}
    out = {name: str(folder / f"{name}.txt") for name in AGENTS}
    look = ("view_image", {"path": read["codex"]}) if images else ("exec_command", {"cmd": f"cat {read['codex']}"})
    again = {"cmd": f"cat {out['codex']}", "yield_time_ms": 2500, "tty": False, "prefix_rule": ["cat", "a \"b\", {c}"]}
    todos = [{"content": text, "status": "completed", "priority": "high"} for text in ("read", 'write "{a: [b]}"')]
    return {
        "codex": [look, ("exec_command", {"cmd": f"echo copied by codex > {out['codex']}"}), ("exec_command", again)],
        "opencode": [
            ("read", {"filePath": read["opencode"]}),
            ("write", {"content": "copied by opencode", "filePath": out["opencode"]}),
            ("todowrite", {"todos": todos}),
        ],
        "claude": [
            ("Read", {"file_path": read["claude"]}),
            ("Write", {"file_path": out["claude"], "content": "copied by claude"}),
            ("TaskCreate", {"subject": "Copy", "description": "Copy a file.", "metadata": TASK}),
        ],
        "pi": [
            ("read", {"path": read["pi"]}),
            ("write", {"path": out["pi"], "content": "copied by nobody"}),
            ("edit", {"path": out["pi"], "edits": [{"oldText": "nobody", "newText": "pi"}]}),
        ],
    }


def script(folder: Path, dialect: str, images: bool) -> dict[str, list[str]]:
    said = {}
    for name, (first, *others) in calls(folder, images).items():
        texts = [call(dialect, *each) for each in others]
        begun = f"{THOUGHTS[dialect]}I read the file.\n\n{call(dialect, *first)}"
        said[name] = [begun, *texts, f"{name} is done."]
    for name in LIBRARIES:
        write = call(dialect, "write", {"path": str(folder / f"{name}.txt"), "content": f"copied by {name}"})
        said[name] = ["I write it.\n\n" + write, f"{name} is done."]
    return said


def write_files(folder: Path, images: bool) -> None:
    (folder / "in.txt").write_text("the input\n")
    if images:
        from PIL import Image

        for n, name in enumerate(AGENTS):
            Image.linear_gradient("L").resize(SIZE).convert("RGB").rotate(90 * n).save(folder / f"{name}.png")


if __name__ == "__main__":
    work, dialect, *images = sys.argv[1:]
    write_files(Path(work) / "files", bool(images))
    print(json.dumps(script(Path(work) / "files", dialect, bool(images))))
