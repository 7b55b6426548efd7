"""References of JSON Schema: `#/$defs/x`, `#`, `#anchor`, `other.json#/x`, within one document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

VALUES = ("enum", "const", "default", "examples", "example")  # What they have is no schema.


@dataclass(frozen=True)
class Resource:
    """A schema that has a URI of its own, from which references within it start. `at` is where it is in the
    document, as a JSON pointer."""

    uri: str
    at: str
    schema: Any


@dataclass(frozen=True)
class Target:
    """What a reference is to: a schema, where it is in the document, and the resource that it is in."""

    at: str
    schema: Any
    resource: Resource


def step(at: str, *keys: str | int) -> str:
    """Returns the JSON pointer of what is below another one."""
    return at + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


class References:
    """The resources and the anchors of a document, which references are resolved in."""

    def __init__(self, document: Any):
        self.root = Resource("", "", document)
        self._resources = {"": self.root}
        self._of = dict[int, Resource]()  # Resources by the ids of their schemas.
        self._anchors = dict[tuple[str, str], Target]()  # They have names within their resources.
        text = json.dumps(document)  # Few schemas have any, and to look for them takes long.
        if '"$id"' in text or '"$anchor"' in text or '"$dynamicAnchor"' in text:
            for at, schema, above in _schemas(document, self.root, self._of):
                self._note(at, schema, above)

    def _note(self, at: str, schema: Mapping[str, Any], resource: Resource) -> None:
        if isinstance(uri := schema.get("$id"), str) and not uri.startswith("#"):
            self._resources.setdefault(resource.uri, resource)
        names = [schema.get(key) for key in ("$anchor", "$dynamicAnchor")]
        names += [uri[1:]] if isinstance(uri, str) and uri.startswith("#") else []
        for name in names:
            if isinstance(name, str):
                self._anchors.setdefault((resource.uri, name), Target(at, schema, resource))

    def resource(self, schema: Any, above: Resource) -> Resource:
        """Returns the resource that a schema is in, which is below one of `above`."""
        return self._of.get(id(schema), above)

    def is_dynamic(self, target: Target) -> bool:
        """Says whether it depends on the way to it what a $dynamicRef or a $recursiveRef to here means."""
        if isinstance(target.schema, Mapping) and target.schema.get("$recursiveAnchor") is True:
            return len(self._resources) > 1
        name = target.schema.get("$dynamicAnchor") if isinstance(target.schema, Mapping) else None
        named = [each.schema for (_, key), each in self._anchors.items() if key == name]
        return name is not None and sum(each.get("$dynamicAnchor") == name for each in named) > 1

    def resolve(self, reference: str, resource: Resource) -> Target | None:
        """Returns what a reference from within a resource is to; None where the document does not have it."""
        uri, fragment = urldefrag(_joined(resource.uri, reference))
        home = self._resources.get(uri) or self._resources.get(uri.rstrip("#"))
        if home is None:
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((home.uri, fragment))
        found, at, above = home.schema, home.at, home
        for key in fragment.split("/")[1:] if fragment.strip("/") else ():
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
            at, above = step(at, key), self.resource(found, above)
        return Target(at, found, above)


def _joined(base: str, reference: str) -> str:
    if base.startswith("urn:"):  # urljoin knows no relative references of theirs.
        return base + reference if reference.startswith("#") or not reference else reference
    return urljoin(base, reference)


def _schemas(
    document: Any, root: Resource, found: dict[int, Resource]
) -> Iterator[tuple[str, Mapping[str, Any], Resource]]:
    """Yields the objects of a document, where they are, and the resource that each is in. `found` gets the
    resources by the ids of their schemas."""
    left: list[tuple[str, Any, Resource]] = [("", document, root)]
    while left:
        at, each, resource = left.pop()
        if isinstance(each, list):
            left += [(step(at, n), one, resource) for n, one in enumerate(each)]
        elif isinstance(each, Mapping):
            if isinstance(uri := each.get("$id"), str) and not uri.startswith("#"):
                resource = found[id(each)] = Resource(urldefrag(_joined(resource.uri, uri))[0], at, each)
            yield at, each, resource
            for key, one in each.items():
                if key not in VALUES and isinstance(one, (dict, list)):
                    left.append((step(at, key), one, resource))
