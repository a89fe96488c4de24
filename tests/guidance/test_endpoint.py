"""A language model behind an OpenAI-compatible endpoint as summarizer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.guidance.rollouts import rollout
from trajstore.guidance import EndpointSummarizer, LocalMaker, MakerError

SAID = 'Here it is:\n```json\n{"when_to_use": "looking for a cup", "experience": "go {kitchen}"}\n```'


class Endpoint:
    """Answers chat calls with ``content``; keeps what it was sent."""

    def __init__(self) -> None:
        self.content: Any = SAID
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                endpoint.keys.append(self.headers["Authorization"])
                data = json.dumps({"choices": [{"message": {"content": endpoint.content}}]}).encode()
                self.send_response(200 if self.path == "/v1/chat/completions" else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def test_the_model_reads_tries_with_their_scores_and_its_answer_is_an_experience(endpoint: Endpoint) -> None:
    maker = LocalMaker(summarizer=EndpointSummarizer(endpoint.url, "m", api_key="secret", most_rollouts=2))
    tries = [rollout("cup", f"go {number}", number / 4, str(number)) for number in range(5)]
    assert maker.summarize([*tries, rollout("book", "?", None)]) == 1, "a task without outcomes is not asked for"
    [body] = endpoint.bodies
    assert endpoint.keys == ["Bearer secret"]
    assert body["model"] == "m"
    prompt = body["messages"][0]["content"]
    assert "Score 1.0" in prompt
    assert "Score 0.0" in prompt
    assert "Score 0.5" not in prompt
    found = maker.retrieve("cup", 1)
    assert "go {kitchen}" in found.text


@pytest.mark.parametrize(
    "content", ["no object", '{"when_to_use": "x"}', '{"when_to_use": "", "experience": "x"}', None, 3]
)
def test_an_answer_without_an_experience_is_garbage(endpoint: Endpoint, content: Any) -> None:
    endpoint.content = content
    with pytest.raises(MakerError, match="holds no experience") as caught:
        EndpointSummarizer(endpoint.url, "m")([rollout("cup", "go", 1.0)])
    assert caught.value.kind == "garbage"


def test_another_address_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(MakerError, match="HTTP 404") as caught:
        EndpointSummarizer(endpoint.url + "/x", "m")([rollout("cup", "go", 1.0)])
    assert caught.value.kind == "refused"
