"""A summarizer that asks a language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from trajstore.arguments import seconds, whole
from trajstore.checked import checked
from trajstore.closing import Closing
from trajstore.errors import ConfigurationError
from trajstore.guidance.experience import Experience
from trajstore.guidance.json_client import JsonClient
from trajstore.guidance.maker import MakerError
from trajstore.guidance.summary import query_of, text_of
from trajstore.trajectory import AgentTrajectory

PROMPT = (
    "Below are tries of one task with their scores; 1 is a success. Say in a few sentences what the next try should do"
    ' and what it should avoid. Answer with a JSON object {"when_to_use": "...", "experience": "..."} and nothing else.'
)
"""The default instructions."""

_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


@checked
class EndpointSummarizer(Closing):
    """One experience for each task, written by a language model.

    Args:
        base_url: of the endpoint, ``/v1`` included.
        model: name of the model there.
        api_key: sent as a bearer token if not empty.
        prompt: the instructions; the tries follow.
        timeout: seconds for one answer.
        most_rollouts: tries of a task in a prompt.
        most_characters: of each try.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "",
        prompt: str = PROMPT,
        timeout: float = 60.0,
        most_rollouts: int = 4,
        most_characters: int = 4000,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigurationError(f"base_url: {base_url!r}, must begin with http:// or https://")
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._model = model
        self._http = JsonClient()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._prompt = prompt
        self._timeout = seconds("timeout", timeout)
        self._most_rollouts = whole("most_rollouts", most_rollouts, 1)
        self._most_characters = whole("most_characters", most_characters, 1)

    def __call__(self, rollouts: Sequence[AgentTrajectory], /) -> list[Experience]:
        """Return the experience that the model writes.

        Raises:
            MakerError: the endpoint could not be reached, or its answer holds no such object.
        """
        rated = [(one.reward.outcome, one) for one in rollouts if one.reward and one.reward.outcome is not None]
        if not rated:
            return []
        rated.sort(key=lambda pair: pair[0], reverse=True)
        half = max(self._most_rollouts // 2, 1)
        shown = rated if len(rated) <= self._most_rollouts else [*rated[:half], *rated[-half:]]
        tries = "\n\n".join(f"Score {outcome}:\n{self._text(one)}" for outcome, one in shown)
        asked = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"{self._prompt}\n\n{tries}"}],
            "stream": False,
        }
        said = self._answer(self._http.post(self._url, asked, self._timeout, self._headers))
        best = rated[0][1]
        return [
            Experience(
                when_to_use=said["when_to_use"],
                content=said["experience"],
                query=best.query or query_of(best.messages),
                task_id=best.task_id,
                score=rated[0][0],
                sources=tuple(one.rollout_id for _, one in shown),
            )
        ]

    def close(self) -> None:
        """End a call that is under way, and refuse others."""
        self._http.close()

    def _text(self, rollout: AgentTrajectory) -> str:
        text = "\n".join(f"{message.get('role')}: {text_of(message)}" for message in rollout.messages)
        return text[: self._most_characters]

    def _answer(self, body: Any) -> dict[str, str]:
        try:
            content = body["choices"][0]["message"]["content"]
            found = _OBJECT.search(content)
            said = json.loads(found.group() if found else "")
            result = {key: said[key] for key in ("when_to_use", "experience")}
            if not all(isinstance(value, str) and value.strip() for value in result.values()):
                raise ValueError("when_to_use and experience must be texts")
            "".join(result.values()).encode()  # halves of surrogate pairs are no text
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise MakerError("garbage", f"{self._url}: the answer holds no experience: {error!r}") from error
        return result
