"""A server for tests of clients: enough of SGLang's routes for programs, and documents as csa2 answers them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE_CHARS = 64


class DocumentServer:
    """Writes " word" for every prompt and prefers the last of several. `url` answers inside of `running`."""

    def __init__(self, *, documents: bool = True, key: str | None = None) -> None:
        self.documents: dict[str, dict[str, Any]] = {}
        self.has_documents, self.key = documents, key
        self.prompts: list[str] = []
        self.posts = 0
        self.url = ""

    @contextmanager
    def running(self) -> Iterator["DocumentServer"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def answer(self, method: str, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        if path == "/get_model_info":
            return 200, {"model_path": "a-model"}
        if path == "/generate":
            return 200, self._generate(body)
        if path.startswith("/csa2/documents") and self.has_documents:
            return self._document(method, path, body) if key == self.key else (401, {"error": "Unauthorized"})
        return 404, {"detail": "Not Found"}

    def _generate(self, body: Any) -> Any:
        texts = body["text"] if isinstance(body["text"], list) else [body["text"]]
        self.prompts += texts
        answers = [
            {"text": " word", "meta_info": {"prompt_tokens": 9, "input_token_logprobs": [[-9.0 + i, 5, "x"]] * 2,
                                            "output_token_logprobs": []}}
            for i, _ in enumerate(texts)
        ]  # fmt: skip
        return answers if isinstance(body["text"], list) else answers[0]

    def _document(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "POST":
            return self._post(body)
        document = self.documents.get(path.split("/")[3])
        if document is None:
            return 404, {"error": {"message": "there is no such document"}}
        return 200, {key: document[key] for key in ("id", "text", "messages", "extra_key")}

    def _post(self, body: Any) -> tuple[int, Any]:
        self.posts += 1
        text = body.get("text") or "".join(f"[{m['role']}]{m['content']}" for m in body["messages"])
        if len(text) < PAGE_CHARS:
            return 400, {"error": {"message": "less than one page"}}
        before = self.documents.get(body["id"])
        if before is not None and before["text"] != text:
            return 409, {"error": {"message": "exists with other content"}}
        self.documents[body["id"]] = {"extra_key": None, **body, "text": text, "messages": body.get("messages")}
        return 200, {"id": body["id"], "state": "resident"}


def _handler(server: DocumentServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            key = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            status, content = server.answer(self.command, self.path, body, key)
            reply = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_POST = _serve  # noqa: N815 - names of the base class

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
