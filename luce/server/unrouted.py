"""Paths that no route has: the same routes without /v1, and answers that say what there is instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from luce.server.ask import Refused

VERSION = "/v1"


def without_version(routes: Sequence[Route]) -> list[Route]:
    """Returns the routes of /v1 without it, as clients spell them whose base URL lacks it, but for those
    whose paths are taken."""
    taken = {route.path for route in routes}
    return [
        Route(path, route.endpoint, methods=[*(route.methods or ())])
        for route in routes
        if (path := route.path.removeprefix(VERSION)) not in taken
    ]


def handlers(
    routes: Sequence[Route], refusal: Callable[[str, Refused], Response]
) -> dict[Any, Callable[[Request, Exception], Response]]:
    """Returns what Starlette calls for a path or a method that no route has. `refusal` puts a refused request
    into the form of the path's API."""
    told = ", ".join(f"{' '.join(_methods([route]))} {route.path.replace(':path', '')}" for route in routes)

    def no_path(request: Request, error: Exception) -> Response:
        path = request.url.path
        said = f"there is no {request.method} {path} here. There is {told}"
        return refusal(path, Refused(404, said, "no_route"))

    def no_method(request: Request, error: Exception) -> Response:
        path = request.url.path
        found = [*routes, *without_version(routes)]
        methods = _methods([route for route in found if route.matches(request.scope)[0] is not Match.NONE])
        said = f"{path} takes {' and '.join(methods)}, and not {request.method}"
        response = refusal(path, Refused(405, said))
        response.headers["Allow"] = ", ".join(methods)
        return response

    return {404: no_path, 405: no_method}


def _methods(routes: Sequence[Route]) -> list[str]:
    """Returns the methods of routes. GET stands for HEAD too."""
    return sorted({method for route in routes for method in route.methods or ()} - {"HEAD"})
