"""Takes models of a hub: REPO[:TYPE|FILE] is downloaded into huggingface-hub's cache, once (luce[hub])."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from luce.errors import Error, FileError, UnsupportedError
from luce.files.probe import what_it_holds
from luce.native import File

TIMEOUT_S = 10  # A hub that does not answer for so long is not reached.
FIRST_PART = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")
PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
# A repository may have many files where none was named: the first of these types that it has is taken.
PREFERRED = (
    "Q4_K_M", "Q4_K_S", "Q4_K", "Q4_K_XL", "Q4_K_L", "Q8_0", "Q5_K_M", "Q5_K_S", "Q5_K", "Q5_K_XL", "Q6_K",
    "Q6_K_XL", "Q8_K_XL", "Q4_1", "Q4_0", "IQ4_XS", "IQ4_NL", "MXFP4_MOE", "MXFP4", "NVFP4", "Q3_K_M",
    "Q3_K_L", "Q3_K_XL", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K", "BF16", "F16", "F32",
)  # fmt: skip
PROJECTORS = ("F16", "BF16", "Q8_0", "F32")  # Of vision towers, likewise.
TYPE = re.compile(r"(?<![A-Z0-9])(I?Q\d_|TQ\d_|MXFP4|NVFP4|B?F16|F32)")
# What repositories have beside their models is named so, in any place of a name, ...
BESIDE = ("mmproj", "dflash", "dspark")
# ... as its first word or as a folder, ...
BESIDE_FIRST = {
    "adapter", "adapters", "draft", "drafter", "drafters", "eagle", "eagle2", "eagle3", "imatrix", "lora",
    "loras", "mtp", "nextn", "projector", "vocab",
}  # fmt: skip
# ... or with these words too. But models that were trained, merged or measured with such things have them as
# well: they are models where there is nothing else.
DOUBTFUL = BESIDE_FIRST | {"head", "medusa", "qlora", "speculator"}
# Names that differ in these words alone are of one model.
VARIANTS = {"ud", "i1", "imat", "imatrix", "mtp"}


def fetch(
    reference: str, endpoint: str | None = None, warn: Callable[[str], object] = lambda line: None
) -> Path:
    """Returns the file of REPO[:TYPE|FILE], with all parts of a split one. It is downloaded with a bar on
    stderr, unless the cache has it; where the hub cannot be reached, that is all there is, and `warn` gets a
    line of it. `endpoint` is another hub's address. Raises FileError where there is no such repository or
    file, and where what was not named as a file holds no model."""
    _, _, name = reference.partition(":")
    path, file, files = _taken(reference, endpoint, warn, lambda files, repo: named(files, repo, name))
    if not _is_file(name):
        _check_model(path, file, reference.partition(":")[0], files)
    return path


def fetch_projector(
    reference: str, endpoint: str | None = None, warn: Callable[[str], object] = lambda line: None
) -> Path:
    """Returns the file of the vision tower beside the model of REPO[:TYPE|FILE], as fetch() does."""
    _, _, name = reference.partition(":")

    def pick(files: list[str], repo: str) -> str:
        return projector_beside(files, repo, named(files, repo, name))

    return _taken(reference, endpoint, warn, pick)[0]


def _taken(
    reference: str, endpoint: str | None, warn: Callable[[str], object], pick: Callable[[list[str], str], str]
) -> tuple[Path, str, list[str]]:
    """Returns where the file is that is picked of a repository, its path there, and those of all files."""
    try:
        import huggingface_hub
        import huggingface_hub.constants  # These are attributes only once they are imported.
        import huggingface_hub.utils
    except ModuleNotFoundError as error:
        raise UnsupportedError("the hub needs the package huggingface_hub", concerns="hub") from error
    repo, _, _ = reference.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise FileError(f"{reference!r} is no REPO[:TYPE|FILE]: a repository is OWNER/NAME")
    lacking = ""
    try:
        files = _files(huggingface_hub, repo, endpoint)
    except Exception as error:  # A network's failures are of the HTTP library that is installed.
        lacking = _one_line(error)
        if not isinstance(error, huggingface_hub.errors.HfHubHTTPError):
            lacking = f"the hub cannot be reached: {lacking}"
        files = _cached_files(huggingface_hub, repo)
    try:
        file = pick(files, repo)
        how: dict[str, Any] = {"endpoint": endpoint, "local_files_only": bool(lacking)}
        paths = [Path(huggingface_hub.hf_hub_download(repo, each, **how)) for each in parts_of(file)]
    except Exception as error:
        if lacking:
            there = f"the cache has only {listed(files)}" if files else "the cache has nothing of it"
            raise FileError(f"{reference}: {lacking}; {there}") from error
        if isinstance(error, Error):
            raise
        raise FileError(f"{reference}: {_one_line(error)}") from error
    if lacking and not huggingface_hub.constants.HF_HUB_OFFLINE:
        warn(f"{reference} is taken from the cache: {lacking}")
    return paths[0], file, files


def _files(hub: Any, repo: str, endpoint: str | None) -> list[str]:
    """Returns the paths of all files of a repository. It asks once: the package's own functions try for a
    minute and more. Raises what they raise."""
    url = f"{endpoint or hub.constants.ENDPOINT}/api/models/{repo}/tree/main?recursive=true"
    found: list[str] = []
    while url:
        response = hub.utils.get_session().get(url, headers=hub.utils.build_hf_headers(), timeout=TIMEOUT_S)
        hub.utils.hf_raise_for_status(response)
        found += [entry["path"] for entry in response.json() if entry["type"] == "file"]
        url = response.links.get("next", {}).get("url")  # There are some hundred to a page.
    return found


def _cached_files(hub: Any, repo: str) -> list[str]:
    """Returns the paths of the GGUFs that the cache has of a repository's newest known state."""
    try:
        folder = Path(hub.snapshot_download(repo, local_files_only=True))
    except Exception:
        return []
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_model(path: Path, file: str, repo: str, files: Sequence[str]) -> None:
    """Raises FileError where a file that was chosen by its name holds no model. What is no GGUF at all is
    told where it is opened."""
    held = None
    with suppress(Error), File(path) as opened:
        held = what_it_holds(opened)
    if held is not None:
        others = [other for other in models_of(files) if other != file]
        more = f"; there is also {listed(others)}" if others else ""
        raise FileError(f"{repo}: {file} holds {held}, no model; {repo}:FILE names another{more}")


