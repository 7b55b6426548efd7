"""Writes tests/goldens/agents.json: what agents sent in runs of tools/clients.sh. The tests ask a server the same.

Long words of the clients are cut, and ids of the machine left out; calls, results and images are as they were sent.
Run it as `python keep.py qwen=FOLDER gemma=FOLDER`: the folders of runs with --images and with --dialect gemma.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from recorded import turns_of
from script import AGENTS

OUT = Path(__file__).resolve().parents[2] / "tests" / "goldens" / "agents.json"
LONGEST = 80
WHOLE = ("url", "image_url", "data", "arguments", "signature", "encrypted_content")  # None of these is cut.
OF_MACHINE = ("metadata", "client_metadata", "prompt_cache_key")


def shortened(value: Any, key: str, folder: str) -> Any:
    """Returns a body's value with its long texts cut, and with /run for the folder of the run."""
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if name not in OF_MACHINE or key}
        return {name: shortened(each, name, folder) for name, each in kept.items()}
    if isinstance(value, list):
        return [shortened(each, key, folder) for each in value]
    if not isinstance(value, str):
        return value
    value = value.replace(folder, "/run")
    return value if key in WHOLE or len(value) <= LONGEST else value[:LONGEST] + "..."


def main() -> None:
    made: dict[str, dict[str, Any]] = {name: {} for name in AGENTS}
    for word in sys.argv[1:]:
        dialect, _, folder = word.partition("=")
        for name, kept in made.items():
            for _, request in turns_of(Path(folder), name):
                body = shortened(request["body"], "", str(Path(folder).resolve()))
                tools = body.pop("tools")
                if kept.setdefault("tools", tools) != tools:
                    raise SystemExit(f"{name}: its tools change between turns")
                kept["path"] = request["path"]
                kept.setdefault(dialect, []).append(body)
    OUT.write_text(json.dumps(made, indent=0, ensure_ascii=False) + "\n")
    print(f"{OUT}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
