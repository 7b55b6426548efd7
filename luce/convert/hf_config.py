"""Reads config.json of a Hugging Face checkpoint, by typed getters that name the key they miss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from luce.errors import FileError, UnsupportedError

T = TypeVar("T")
REQUIRED: Any = object()
_NAMES: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string",
                           list: "a list", dict: "an object"}  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file."""
    if path.exists() and not path.is_file():
        raise FileError(f"{path}: it is a folder, a device or a pipe")
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error


def parse_json(raw: bytes, where: str) -> Any:
    """Returns the JSON object in `raw`. Raises FileError, which begins with `where`, where it is none."""
    try:
        values = json.loads(raw)
    except RecursionError as error:
        raise FileError(f"{where}: its JSON is nested too deep") from error
    except ValueError as error:
        raise FileError(f"{where}: {error}") from error
    if not isinstance(values, dict):
        raise FileError(f"{where} does not hold a JSON object")
    return values


class Section:
    """This is an object of a config. A key that is null counts as missing, as in transformers."""

    def __init__(self, values: dict[str, Any], where: str):
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, kind: type[T], default: Any = REQUIRED) -> T:
        """Returns values[key], of type `kind` (an int passes for a float). FileError names what is wrong."""
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                raise FileError(f"{self.where}: key {key} is missing")
            return default
        if kind is float and type(value) is int and abs(value) < 1 << 63:
            value = float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise FileError(f"{self.where}: key {key} is {value!r}, expected {_NAMES[kind]}")
        return value

    def size(self, key: str, default: Any = REQUIRED) -> int:
        """Returns a positive integer."""
        value = self.get(key, int, default)
        if value is not default and value < 1:
            raise FileError(f"{self.where}: key {key} is {value}, expected a positive integer")
        return value

    def strings(self, key: str, count: int) -> list[str]:
        """Returns a list of `count` strings."""
        values = self.get(key, list)
        if len(values) != count or not all(isinstance(value, str) for value in values):
            raise FileError(f"{self.where}: key {key} is {values!r}, expected {count} strings")
        return values

    def section(self, key: str) -> Section:
        """Returns the object under `key`, or an empty one where it is missing."""
        return Section(self.get(key, dict, {}), f"{self.where}: {key}")

    def only(self, key: str, wanted: object) -> None:
        """Raises UnsupportedError where `key` is given and is not what luce implements."""
        if key in self and self.values[key] != wanted:
            raise UnsupportedError(
                f"{self.where}: key {key} is {self.values[key]!r}: luce implements {wanted!r}"
            )


def read_config(folder: Path) -> Section:
    """Returns config.json of the folder. A single .safetensors file has that of its folder."""
    path = (folder.parent if folder.is_file() else folder) / "config.json"
    return Section(read_json(path), str(path))


def text_config(config: Section) -> Section:
    """Returns the language model's part: `text_config` where there is one, else the whole."""
    return config.section("text_config") if "text_config" in config else config


def rope_parameters(config: Section) -> Section:
    """Returns `rope_parameters`. One set of them for each kind of layer passes where all sets are equal."""
    rope = config.section("rope_parameters")
    sets = [value for value in rope.values.values() if isinstance(value, dict)]
    if not sets:
        return rope
    if any(value != sets[0] for value in sets) or len(sets) != len(rope.values):
        raise UnsupportedError(f"{rope.where}: kinds of layers differ in RoPE: luce implements one for all")
    return Section(sets[0], rope.where)


def rope_theta(config: Section) -> float:
    """Returns RoPE's base: nested in rope_parameters, else at the top level. A missing one is an error:
    there is no default."""
    rope = rope_parameters(config)
    for section in (rope, config):
        if "rope_theta" in section:
            theta = section.get("rope_theta", float)
            if not 0 < theta < float("inf"):
                raise FileError(f"{section.where}: key rope_theta is {theta}, expected a positive number")
            return theta
    raise FileError(
        f"{config.where}: neither rope_parameters.rope_theta nor rope_theta is there, and no default fits "
        "every model: add the value that the model was trained with"
    )
