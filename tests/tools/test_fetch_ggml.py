"""Runs tools/fetch_ggml.py with small archives of its own making; the real one is used by every build."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import fetch_ggml
import pytest

FILES = {
    "ggml/CMakeLists.txt": b"project(ggml)\n",
    "ggml/src/ggml.c": b"int x;\n",
    "LICENSE": b"MIT\n",
    "models/ggml-vocab-qwen35.gguf": b"GGUF",
    "models/ggml-vocab-qwen35.gguf.inp": b"in",
    "models/ggml-vocab-qwen35.gguf.out": b"out",
    "src/llama.cpp": b"not for ggml\n",
}


def make_archive(path: Path, files: dict[str, bytes], links: dict[str, str] | None = None) -> str:
    """Makes a source distribution with these files below llama.cpp. Returns its sha256."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{fetch_ggml.SOURCE}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(f"{fetch_ggml.SOURCE}/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def archive(tmp_path, monkeypatch):
    path = tmp_path / "sdist.tar.gz"
    monkeypatch.setattr(fetch_ggml, "SHA256", make_archive(path, FILES))
    return path


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the script with a cache below tmp_path: status, stdout, the lines of stderr."""

    def run(*args: object) -> tuple[int, str, list[str]]:
        status = fetch_ggml.main(["--cache", str(tmp_path / "cache"), *map(str, args)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err.splitlines()

    return run


def refuse_download(folder: Path) -> Path:
    raise AssertionError("downloaded although the cache was complete")


def test_unpacks_ggml_license_and_vocabulary_only(archive, run, tmp_path):
    status, out, _ = run("--archive", archive)
    root = tmp_path / "cache" / f"ggml-{fetch_ggml.VERSION}"
    assert (status, out) == (0, f"{root / 'ggml'}\n")
    found = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    vocab = {f"vocab/ggml-vocab-qwen35.gguf{end}" for end in ("", ".inp", ".out")}
    assert found == {"ggml/CMakeLists.txt", "ggml/src/ggml.c", "LICENSE", "stamp.json"} | vocab
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [root.name]


def test_second_run_uses_the_cache(archive, run, monkeypatch):
    first = run("--archive", archive)
    monkeypatch.setattr(fetch_ggml, "download", refuse_download)
    assert run()[:2] == first[:2]


@pytest.mark.parametrize("damage", ["remove", "edit", "add", "stamp"])
def test_damaged_cache_is_replaced(archive, run, tmp_path, damage):
    run("--archive", archive)
    root = tmp_path / "cache" / f"ggml-{fetch_ggml.VERSION}"
    source = root / "ggml/src/ggml.c"
    if damage == "remove":
        source.unlink()
    elif damage == "edit":
        source.write_bytes(b"int y;\n")
    elif damage == "add":
        (root / "ggml/src/more.c").write_bytes(b"")
    else:
        (root / "stamp.json").write_text("[]")
    status, _, err = run("--archive", archive)
    assert status == 0 and "replacing it" in err[0]
    assert source.read_bytes() == b"int x;\n" and not (root / "ggml/src/more.c").exists()


def test_peer_unpacks_all_of_llama_cpp(archive, run, tmp_path):
    status, out, _ = run("--archive", archive, "--peer")
    root = tmp_path / "cache" / f"peer-{fetch_ggml.VERSION}"
    assert (status, out) == (0, f"{root}\n")
    found = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    assert found == set(FILES) | {"stamp.json"}
    assert run("--peer")[:2] == (0, out)


def test_wrong_hash_is_one_line_and_leaves_nothing(archive, run, tmp_path):
    archive.write_bytes(archive.read_bytes() + b"\0")
    status, out, err = run("--archive", archive)
    assert (status, out, len(err)) == (1, "", 1)
    assert "not the pinned" in err[0] and "LUCE_GGML_DIR" in err[0]
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_archive_is_named(run, tmp_path):
    status, _, err = run("--archive", tmp_path / "none.tar.gz")
    assert status == 1 and err == [f"fetch_ggml: error: no such file: {tmp_path / 'none.tar.gz'}"]


@pytest.mark.parametrize("name", ["ggml/../../../../../evil", "ggml/..\\evil"])
def test_paths_that_leave_the_folder_are_refused(tmp_path, monkeypatch, run, name):
    path = tmp_path / "sdist.tar.gz"
    monkeypatch.setattr(fetch_ggml, "SHA256", make_archive(path, {"LICENSE": b"", name: b"x"}))
    status, _, err = run("--archive", path)
    assert status == 1 and "unsafe path" in err[0]
    assert not list(tmp_path.rglob("*evil*"))


def test_links_are_refused(tmp_path, monkeypatch, run):
    path = tmp_path / "sdist.tar.gz"
    monkeypatch.setattr(fetch_ggml, "SHA256", make_archive(path, FILES, {"ggml/link": "/etc/passwd"}))
    status, _, err = run("--archive", path)
    assert status == 1 and "not a file" in err[0] and "ggml/link" in err[0]


def test_truncated_archive_is_one_line(tmp_path, monkeypatch, run):
    path = tmp_path / "sdist.tar.gz"
    make_archive(path, FILES)
    path.write_bytes(path.read_bytes()[:200])
    monkeypatch.setattr(fetch_ggml, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    status, out, err = run("--archive", path)
    assert (status, out, len(err)) == (1, "", 1) and "cannot unpack" in err[0]


def test_unwritable_cache_is_one_line(archive, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert fetch_ggml.main(["--cache", str(tmp_path / "file" / "cache"), "--archive", str(archive)]) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and "cannot write to the cache" in err[0] and "--cache" in err[0]


@pytest.mark.long
def test_offline_says_what_failed_and_the_remedy(tmp_path):
    hidden = {key: value for key, value in os.environ.items() if not key.upper().startswith("PIP_")}
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path)}
    command = [sys.executable, fetch_ggml.__file__, "--cache", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, env=hidden | offline, timeout=120)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert (done.returncode, done.stdout, len(errors)) == (1, "", 1)
    assert "cannot download llama-cpp-python" in errors[0] and "LUCE_GGML_DIR" in errors[0]
    assert done.stderr.splitlines()[-1] == errors[0]
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_pip_says_so(run, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    status, out, err = run()
    assert (status, out, len(err)) == (1, "", 1)
    assert "no pip" in err[0] and "LUCE_GGML_DIR" in err[0]


def test_hash_mismatch_of_a_download_is_told_from_offline(tmp_path, monkeypatch):
    answer = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n"
    pip = [sys.executable, "-c", f"import sys; sys.exit({answer!r})"]
    monkeypatch.setattr(fetch_ggml, "find_pip", lambda: pip)
    with pytest.raises(fetch_ggml.FetchError, match="does not have the pinned sha256"):
        fetch_ggml.download(tmp_path)


def test_a_faster_run_beside_this_one_wins(archive, run, tmp_path, monkeypatch):
    run("--archive", archive)
    root = tmp_path / "cache" / f"ggml-{fetch_ggml.VERSION}"
    stamp = json.loads((root / "stamp.json").read_text())
    new = tmp_path / "new"
    new.mkdir()
    monkeypatch.setattr(Path, "exists", lambda self: False)  # It appears after the check.
    fetch_ggml.replace(new, root)
    assert json.loads((root / "stamp.json").read_text()) == stamp


def test_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch_ggml.default_cache() == tmp_path / "luce"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert fetch_ggml.default_cache() == Path.home() / ".cache" / "luce"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert fetch_ggml.default_cache() == Path.home() / "Library" / "Caches" / "luce"
