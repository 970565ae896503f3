"""A server of the page with answers made up for the test, in a thread."""

import copy
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_csa2 import dashboard

STATS: dict[str, Any] = {
    "arena_bytes": 100 * 2**20,
    "used_bytes": 48 * 2**20,
    "slab_bytes": 50 * 2**20,
    "pages": {"bf16": 16, "fp8": 32, "fp4": 64},
    "page_bytes": {"bf16": 2**20, "fp8": 2**19, "fp4": 2**18},
    "logical_tokens": 7168,
    "capacity_tokens": 25600,
    "compression_ratio": 2.3333,
    "target_ratio": 1.5,
    "live_bytes": 20 * 2**20,
    "metadata_fraction": 0.03,
    "demotions_total": {"bf16->fp8": 5, "bf16->fp4": 70, "fp8->fp4": 3, "fp4->csa2-2x": 0},
    "compactions_total": 2,
    "evicted_tokens_total": 640,
    "prefix_hit_tokens_total": 3000,
    "prompt_tokens_total": 10000,
    "prefix_hit_tokens_by_format": {"bf16": 200, "fp8": 2300, "fp4": 500},
    "guard_compared_total": 0,
    "guard_agreement": None,
    "identity_basis_layers": [],
    "weight_copy_bytes": 0,
    "options": {"ratio": "auto", "arena_size": None, "hot_tokens": 128},
}
DOCUMENT: dict[str, Any] = {
    "id": "manual",
    "state": "resident",
    "tokens": 1280,
    "pages": 20,
    "bytes": 11 * 2**20,
    "format": "fp8",
    "formats": {"bf16": 1, "fp8": 19, "fp4": 0},
    "hits": 7,
    "ttl": None,
    "extra_key": None,
    "serial": 1,
    "message": "",
}


class DashboardServer(ThreadingHTTPServer):
    """Answers as a server with the compressed cache does, with what tests put here."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.stats: Any = copy.deepcopy(STATS)
        self.documents: Any = [copy.deepcopy(DOCUMENT)]
        self.metrics: str | None = None
        self.api_key: str | None = None
        self.admin_api_key: str | None = None
        self.status = 200
        """Of /csa2/stats."""
        self.requests: list[tuple[str, str | None]] = []
        """Path and Authorization of each."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A tab that went away while it was answered is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def count(self, path: str) -> int:
        """How often `path` was asked for."""
        return sum(asked == path for asked, _ in self.requests)

    def answer(self, path: str, authorization: str | None) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers."""
        json_type = {"Content-Type": "application/json"}
        if path == dashboard.DASHBOARD_PATH:
            return 200, dashboard.page(), {"Content-Type": "text/html; charset=utf-8", **dashboard.headers()}
        if path == "/metrics":
            return (404, "", {}) if self.metrics is None else (200, self.metrics, {"Content-Type": "text/plain"})
        key = (self.admin_api_key or self.api_key) if path == "/csa2/documents" else self.api_key
        if key is not None and authorization != f"Bearer {key}":
            return 401, json.dumps({"error": "Unauthorized"}), json_type
        if path == "/csa2/documents":
            return 200, json.dumps({"documents": self.documents}), json_type
        if path == "/csa2/stats":
            error = {"error": {"message": "the scheduler is busy"}}
            return self.status, json.dumps(self.stats if self.status == 200 else error), json_type
        return 404, "", {}


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        authorization = self.headers.get("Authorization")
        self.server.requests.append((self.path, authorization))
        status, text, headers = self.server.answer(self.path, authorization)
        body = text.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""