def _is_file(name: str) -> bool:
    return name.lower().endswith(".gguf")


def named(files: Sequence[str], repo: str, name: str = "") -> str:
    """Returns the path of REPO[:TYPE|FILE] among the repository's. A type is one as llama.cpp and Ollama
    name them, in any case: Q4_K_M, UD-Q4_K_XL, or latest for none. Raises FileError with what there is."""
    if not _is_file(name):
        return chosen(files, repo, "" if name.lower() == "latest" else name)
    ggufs = [f for f in files if _is_file(f)]
    alike = [f for f in ggufs if name.lower() in (f.lower(), PurePosixPath(f).name.lower())]
    if name in ggufs or len(alike) == 1:
        return name if name in ggufs else alike[0]
    raise FileError(f"{repo}:{name}: there is no such file; the repository has {listed(ggufs) or 'no GGUF'}")


def chosen(files: Sequence[str], repo: str, kind: str = "") -> str:
    """Picks the model of a repository, of a type or else of the first preferred one: never what goes with a
    model. Of a split one it is the first part. FileError names what there is."""
    ggufs = [f for f in sorted(files) if _is_file(f) and not LATER_PART.search(f)]
    if not ggufs:
        raise FileError(f"{repo} has no GGUF")
    models = models_of(ggufs)
    if kind:
        doubtful = [f for f in ggufs if _beside(f) == "doubtful"]
        found = _of_type(models, kind) or _of_type(doubtful, kind)
        if found:
            return _one_of(found, repo, kind)
        raise FileError(f"{repo} has no model of type {kind}: it has {listed(models or ggufs)}")
    if not models:
        raise FileError(f"{repo} has no GGUF of a model, only {listed(ggufs)}; {repo}:FILE names one")
    if len(models) == 1:
        return models[0]
    for preferred in PREFERRED:
        if found := _of_type(models, preferred):
            return _one_of(found, repo, preferred)
    raise FileError(f"{repo} has {len(models)} models, name one as {repo}:FILE: {listed(models)}")


