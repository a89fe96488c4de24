"""A server that answers as vLLM does, with token ids and log-probs; its tokens are bytes."""

from __future__ import annotations

import itertools
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
        answer: returns the model's text for the messages; the server refuses the request on a ValueError.
    """

    numbers = itertools.count(1)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, found = 200, _answered(next(numbers), asked, answer(asked["messages"]))
            except ValueError as error:
                status, found = 400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
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


def _answered(number: int, asked: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the answer with the fields of ``ChatCompletionResponse`` of vLLM 0.10.2; absent ones are null."""
    prompt, sampled = tokens_of(asked["messages"]), [*text.encode(), _END]
    with_ids = bool(asked.get("return_token_ids"))
    of_tokens = [
        {"token": chr(token), "logprob": -token / 1024, "bytes": [token % 256], "top_logprobs": []} for token in sampled
    ]
    message = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, **message, "tool_calls": []},
        "logprobs": {"content": of_tokens} if asked.get("logprobs") else None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": sampled if with_ids else None,
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled), "total_tokens": len(prompt + sampled)}
    return {
        "id": f"chatcmpl-{number:032x}",
        "object": "chat.completion",
        "created": 0,
        "model": asked["model"],
        "choices": [choice],
        "usage": usage,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if with_ids else None,
    }
