#!/usr/bin/env python3
"""Writes tests/goldens/client_schemas.json: the JSON schemas that pydantic and zod make of their types, which clients
send as response formats and as parameters of tools.

    python tools/make_client_schemas.py FOLDER        FOLDER keeps npm's packages
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import subprocess
import typing
import uuid

import pydantic
from pydantic import BaseModel, ConfigDict, Field

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Colour(str, enum.Enum):
    RED, BLUE = "red", "dark blue"


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Tree(BaseModel):
    root: Node
    left: Tree | None = None


class A(BaseModel):
    kind: typing.Literal["a"]
    x: int


class B(BaseModel):
    kind: typing.Literal["b"]
    y: str


class Discriminated(BaseModel):
    item: typing.Annotated[A | B, Field(discriminator="kind")]


class Formats(BaseModel):
    when: datetime.datetime
    day: datetime.date
    at: datetime.time
    span: datetime.timedelta
    id: uuid.UUID
    ip: ipaddress.IPv4Address
    net: ipaddress.IPv4Network
    ip6: ipaddress.IPv6Address
    url: pydantic.AnyUrl
    path: pathlib.Path
    secret: pydantic.SecretStr
    raw: bytes
    file: pydantic.FilePath
    base64: pydantic.Base64Bytes
    pattern: re.Pattern
    text: pydantic.Json


class Numbers(BaseModel):
    any: decimal.Decimal
    positive: pydantic.PositiveInt
    negative: pydantic.NegativeFloat
    multiple: int = Field(multiple_of=5)
    share: float = Field(gt=0, lt=1)
    finite: pydantic.FiniteFloat
    money: decimal.Decimal = Field(max_digits=5, decimal_places=2)


class Strings(BaseModel):
    a: str = Field(min_length=1, max_length=5, pattern=r"^[a-z]+$")
    b: str = Field(pattern=r"^\d{3}-\d{4}$")
    c: str = "x"
    d: str | None = None


class Pair(typing.NamedTuple):
    x: int
    y: int


class Collections(BaseModel):
    names: set[str]
    numbers: frozenset[int]
    pair: tuple[int, str]
    several: tuple[int, ...]
    counts: dict[str, int]
    colours: dict[Colour, int]
    sides: dict[typing.Literal["x", "y"], float]
    by_number: dict[int, str]
    few: list[int] = Field(min_length=1, max_length=3)
    anything: typing.Any
    literal: typing.Literal[1, "a", None, True]
    maybe: list[Colour] | None = None
    named: Pair
    keys: dict[typing.Annotated[str, Field(pattern=r"^k\d+$")], bool]


class Forbid(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: str = "x"


class Allow(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Alias(BaseModel):
    a: int = Field(alias="some key", description="d", examples=[1], deprecated=True)


class Several(pydantic.RootModel[list[A]]):
    pass


class Nested(BaseModel):
    closed: Forbid
    open: Allow | None
    colour: Colour
    union: int | str | list[int] | None
    parts: list[A | B]


MODELS = (Node, Tree, Discriminated, Formats, Numbers, Strings, Collections, Forbid, Allow, Alias, Several, Nested)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", metavar="FOLDER", type=pathlib.Path, help="npm's packages are kept here")
    folder = arguments.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules" / "zod").is_dir():
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, "zod"], check=True)
    script = ROOT / "tools" / "clients" / "zod_schemas.mjs"
    zod = subprocess.run(["node", script, folder], check=True, capture_output=True, text=True).stdout
    made = {f"pydantic {model.__name__} {mode}": model.model_json_schema(mode=mode)
            for model in MODELS for mode in ("validation", "serialization")} | json.loads(zod)  # fmt: skip
    found: dict[str, str] = {}
    for name, schema in made.items():
        found.setdefault(json.dumps(schema), name)
    lines = ",\n".join(f"{json.dumps(name)}: {text}" for text, name in found.items())
    (ROOT / "tests" / "goldens" / "client_schemas.json").write_text(f"{{\n{lines}\n}}\n")
    print(f"{len(found)} schemas")


if __name__ == "__main__":
    main()
