"""HTTP routes of the compressed cache, on SGLang's own app."""

from typing import Any

from starlette.responses import Response

STATS_PATH = "/csa2/stats"


def before_setup_and_run_http_server(*_args: Any, **_kwargs: Any) -> None:
    """Add the routes when csa2 is on. BEFORE hook of `_setup_and_run_http_server`, in the launcher."""
    from sglang.srt.entrypoints import http_server

    from sglang_csa2.args import enabled_here

    if enabled_here():
        add_routes(http_server.app)


def add_routes(app: Any) -> None:
    """Add the routes to the FastAPI `app`; idempotent.

    They carry no auth level, so --api-key protects them as it protects /server_info.
    """
    if any(getattr(route, "path", None) == STATS_PATH for route in app.routes):
        return
    # UPSTREAM(sglang 0.5.23: not through an APIRouter. With FastAPI 0.165 its auth and request metrics take each route
    # of an included router for one without auth level or path). The app brings SGLang's ORJSONRoute along.
    app.add_api_route(STATS_PATH, get_stats, methods=["GET"])


async def get_stats() -> Response:
    """One reading of the cache, taken between two batches."""
    return await _reply("stats")


async def _reply(op: str, payload: dict[str, Any] | None = None) -> Response:
    """Run a control operation and answer with its data, or as SGLang's routes do: {"error": {"message": ...}}."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.utils.json_response import orjson_response

    from sglang_csa2.control import ReplyTimeoutError, call

    try:
        reply = await call(get_global_state().tokenizer_manager, op, payload)
        content, status = (reply.data if reply.ok else {"error": reply.data}), reply.status
    except ReplyTimeoutError as error:
        content, status = {"error": {"message": str(error)}}, error.status
    response: Response = orjson_response(content, int(status))
    return response
