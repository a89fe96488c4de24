"""``EMClient``: a ReMe service as the maker of experience.

There are two services named ReMe, and both answer 200 to most failures. An answer is accepted only if it has the form
of a success; the text of a failure is never returned as an experience.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, Literal, get_args

from trainer_hooks.guidance.maker import NOTHING, MakerError, Retrieved
from trainer_hooks.guidance.summary import rated, text_of, unicode_of
from trajstore._core.base import locks
from trajstore._core.base.arguments import one_of, seconds, whole
from trajstore._core.base.interrupts import start_thread
from trajstore.errors import ConfigurationError, MissingDependencyError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

Dialect = Literal["auto", "0.2", "0.4"]

_RETRIED = ("connection", "server")
_RESTING = ("connection", "server", "timeout")
_ROLES = ("system", "user", "assistant")

_MOST_BYTES = 16 * 1024 * 1024
"""Size limit of an answer."""

_SHOWN = 200
_JSON = {"Content-Type": "application/json"}


class EMClient:
    """Client of a ReMe service. Thread-safe.

    Calls run in an event loop with its own thread, because only there one timeout covers a whole call: name lookup,
    connection, slow headers, and the body.

    Failed connections and status 5xx are retried up to ``retries`` times with growing delays. After a call that failed
    so, or timed out, calls fail at once for a while (kind ``resting``), so that an unavailable service costs a step
    little time.

    Args:
        base_url: of the service, such as ``http://127.0.0.1:8001``.
        workspace_id: workspace of the experiences (dialect 0.2).
        dialect: ``0.2`` (reme-ai up to 0.3.1), ``0.4``, or ``auto``: detected by a probe before the first call.
        retrieve_timeout, summary_timeout: seconds for one call.
        retries: further attempts of a call.
        backoff: seconds before the first retry; doubles each time.
        rest: seconds without calls after a failure; up to 16 times as many while failures continue.

    Raises:
        ConfigurationError: an argument is out of range.
        MissingDependencyError: httpx is not installed.
    """

    def __init__(
        self,
        base_url: str,
        *,
        workspace_id: str = "default",
        dialect: Dialect = "auto",
        retrieve_timeout: float = 10.0,
        summary_timeout: float = 120.0,
        retries: int = 2,
        backoff: float = 0.5,
        rest: float = 5.0,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigurationError(f"base_url: {base_url!r}, must begin with http:// or https://")
        if not workspace_id:
            raise ConfigurationError("workspace_id: '', must be a name")
        self._url = base_url.rstrip("/")
        self._workspace = workspace_id
        one_of("dialect", dialect, get_args(Dialect))
        self._dialect: Dialect = dialect
        self._timeouts = seconds("retrieve_timeout", retrieve_timeout), seconds("summary_timeout", summary_timeout)
        self._retries = whole("retries", retries, 0)
        self._backoff = seconds("backoff", backoff)
        self._rest = seconds("rest", rest)
        self._failures = 0
        self._rest_until = 0.0
        self._lock = locks.lock("EMClient._lock")
        self._closed = threading.Event()
        try:
            import httpx
        except ImportError:
            raise MissingDependencyError("httpx", "guided") from None
        self._httpx = httpx
        self._client = httpx.AsyncClient(timeout=None)
        self._loop = asyncio.new_event_loop()
        start_thread(threading.Thread(target=self._loop.run_forever, name="guidance-http", daemon=True))
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop).atexit = False

    def retrieve(self, query: str, k: int, *, workspace_id: str | None = None) -> Retrieved:
        """Return up to ``k`` experiences from the service; see ``ExperienceMaker``.

        Args:
            query: text of the conversation.
            k: maximum number of experiences.
            workspace_id: another workspace than the client's (dialect 0.2).
        """
        whole("k", k, 0)
        if not query.strip() or k < 1:
            return NOTHING  # the service answers an empty query with a failure
        if self._known_dialect() == "0.2":
            body = {"query": query, "top_k": k, "workspace_id": workspace_id or self._workspace}
            return _memories(self._success("/retrieve_task_memory", body, self._timeouts[0]), k)
        body = {"query": query, "limit": k, "min_score": 0.0}
        text = self._success("/search", body, self._timeouts[0]).get("answer")  # which names no memories
        return Retrieved(text) if isinstance(text, str) and text.strip() else NOTHING

    def summarize(self, rollouts: Sequence[AgentTrajectory], *, workspace_id: str | None = None) -> int:
        """Send rollouts to the service, which makes experiences of them; see ``ExperienceMaker``.

        Rollouts without an outcome or without messages are left out: a single one would make the service fail on all.

        Returns:
            The number of memories inserted, as reported by the service; with dialect 0.4, the number of rollouts
            accepted.
        """
        usable = rated(rollout for rollout in rollouts if rollout.messages)
        if not usable:
            return 0
        if self._known_dialect() == "0.2":
            trajectories = [{"messages": _messages(rollout), "score": outcome} for outcome, rollout in usable]
            body = {"trajectories": trajectories, "workspace_id": workspace_id or self._workspace}
            metadata = self._success("/summary_task_memory", body, self._timeouts[1])["metadata"]
            inserted = (metadata.get("update_result") or {}).get("inserted_count")
            if not isinstance(inserted, int):
                raise MakerError(
                    "failed", f"{self._url}: the summary does not list what was inserted: {str(metadata)[:200]}"
                )
            return inserted
        for outcome, rollout in usable:
            messages = [{"name": message["role"], **message} for message in _messages(rollout)]
            messages.append(
                {"name": "user", "role": "user", "content": f"Score of this try: {outcome:g} (1 is a success)."}
            )
            session = f"{rollout.task_id}-{rollout.rollout_id}"
            self._success("/auto_memory", {"messages": messages, "session_id": session}, self._timeouts[1])
        return len(usable)

    def close(self) -> None:
        """Refuse new calls, and cancel running ones."""
        self._closed.set()
        self._loop.call_soon_threadsafe(self._cancel)

    # ---- inside ----

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _known_dialect(self) -> Dialect:
        """Return the dialect; detect it by a probe if necessary: a body without fields, which runs no model."""
        if self._dialect != "auto":
            return self._dialect
        dialect: Dialect = "0.2"
        try:
            self._call("/retrieve_task_memory", {}, self._timeouts[0])
        except MakerError as error:
            if error.kind != "refused":
                raise
            dialect = "0.4" if "HTTP 404" in str(error) else "0.2"
        self._dialect = dialect
        logger.info("guidance: %s responds like reme-ai %s", self._url, dialect)
        return dialect

    def _success(self, path: str, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Return a successful answer, whose ``answer`` is a string and ``metadata`` a mapping."""
        answer = self._call(path, body, timeout)
        if not isinstance(answer, dict):
            raise MakerError("garbage", f"{self._url}{path}: the answer is no object: {str(answer)[:200]}")
        if answer.get("success") is not True:
            raise MakerError("failed", f"{self._url}{path}: no success: {str(answer.get('answer'))[:200]}")
        if not isinstance(answer.get("metadata"), dict):
            raise MakerError("garbage", f"{self._url}{path}: the answer has no metadata: {str(answer)[:200]}")
        return answer

    def _call(self, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        for attempt in range(self._retries + 1):
            self._check_open()
            try:
                answer = self._post(self._url + path, body, timeout)
            except MakerError as error:
                again = error.kind in _RETRIED and attempt < self._retries
                if again and not self._closed.wait(self._backoff * 2**attempt):
                    continue
                self._note(failed=error.kind in _RESTING)
                raise
            self._note(failed=False)
            return answer
        raise AssertionError("unreachable")

    def _post(self, url: str, body: Mapping[str, Any], timeout: float) -> Any:
        """POST JSON and return the JSON answer.

        Raises:
            MakerError: ``timeout``; ``connection`` (refused, reset, no such host); ``server`` (status 5xx); ``refused``
                (any other status than 200, with the beginning of its text); ``garbage`` (not JSON, or too long);
                ``closed`` (during the call).
        """
        call = asyncio.run_coroutine_threadsafe(self._answer(url, json.dumps(body).encode(), timeout), self._loop)
        try:
            status, text = call.result()
        except CancelledError:
            raise MakerError("closed", f"{url}: the client was closed") from None
        except TimeoutError as error:
            raise MakerError("timeout", f"{url}: no whole answer within {timeout:g} s") from error
        except (self._httpx.HTTPError, self._httpx.InvalidURL, OSError, UnicodeError) as error:
            raise MakerError("connection", f"{url}: {error!r}") from error
        if status != 200:
            excerpt = text[:_SHOWN].decode("utf-8", "replace")
            raise MakerError("server" if status >= 500 else "refused", f"{url}: HTTP {status}: {excerpt}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MakerError("garbage", f"{url}: the answer is no JSON: {text[:_SHOWN]!r}") from error

    async def _answer(self, url: str, data: bytes, timeout: float) -> tuple[int, bytes]:
        """Return status and body; runs in the loop like :meth:`_cancel`, so that no call starts after it."""
        if self._closed.is_set():
            raise MakerError("closed", f"{url}: the client was closed")
        text = bytearray()
        async with asyncio.timeout(timeout), self._client.stream("POST", url, content=data, headers=_JSON) as response:
            async for part in response.aiter_bytes():
                text += part
                if len(text) > _MOST_BYTES:
                    raise MakerError("garbage", f"{url}: the answer has more than {_MOST_BYTES} bytes")
        return response.status_code, bytes(text)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise MakerError("closed", "the client of the experience service was closed")
        with self._lock:
            left = self._rest_until - time.monotonic()
        if left > 0:
            raise MakerError("resting", f"{self._url}: failed recently; no calls for {left:.1f} s more")

    def _note(self, *, failed: bool) -> None:
        with self._lock:
            self._failures = self._failures + 1 if failed else 0
            rest = self._rest * 2 ** min(self._failures - 1, 4) if failed else 0.0
            self._rest_until = time.monotonic() + rest


def _memories(answer: Mapping[str, Any], k: int) -> Retrieved:
    """Return the memories of an answer of dialect 0.2, from its list and not from its text."""
    memories = answer["metadata"].get("memory_list")
    if not isinstance(memories, list):
        raise MakerError("failed", f"retrieval failed in the service: it answers without a list: {str(answer)[:200]}")
    found = [memory for memory in memories if isinstance(memory, Mapping)]
    found = [memory for memory in found if isinstance(text := memory.get("content"), str) and text.strip()][:k]
    parts = []
    for number, memory in enumerate(found, 1):
        usage = f" When to use: {when}\n" if (when := memory.get("when_to_use")) else ""
        parts.append(f"Memory {number} :\n{usage} Content: {memory['content']}")
    return Retrieved("\n\n".join(parts), tuple(unicode_of(str(memory.get("memory_id") or "")) for memory in found))


def _messages(rollout: AgentTrajectory) -> list[dict[str, str]]:
    """Return messages with roles that both services accept; messages of tools and environments become the user's."""
    return [
        {"role": str(message.get("role")) if message.get("role") in _ROLES else "user", "content": text_of(message)}
        for message in rollout.messages
    ]
