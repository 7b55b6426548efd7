"""Takes models of a hub: REPO[:FILE] is downloaded into huggingface-hub's cache, once (needs luce[hub])."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click

from luce.cli.command import BOX
from luce.errors import FileError, LuceError, UnsupportedError

FIRST_PART = re.compile(r"(.*)-00001-of-(\d{5})\.gguf")
# A repository may have many files where none was named: the first of these that it has is taken.
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_K", "Q8_0")

hf_option = click.option(
    "--hf",
    metavar="REPO[:FILE]",
    help="Take the GGUF from this repository of the hub; it is downloaded once. This needs luce[hub].",
)


def model_path(gguf: Path | None, hf: str | None) -> Path:
    """Returns the model that was asked for, be it by its path or by its place in the hub; else the one in
    the box."""
    if gguf is not None and hf is not None:
        raise click.UsageError("a path and --hf: give one of them")
    return fetch(hf) if hf is not None else gguf or BOX


def fetch(reference: str, endpoint: str | None = None) -> Path:
    """Returns the file of REPO[:FILE], with all parts of a split one. It comes from the cache, or is
    downloaded with a bar on stderr. `endpoint` is another hub's address. Raises FileError where there is no
    such repository or file."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise UnsupportedError("the hub needs the package huggingface_hub", concerns="hub") from error
    repo, _, name = reference.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise FileError(f"{reference!r} is no REPO[:FILE]: a repository is OWNER/NAME")
    try:
        if not name:
            api = huggingface_hub.HfApi(endpoint=endpoint)
            name = chosen(api.list_repo_files(repo), repo)
        paths = [huggingface_hub.hf_hub_download(repo, each, endpoint=endpoint) for each in parts_of(name)]
    except LuceError:
        raise
    except Exception as error:
        # A network's failures are of the HTTP library that the installed version uses.
        said = " ".join(str(error).split())[:300]
        raise FileError(f"{reference}: {said}") from error
    return Path(paths[0])


def chosen(files: Sequence[str], repo: str) -> str:
    """Picks the one GGUF of a repository, or the first of a preferred type. FileError names what there is."""
    models = sorted(f for f in files if f.endswith(".gguf") and "mmproj" not in f.lower())
    models = [f for f in models if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", f)]
    if not models:
        raise FileError(f"{repo} has no GGUF")
    if len(models) == 1:
        return models[0]
    for kind in PREFERRED:
        found = [f for f in models if re.search(rf"(?<![A-Z0-9]){kind}(?![A-Z0-9_])", f.upper())]
        if found:
            return found[0]
    raise FileError(f"{repo} has {len(models)} models, name one as {repo}:FILE: {', '.join(models)[:500]}")


def parts_of(name: str) -> list[str]:
    """Returns a file, or all parts of a split one."""
    match = FIRST_PART.fullmatch(name)
    if match is None:
        return [name]
    stem, count = match.groups()
    return [f"{stem}-{part:05d}-of-{count}.gguf" for part in range(1, int(count) + 1)]
