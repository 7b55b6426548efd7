#!/usr/bin/env python3
"""Writes docs/server-fields.md, the page of the fields that requests may have, from the table of the server.

    python tools/make_field_page.py            # writes the page
    python tools/make_field_page.py --check    # exits 1 where the page is not what the table says
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # luce, where it is not installed.

from luce.server.api.fields import (
    CHAT,
    COMPLETIONS,
    COUNT,
    DETOKENIZE,
    EMBEDDINGS,
    HEADER,
    INFILL,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
    OLLAMA_SHOW,
    RESPONSES,
    ROWS,
    TEMPLATE,
    TOKENIZE,
    Field,
    State,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "server-fields.md"
LIKE = {TEMPLATE: CHAT, COUNT: MESSAGES}  # These take the bodies of others, and look at the prompt alone.
ORDER = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, INFILL, EMBEDDINGS,
         OLLAMA_EMBED, OLLAMA_EMBEDDINGS, TOKENIZE, DETOKENIZE, TEMPLATE, COUNT, OLLAMA_SHOW)  # fmt: skip
HEAD = f"""# Fields of requests

Made by `tools/make_field_page.py` from the table in `luce/server/api/fields.py`, which the server checks
bodies by. A field that is refused gets status 400 and an error that names it, unless its value asks for
nothing: null, and mostly false, 0, an empty text or list, and the value that turns it off. Names that are not
listed are ignored: the log says so once, and the answer's header `{HEADER}` names them. A dot leads into an
object. Whole numbers may be written as 5.0.
"""


def page() -> str:
    """Returns the page's text."""
    missing = ROWS.keys() - set(ORDER)
    if missing:
        raise SystemExit(f"make_field_page.py lacks {sorted(missing)}")
    return "\n".join([HEAD, *(line for api in ORDER for line in section(api))]).rstrip() + "\n"


def section(api: str) -> Iterator[str]:
    yield f"## {api}\n"
    rows = list(ROWS[api].values())
    if api in LIKE:
        acting = sorted(row.name for row in rows if row.state is State.HONOURED)
        yield f"Takes the body of {LIKE[api]}, and refuses what that refuses. These act: {names(acting)}."
        yield ""
        return
    yield "| field | what it does |"
    yield "|---|---|"
    for row in sorted(of(rows, State.HONOURED), key=lambda row: row.name):
        yield f"| `{row.name}` | {escaped(row.why + bounds(row))} |"
    for state, head in ((State.REFUSED, "Refused"), (State.HARMLESS, "Taken, and without effect")):
        reasons: dict[str, list[str]] = {}
        for row in of(rows, state):
            reasons.setdefault(row.why, []).append(row.name)
        if reasons:
            yield f"\n{head}:\n"
        for why, listed in sorted(reasons.items(), key=lambda each: min(each[1])):
            yield f"- {names(sorted(listed))}: {why}"
    yield ""


def of(rows: list[Field], state: State) -> list[Field]:
    return [row for row in rows if row.state is state]


def names(listed: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in listed)


def bounds(row: Field) -> str:
    """Returns what values a field may have."""
    if row.values:
        return f" One of {', '.join(str(known).lower() for known, _ in row.values)}."
    if not row.bounds or row.target:
        return ""
    low, high = row.bounds
    return f" At least {low}." if abs(high) >= 2**31 - 1 else f" From {low} to {high}."


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        raise SystemExit(f"{PAGE} is not what the table says: run tools/make_field_page.py")
