#!/usr/bin/env python3
"""Brings the pinned ggml source into the user's cache and prints its path.

ggml is not vendored: its source is part of the source distribution of llama-cpp-python, which pip
fetches by package name. CMake calls this script when LUCE_GGML_DIR is not set. stdout carries the
path alone; everything else goes to stderr. A failure is one line on stderr and exit status 1.

    <cache>/ggml-<version>/ggml/    what add_subdirectory takes
    <cache>/ggml-<version>/vocab/   vocabulary and expected token ids, for the tokenizer's tests
    <cache>/peer-<version>/         with --peer: all of llama.cpp, to measure beside it
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"  # It carries ggml 0.25.3.
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SOURCE = f"llama_cpp_python-{VERSION}/vendor/llama.cpp"
REMEDY = "set LUCE_GGML_DIR (or -DLUCE_GGML_DIR=) to a ggml source folder, or pass --archive FILE"
STAMP = "stamp.json"

# A path inside llama.cpp goes to a path in the cache; a folder stands for all below it.
GGML_PARTS = {
    "ggml": "ggml",
    "LICENSE": "LICENSE",
    "models/ggml-vocab-qwen35.gguf": "vocab/ggml-vocab-qwen35.gguf",
    "models/ggml-vocab-qwen35.gguf.inp": "vocab/ggml-vocab-qwen35.gguf.inp",
    "models/ggml-vocab-qwen35.gguf.out": "vocab/ggml-vocab-qwen35.gguf.out",
}
PEER_PARTS = {".": "."}


class FetchError(Exception):
    """It says what failed and what to do about it, in one line."""


def say(text: str) -> None:
    print(f"fetch_ggml: {text}", file=sys.stderr, flush=True)


def default_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "luce"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "luce"


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tree_digest(root: Path) -> str:
    """Returns one hash over the names and contents of all files below root, the stamp excepted."""
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p != root / STAMP):
        digest.update(f"{path.relative_to(root).as_posix()}\0{sha256_of(path)}\n".encode())
    return digest.hexdigest()


def is_complete(root: Path) -> bool:
    """Says whether root is what a former run wrote, unchanged."""
    try:
        stamp = json.loads((root / STAMP).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(stamp, dict) and stamp == {"archive": SHA256, "tree": tree_digest(root)}


def find_pip() -> list[str]:
    """Finds a pip to run: pip's isolated build environments hide it unless the interpreter is clean (-I)."""
    for command in ([sys.executable, "-m", "pip"], [sys.executable, "-I", "-m", "pip"]):
        if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
            return command
    raise FetchError(f"no pip for {sys.executable} to download {PACKAGE} with; {REMEDY}")


def download(folder: Path) -> Path:
    """Downloads the source distribution; pip checks its hash before it looks inside."""
    pip = find_pip()
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    say(f"downloading {PACKAGE} {VERSION} (76 MB)")
    command = [*pip, "download", "--no-deps", "--no-binary", PACKAGE, "--retries", "2"]
    command += ["--progress-bar", "off", "--dest", str(folder), "--requirement", str(wanted)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    archive = folder / ARCHIVE
    if done.returncode == 0 and archive.is_file():
        return archive
    if re.search(r"DO NOT MATCH THE HASH", done.stdout):
        raise FetchError(f"{PACKAGE} {VERSION} as downloaded does not have the pinned sha256; {REMEDY}")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["no output"])[0 if errors else -1]
    raise FetchError(f"pip cannot download {PACKAGE} {VERSION} ({reason}); when offline, {REMEDY}")


def destination(name: str, parts: dict[str, str]) -> PurePosixPath | None:
    """Says where an archive member goes, relative to the new folder; None if it is not wanted."""
    path = PurePosixPath(name)
    try:
        inner = path.relative_to(SOURCE)
    except ValueError:
        return None
    for source, target in parts.items():
        if inner == PurePosixPath(source) or PurePosixPath(source) in inner.parents:
            place = PurePosixPath(target) / inner.relative_to(source)
            if path.is_absolute() or ".." in path.parts or "\\" in name:
                raise FetchError(f"the archive holds an unsafe path: {name!r}")
            return place
    return None


def unpack(archive: Path, parts: dict[str, str], folder: Path) -> None:
    """Writes the wanted regular files below folder; no links, no devices, no foreign owners or modes."""
    count = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                place = destination(member.name, parts)
                if place is None or member.isdir():
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    raise FetchError(f"the archive holds something that is not a file: {member.name!r}")
                target = folder / place
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("wb") as out:
                    shutil.copyfileobj(content, out)
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
                count += 1
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FetchError(f"cannot unpack {archive}: {error}") from error
    if count == 0:
        raise FetchError(f"{archive} holds no {SOURCE}")


def replace(new: Path, final: Path) -> None:
    """Moves a finished folder into place. Where another run was faster, its equal result stays."""
    if final.exists():
        say(f"{final} is damaged or was changed; replacing it")
        final.rename(new.parent / "old")
    try:
        new.rename(final)
    except OSError:
        if not is_complete(final):
            raise


def ensure(cache: Path, archive: Path | None, peer: bool) -> Path:
    """Returns the folder of ggml (or of llama.cpp with peer) in the cache, and fetches it if it is not there.
    """
    final = cache / f"{'peer' if peer else 'ggml'}-{VERSION}"
    result = final if peer else final / "ggml"
    if is_complete(final):
        return result
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
            source = archive or download(Path(scratch))
            if not source.is_file():
                raise FetchError(f"no such file: {source}")
            found = sha256_of(source)
            if found != SHA256:
                raise FetchError(f"{source} has sha256 {found}, not the pinned {SHA256}; {REMEDY}")
            new = Path(scratch) / "new"
            unpack(source, PEER_PARTS if peer else GGML_PARTS, new)
            (new / STAMP).write_text(json.dumps({"archive": SHA256, "tree": tree_digest(new)}) + "\n")
            replace(new, final)
    except OSError as error:
        raise FetchError(f"cannot write to the cache {cache}: {error}; pass --cache DIR") from error
    say(f"unpacked into {final}")
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch the pinned ggml source and print its path.")
    parser.add_argument("--cache", type=Path, help="folder to keep it in (default: the user's cache)")
    parser.add_argument("--archive", type=Path, help=f"an {ARCHIVE} that is already here")
    parser.add_argument("--peer", action="store_true", help="all of llama.cpp, to measure beside it")
    args = parser.parse_args(argv)
    try:
        path = ensure((args.cache or default_cache()).absolute(), args.archive, args.peer)
    except FetchError as error:
        print(f"fetch_ggml: error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
