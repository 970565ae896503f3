"""HTTP routes of the compressed cache, on SGLang's own app."""

import json
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from csa2.errors import Csa2Error, OptionError

STATS_PATH = "/csa2/stats"
RATIO_PATH = "/csa2/ratio"
MAX_BODY_BYTES = 4096
"""Of a control request: none says more."""


def before_setup_and_run_http_server(*_args: Any, **_kwargs: Any) -> None:
    """Add the routes when csa2 is on. BEFORE hook of `_setup_and_run_http_server`, in the launcher."""
    from sglang.srt.entrypoints import http_server

    from sglang_csa2.args import enabled_here, options_here

    if not enabled_here():
        return
    add_routes(http_server.app)
    if (folder := options_here().documents) is not None:
        from sglang_csa2.document_routes import load_at_start

        load_at_start(http_server.app, folder)


def add_routes(app: Any) -> None:
    """Add the routes to the FastAPI `app`; idempotent.

    Reading carries no auth level, so --api-key protects it as it protects /server_info. What changes the server is
    protected as SGLang's own admin routes are: by --admin-api-key or, without one, by --api-key.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from sglang_csa2.dashboard import add_dashboard_route
    from sglang_csa2.document_routes import add_document_routes

    if any(getattr(route, "path", None) == STATS_PATH for route in app.routes):
        return
    # UPSTREAM(sglang 0.5.23: not through an APIRouter. With FastAPI 0.165 its auth and request metrics take each route
    # of an included router for one without auth level or path). The app brings SGLang's ORJSONRoute along.
    app.add_api_route(STATS_PATH, get_stats, methods=["GET"])
    app.add_api_route(RATIO_PATH, auth_level(AuthLevel.ADMIN_OPTIONAL)(post_ratio), methods=["POST"])
    add_document_routes(app)
    add_dashboard_route(app)


async def get_stats() -> Response:
    """One reading of the cache, taken between two batches."""
    return await reply("stats")


async def post_ratio(request: Request) -> Response:
    """Set the ratio of old private pages: {"ratio": 1 to 8, or "auto"}."""
    from sglang_csa2.request_options import check_ratio

    try:
        body = await _json_body(request, {"ratio"})
        ratio = None if body["ratio"] == "auto" else check_ratio(body["ratio"], "ratio")
    except OptionError as error:
        return error_response(str(error), HTTPStatus.BAD_REQUEST)
    except BodyTooLargeError as error:
        return error_response(str(error), HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return await reply("ratio", {"ratio": ratio})


class BodyTooLargeError(Csa2Error):
    """A request body beyond its limit."""


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The body of `request`, of which no more than `max_bytes` are read.

    Raises:
        BodyTooLargeError: there is more.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


async def _json_body(request: Request, keys: set[str]) -> dict[str, Any]:
    """The JSON object in the body, which has these `keys`."""
    body = await read_bytes(request, MAX_BODY_BYTES)
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the body is not JSON ({error})") from error
    if not isinstance(data, dict) or set(data) != keys:
        raise OptionError(f"the body is not a JSON object with the keys {', '.join(sorted(keys))} and no others")
    return data


def error_response(message: str, status: int) -> Response:
    """An error as SGLang's own routes answer it."""
    return json_response({"error": {"message": message}}, status)


def json_response(content: Any, status: int) -> Response:
    """`content` as JSON."""
    from sglang.srt.utils.json_response import orjson_response

    response: Response = orjson_response(content, int(status))
    return response


async def reply(op: str, payload: dict[str, Any] | None = None) -> Response:
    """Run a control operation and answer with its data, or as SGLang's routes do: {"error": {"message": ...}}."""
    from sglang.srt.entrypoints.http_server import get_global_state

    from sglang_csa2.control import ask

    ok, data, status = await ask(get_global_state().tokenizer_manager, op, payload)
    return json_response(data, status) if ok else error_response(data["message"], status)
