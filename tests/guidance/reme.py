"""A loopback server that imitates ReMe's answers and failures, and network failures."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.guidance.loopback import Loopback, send

ERROR_TEXT = "Traceback: model exploded"
"""Text that must never reach a prompt."""

MEMORIES = [
    {"memory_id": "m1", "when_to_use": "when looking for a cup", "content": "go kitchen", "score": 0.9},
    {"memory_id": "m2", "when_to_use": "when looking for a book", "content": "go attic", "score": 0.8},
]


class FakeReMe(Loopback):
    """Answers by ``mode``; records all request bodies.

    Modes: ``ok``; a status as a number; ``garbage``, ``deep`` (JSON without end), ``not an object``, ``no metadata``,
    ``no success``, ``silent failure`` and ``error as answer`` (200 and success), ``hang`` (no answer until the server
    is closed), ``drip`` (a byte of the body now and then), ``drip headers``, ``reset``.
    """

    def __init__(self, dialect: str = "0.2", mode: str = "ok") -> None:
        self.dialect = dialect
        self.mode = mode
        self.memories: list[dict[str, Any]] = MEMORIES
        self.calls: list[tuple[str, Any]] = []
        self._released = threading.Event()
        super().__init__()

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.calls.append((handler.path, body))
        if self.mode == "hang":
            self._released.wait()
            return
        if self.mode == "reset":
            handler.close_connection = True
            return
        if self.mode in ("drip", "drip headers"):
            handler.send_response(200)
            handler.send_header("X-Late", "")
            if self.mode == "drip":
                handler.end_headers()
            else:
                handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Late: ")
            while not self._released.wait(0.05):
                try:
                    handler.wfile.write(b" ")
                except OSError:
                    return
            return
        status, answer_body = (int(self.mode), ERROR_TEXT) if self.mode.isdecimal() else self._said(handler.path, body)
        send(handler, status, answer_body)

    def _said(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        paths = {"0.2": ("/retrieve_task_memory", "/summary_task_memory"), "0.4": ("/search", "/auto_memory")}
        if path not in paths[self.dialect]:
            return 404, {"detail": "Not Found"}
        if not body:
            return 422, {"detail": "field required"}
        failures: dict[str, Any] = {
            "garbage": f"<html>{ERROR_TEXT}",
            "deep": "[" * 100_000,
            "not an object": [ERROR_TEXT],
            "no metadata": {"answer": ERROR_TEXT, "success": True},
            "no success": {"answer": ERROR_TEXT, "success": False, "metadata": {}},
            "silent failure": {"answer": "", "success": True, "metadata": {}},
            "error as answer": {"answer": ERROR_TEXT, "success": True, "metadata": {}},
        }
        if self.mode in failures:
            return 200, failures[self.mode]
        if path == "/retrieve_task_memory":
            memories = self.memories[: body["top_k"]] if "nothing" not in body["query"] else []
            return 200, {"answer": "see the list", "success": True, "metadata": {"memory_list": memories}}
        if path == "/summary_task_memory":
            result = {"memory_list": MEMORIES, "update_result": {"deleted_count": 0, "inserted_count": 2}}
            return 200, {"answer": "[]", "success": True, "metadata": result}
        if path == "/search":
            return 200, {"answer": "" if "nothing" in body["query"] else "go kitchen", "success": True, "metadata": {}}
        if any(message["role"] == "tool" or not message.get("name") for message in body["messages"]):
            return 422, {"detail": "role"}
        return 200, {"answer": "noted", "success": True, "metadata": {}}

    def close(self) -> None:
        self._released.set()
        super().close()
