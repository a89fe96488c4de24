"""A server that answers as vLLM does, with token ids and log-probs; its tokens are bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_BEGIN, _END = 256, 257

Answer = Callable[[list[dict[str, Any]]], str]


def tokens_of(messages: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of a conversation, with the beginning of the answer."""
    ids: list[int] = []
    for message in messages:
        ids += [_BEGIN, ord(message["role"][0]), *message["content"].encode(), _END]
    return [*ids, _BEGIN, ord("a")]


@contextmanager
def engine(answer: Answer) -> Iterator[str]:
    """Run a server in a thread; yield its address.

    Args:
        answer: returns the model's text for the messages.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = answer(asked["messages"])
            sampled = [*text.encode(), _END]
            choice: dict[str, Any] = {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
            }
            found: dict[str, Any] = {"id": "chat", "object": "chat.completion", "choices": [choice]}
            if asked.get("logprobs"):
                pairs = [{"token": f"token_id:{token}", "logprob": -token / 1024} for token in sampled]
                choice["logprobs"] = {"content": pairs}
            if asked.get("return_token_ids"):
                choice["token_ids"] = sampled
                found["prompt_token_ids"] = tokens_of(asked["messages"])
            content = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
