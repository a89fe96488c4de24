"""A language model behind an OpenAI-compatible endpoint as summarizer: what it is asked, what is believed."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tests.guidance.reme import FakeReMe
from tests.guidance.rollouts import rollout
from trajstore.guidance import EndpointSummarizer, LocalMaker, MakerError

SAID = 'Here it is:\n```json\n{"when_to_use": "looking for a cup", "experience": "go {kitchen}"}\n```'


class Endpoint(FakeReMe):
    """Answers chat calls with ``content``; keeps the keys that it was sent, too."""

    content: Any = SAID
    key: str | None = None

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.key = handler.headers["Authorization"]
        super().answer(handler, body)

    def _said(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (200 if path == "/v1/chat/completions" else 404), {"choices": [{"message": {"content": self.content}}]}


def test_the_model_reads_tries_with_their_scores_and_its_answer_is_an_experience() -> None:
    tries = [rollout("cup", f"go {number}", number / 4, str(number)) for number in range(5)]
    with (
        Endpoint() as endpoint,
        EndpointSummarizer(f"{endpoint.url}/v1/", "m", api_key="secret", most_rollouts=3) as summarizer,
    ):
        maker = LocalMaker(summarizer=summarizer)
        assert maker.summarize([*tries, rollout("book", "?", None)]) == 1, "a task without outcomes is not asked for"
        [(_, body)] = endpoint.calls
        assert (endpoint.key, body["model"]) == ("Bearer secret", "m")
        prompt = body["messages"][0]["content"]
        assert [score for score in (1.0, 0.75, 0.5, 0.25, 0.0) if f"Score {score}:" in prompt] == [1.0, 0.75, 0.0]
        assert "go {kitchen}" in maker.retrieve("cup", 1).text
        summarizer.close()
        with pytest.raises(MakerError, match="closed"):
            summarizer(tries)


@pytest.mark.parametrize(
    "content", ["no object", '{"when_to_use": "x"}', '{"when_to_use": "", "experience": "x"}', None, 3]
)
def test_an_answer_without_an_experience_is_garbage(content: Any) -> None:
    with Endpoint() as endpoint, EndpointSummarizer(f"{endpoint.url}/v1", "m") as summarizer:
        endpoint.content = content
        with pytest.raises(MakerError, match="holds no experience") as caught:
            summarizer([rollout("cup", "go", 1.0)])
    assert caught.value.kind == "garbage"
