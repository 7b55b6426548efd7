"""A function that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """This is a function that the model may call. `parameters` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]
    description: str = ""
    strict: bool = False

    @property
    def as_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}
