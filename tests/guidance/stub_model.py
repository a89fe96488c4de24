"""A loopback stub of the model and embeddings that ReMe uses."""

from __future__ import annotations

import hashlib
import json
import random
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.guidance.loopback import Loopback

VALIDATION = '```json\n{"is_valid": true, "score": 0.9, "feedback": "", "recommendations": ""}\n```'


class StubModel(Loopback):
    """Answers extraction prompts with new memories and validation prompts with yes; streams like ReMe expects."""

    def __init__(self) -> None:
        self.up = True
        """False: every call returns status 500."""
        self._count = 0
        super().__init__()
        self.url += "/v1"

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        handler.send_response(200 if self.up else 500)
        handler.end_headers()
        if self.up:
            answer_body = self._embeddings(body) if handler.path.endswith("/embeddings") else self._chat(body)
            handler.wfile.write(answer_body.encode())

    def _embeddings(self, body: dict[str, Any]) -> str:
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = []
        for index, text in enumerate(texts):
            draw = random.Random(hashlib.sha256(str(text).encode()).hexdigest())
            values = [draw.gauss(0, 1) for _ in range(body.get("dimensions") or 1024)]
            data.append({"object": "embedding", "index": index, "embedding": values})
        return json.dumps(
            {"object": "list", "data": data, "model": "stub", "usage": {"prompt_tokens": 1, "total_tokens": 1}}
        )

    def _chat(self, body: dict[str, Any]) -> str:
        self._count += 1
        memory = {"when_to_use": f"looking for a cup {self._count}", "experience": "go kitchen", "confidence": 0.9}
        extraction = f"```json\n{json.dumps([memory])}\n```"
        text = VALIDATION if "is_valid" in json.dumps(body["messages"]) else extraction
        delta: dict[str, Any] = {"role": "assistant", "content": text}
        answered = any(message.get("role") == "tool" for message in body["messages"])
        if not answered and any(tool["function"]["name"] == "daily_write" for tool in body.get("tools") or ()):
            note = {"name": "cup", "description": "where the cup is", "session_id": "s", "date": "2026-01-01"}
            content = json.dumps({**note, "content": "The cup is in the kitchen: go kitchen."})
            call = {
                "index": 0,
                "id": "1",
                "type": "function",
                "function": {"name": "daily_write", "arguments": content},
            }
            delta = {"role": "assistant", "content": "", "tool_calls": [call]}
        parts = [(delta, None), ({}, "tool_calls" if "tool_calls" in delta else "stop")]
        lines = [
            json.dumps(
                {
                    "id": "1",
                    "object": "chat.completion.chunk",
                    "created": 1,
                    "model": "stub",
                    "choices": [{"index": 0, "delta": part, "finish_reason": reason}],
                }
            )
            for part, reason in parts
        ]
        return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
