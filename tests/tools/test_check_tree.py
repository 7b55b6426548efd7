"""Runs tools/check_tree.py: each rule fires on a small bad tree, and its near misses pass."""

from pathlib import Path

import check_tree
import pytest


def breaches(root: Path, files: dict[str, str]) -> list[tuple[str, int, str]]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return check_tree.check_tree(root)


BAD = {
    "getenv_in_core": ("native/src/a.cpp", '\nauto x = std::getenv("A");\n', 2, "environment variables"),
    "setenv_in_core": ("native/src/a.cpp", 'int x = setenv("A", "1", 1);\n', 1, "environment variables"),
    "core_prints": ("native/src/a.cpp", 'void f() { fprintf(stderr, "x"); }\n', 1, "prints nothing"),
    "core_aborts": ("native/src/a.cpp", "void f() {\n    std::abort();\n}\n", 2, "never exits"),
    "kernel_uses_ggml": ("native/kernels/a.cu", '\n#include "ggml-impl.h"\n', 2, "no ggml headers"),
    "kernel_header_uses_ggml": ("native/kernels/a.cuh", "# include <ggml.h>\n", 1, "no ggml headers"),
    "another_wait": ("native/src/a.cpp", "int x = cudaStreamSynchronize(s);\n", 1, "where it is counted"),
    "a_wait_of_our_own": ("native/src/a.cpp", "int x = cuda::finish_event(e);\n", 1, "where it is counted"),
    "fourth_wait": (
        "native/src/step/step.cpp",
        "int a = cuda::finish(b);\n" * 3 + "int c = ggml_backend_tensor_get(t);\n",
        4,
        "where it is counted",
    ),
    "a_device_beside_stages": (
        "native/src/step/a.cpp",
        "\nint n = model.placements().size();\n",
        2,
        "devices and streams are a stage's",
    ),
    "a_stream_beside_stages": ("native/src/engine/a.cpp", "f(luce_cuda_stream(b));\n", 1, "are a stage's"),
    "common_folder": ("native/common/a.cpp", "", 1, "no common/"),
    "utils_folder": ("luce/utils/a.py", "", 1, "utils"),
    "utils_file": ("luce/utils.py", "", 1, "utils"),
    "internal_header": ("native/src/internal.h", "", 1, "internal.h"),
    "a_test_imports_another": ("tests/a/test_b.py", "\nfrom a.test_c import made\n", 2, "tests/support"),
    "top_level_file": ("setup.py", "", 1, "setup.py does not belong"),
    "top_level_folder": ("notes/a.md", "", 1, "notes does not belong"),
}


@pytest.mark.parametrize("name,text,line,what", BAD.values(), ids=BAD)
def test_rule_fires(tmp_path, name, text, line, what):
    found = breaches(tmp_path, {name: text})
    assert [(path, at) for path, at, _ in found] == [(name, line)]
    assert what in found[0][2]


GOOD = {
    "README.md": "",
    "docs/a.md": "",
    "native/kernels/common/a.cuh": "",
    "native/src/engine/stage.cpp": "int n = model.placements().size() + f(luce_cuda_stream(b));\n",
    ".ci/run": "",
    "tests/a/test_b.py": "from support import made\nTEXT = 'x'\n",
    ".gitignore": "",
    "LICENSE": "",
    "native/src/model/a.cpp": '// no getenv\n#define setenv\nint f() { g("getenv", "{"); return 1\'000; }\n',
    "native/src/a.cpp": "\n".join(
        [
            "namespace luce {",
            '#define OPEN f() {',
            'const char *text = R"(void f() { abort(); )";',
            "int aborted = exits(1); // abort()",
            "} // namespace luce",
            "",
        ]
    ),
    "native/kernels/a.cu": '// #include "ggml.h"\n#include "kernels.h"\n',
}


def test_near_misses_pass(tmp_path):
    assert breaches(tmp_path, GOOD) == []


def test_an_architecture_is_named_in_its_own_files_and_the_table(tmp_path):
    files = {
        "native/src/graph/gemma4.cpp": "int Gemma4;\n",
        "native/src/graph/dflash.cpp": 'int gemma3 = of("gemma4-dflash-draft");\n',
        "native/src/graph/architecture.cpp": '#include "graph/gemma4.h"\nint row = GEMMA4;\n',
        "native/src/step/step.cpp": '#  include "gemma4.h"\nint dflash;\n',
        "luce/convert/gemma4_names.py": "gemma4 = 1\n",
        "luce/convert/cli.py": "from luce.convert import gemma4_names as model\nis_gemma4 = 1\n",
        "luce/files/tokenizer.py": 'kind == "gemma4"\n',
        "luce/cli/terminal.py": "from luce.files import gemma4_names as model\n",
        "tests/test_x.py": "gemma4 = 1\n",
    }
    assert breaches(tmp_path, files) == []
    bad = {"native/src/step/step.cpp": "\nint GEMMA4;\n", "luce/files/probe.py": 'x = "gemma4"\n'}
    found = breaches(tmp_path, bad)
    found = [(path, at) for path, at, _ in found]
    assert found == [("luce/files/probe.py", 1), ("native/src/step/step.cpp", 2)]


def test_the_engine_and_its_steps_name_no_drafter(tmp_path):
    files = {
        "native/src/graph/drafter.cpp": '#include "graph/eagle.h"\nauto row = EAGLE;\n',
        "native/src/graph/eagle.cpp": "int eagle;\n",
        "native/src/abi/library.cpp": "int drafter;\n",
    }
    assert breaches(tmp_path, files) == []
    bad = {"native/src/step/step.cpp": "\nint n_EAGLE;\n", "native/src/engine/round.h": "// an Eagle head\n"}
    found = [(path, at) for path, at, _ in breaches(tmp_path, bad)]
    assert found == [("native/src/engine/round.h", 1), ("native/src/step/step.cpp", 2)]


def test_exit_status_and_report(tmp_path, capsys):
    assert breaches(tmp_path, {"luce/a.py": ""}) == []
    assert check_tree.main([str(tmp_path)]) == 0
    (tmp_path / "setup.py").write_text("")
    assert check_tree.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "setup.py:1: setup.py does not belong at the top level\n"


def test_this_tree_keeps_the_rules():
    root = Path(check_tree.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        pytest.skip("not a git checkout: built files cannot be told from ours")
    assert check_tree.check_tree(root) == []