def projector_beside(files: Sequence[str], repo: str, model: str) -> str:
    """Picks the vision tower that goes with a model of the repository: of those that are named mmproj the one whose
    name has most in common with the model's, of the first preferred type. FileError names what there is."""
    found = [f for f in sorted(files) if _is_file(f) and "mmproj" in f.lower()]
    if not found:
        raise FileError(f"{repo} has no vision tower: no file of it is named mmproj")

    def words(file: str) -> frozenset[str]:
        path = PurePosixPath(PART.sub("", file))
        return frozenset(_words(path.name.removesuffix(".gguf"))) - {"mmproj", "model", "gguf"} - VARIANTS

    def of_type(file: str) -> int:
        name = PurePosixPath(file).name
        return next((i for i, kind in enumerate(PROJECTORS) if _of_type([name], kind)), len(PROJECTORS))

    nearest = max(len(words(f) & words(model)) for f in found)
    near = [f for f in found if len(words(f) & words(model)) == nearest]
    best = min(map(of_type, near))
    picked = [f for f in near if of_type(f) == best]
    if len({words(f) for f in picked}) > 1:
        raise FileError(f"{repo} has several vision towers, download one: {listed(picked)}")
    return min(picked, key=lambda f: (f.count("/"), f))


def models_of(files: Sequence[str]) -> list[str]:
    """Returns the GGUFs that hold models, by their names. Of a split one it is the first part."""
    ggufs = [f for f in sorted(files) if _is_file(f) and not LATER_PART.search(f)]
    doubts = {f: _beside(f) for f in ggufs}
    sure = [f for f in ggufs if doubts[f] == ""]
    return sure or [f for f in ggufs if doubts[f] == "doubtful"]


def _beside(file: str) -> str:
    """Says whether a file is what goes with a model, by its name: "sure", "doubtful", or "" for a model."""
    *folders, name = file.lower().removesuffix(".gguf").split("/")
    words = _words(name)
    if any(part in file.lower() for part in BESIDE) or any(folder in BESIDE_FIRST for folder in folders):
        return "sure"
    if words[0] in BESIDE_FIRST or ("imatrix" in words and not TYPE.search(name.upper())):
        return "sure"
    return "doubtful" if DOUBTFUL & {*words, *_words("-".join(folders))} else ""


def _words(name: str) -> list[str]:
    return re.split(r"[-_. ]+", name.lower())


def _of_type(files: Sequence[str], kind: str) -> list[str]:
    """Returns the files that have a type in their names, or else in their folders'. A part of a type, like
    the K of Q6_K, is none."""
    pattern = re.compile(rf"(?<![A-Z0-9])(?<![0-9K]_){re.escape(kind.upper())}(?![A-Z0-9_])")
    by_name = [f for f in files if pattern.search(PurePosixPath(f).name.upper())]
    return by_name or [f for f in files if pattern.search(f.upper())]


def _one_of(files: Sequence[str], repo: str, kind: str) -> str:
    """Picks the plainest of the files of a type. FileError says that they are of several models."""

    def words(file: str) -> frozenset[str]:
        return frozenset(_words(PART.sub("", PurePosixPath(file).name)))

    if len({words(f) - VARIANTS for f in files}) > 1:
        raise FileError(f"{repo} has several models of type {kind}, name one as {repo}:FILE: {listed(files)}")
    return min(files, key=lambda f: (len(words(f) & VARIANTS), f.count("/"), f))


def listed(files: Sequence[str], most: int = 20) -> str:
    """Returns the names of files, at most so many."""
    more = f" and {len(files) - most} more" if len(files) > most else ""
    return ", ".join(sorted(files)[:most]) + more


def parts_of(name: str) -> list[str]:
    """Returns a file, or all parts of a split one."""
    match = FIRST_PART.fullmatch(name)
    if match is None:
        return [name]
    stem, count = match.groups()
    return [f"{stem}-{part:05d}-of-{count}.gguf" for part in range(1, int(count) + 1)]
