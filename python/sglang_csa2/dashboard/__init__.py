"""The page that shows the cache: GET /csa2/dashboard.

It holds no data: it asks the routes of the server for all it shows, with a key that its reader types in, so it may be served
without one. One response, nothing from elsewhere; the policy in its header lets nothing else run or load.
"""

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

DASHBOARD_PATH = "/csa2/dashboard"
SCRIPTS = ("readings.js", "charts.js", "page.js")
"""Parts of the script of the page, in order; they share one scope."""
_FOLDER = Path(__file__).parent


@functools.cache
def page() -> str:
    """The whole page as HTML."""
    return _read("page.html").replace("/* style */", _style()).replace("/* script */", _script())


@functools.cache
def headers() -> dict[str, str]:
    """Headers of the response: among them a policy that allows this script, this style, and requests to this server."""
    policy = {
        "default-src": "'none'",
        "script-src": _hash(_script()),
        "style-src": _hash(_style()),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


async def get_dashboard() -> Response:
    """The page."""
    return Response(page(), media_type="text/html", headers=headers())


def add_dashboard_route(app: Any) -> None:
    """Add the route of the page to the FastAPI `app`."""
    app.add_api_route(DASHBOARD_PATH, get_dashboard, methods=["GET"])


def after_add_api_key_middleware(_result: Any, app: Any, *_args: Any, **_kwargs: Any) -> None:
    """Serve the page without a key. AFTER hook of `add_api_key_middleware`, in the launcher.

    A browser sends no key when it opens an address, so behind the check the page could not be opened at all.
    """
    for route in app.routes:
        if getattr(route, "path", None) == DASHBOARD_PATH:
            app.add_middleware(OpenPage, route=route)
            return


class OpenPage:
    """ASGI middleware around the check of keys: answers what matches the route of the page, hands on everything else."""

    def __init__(self, app: ASGIApp, route: Any) -> None:
        self._app = app
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection."""
        if scope["type"] == "http" and self._route.matches(scope)[0] == Match.FULL:
            await (await get_dashboard())(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _read(name: str) -> str:
    """A file of the page, without indentation: no text of it spans lines."""
    lines = (_FOLDER / name).read_text(encoding="utf-8").splitlines()
    return "".join(line.lstrip() + "\n" for line in lines)


def _style() -> str:
    return _read("page.css")


def _script() -> str:
    return "(() => {\n" + "".join(map(_read, SCRIPTS)) + "})();\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
