"""Traces of rLLM's model gateway in a store: a ``TraceStore``.

Written for rllm-model-gateway 0.1, whose interface is in ``rllm_model_gateway.store.base``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainer_hooks.integrations.gateway import Gateway, is_exact, restored, shortened
from trajstore import Call, Session
from trajstore.errors import CallConflictError

_TRACE = "trace"
"""Key of a call's ``metadata`` with the id of its trace, where that is not the call's."""

logger = logging.getLogger(__name__)

RLLM = "rllm"
"""Key of a call's ``metadata`` with its trace, without what the call has."""


class SessionTraceStore(Gateway):
    """Keeps the traces of the gateway's sessions as calls, and gives them back. Thread-safe.

    ``create_app(config, store=SessionTraceStore(PATH))``. :meth:`finish` makes rollouts of a session;
    ``delete_session`` without it discards the traces. Copies of the history within a trace, also in its raw request,
    are stored once. A trace without tokens is a call whose tokens are unknown; it can be stored again with other
    content.

    Args:
        store: path of the store, or the buffer that writes it, if that is in this process.
        task_of: returns the task of a session's id; sessions of one task are a group.
    """

    async def store_trace(self, trace_id: str, session_id: str, data: dict[str, Any]) -> None:
        """Return when a trace is durable. The same trace again does nothing.

        Raises:
            CallConflictError: the trace was stored with tokens and other content.
            TrajstoreError: it could not be added.
        """
        await self.recorded(self._store(trace_id, session_id, data))  # the gateway reads what it does not wait for

    async def _store(self, trace_id: str, session_id: str, data: dict[str, Any]) -> None:
        session = await self.opened(session_id)
        copies, log_probs = _values(data)
        metadata = {RLLM: shortened(data, copies)}
        if not copies:
            await self.waited(_add_without_tokens, session, trace_id, metadata)
        else:
            has_messages = bool(copies["messages"] and copies["answer"])
            await session.add_call_async(
                copies["prompt"],
                copies["sampled"],
                log_probs,
                call_id=trace_id,
                messages=[*copies["messages"], copies["answer"]] if has_messages else None,
                policy_version=data.get("weight_version"),
                finish_reason=data.get("finish_reason") or "",
                metadata=metadata,
            )

    async def get_trace(self, trace_id: str) -> dict[str, Any] | None:
        """Return a trace, or None."""
        await self.flush()
        return await self.waited(self._trace, trace_id)

    def _trace(self, trace_id: str) -> dict[str, Any] | None:
        here = [
            session.rollout_id
            for session in self._sessions._known.copy().values()
            if any(_trace_id(call) == trace_id for call in session.calls())
        ]
        for session_id in here or [info.rollout_id for info in self._sessions.listed()]:  # of before a restart
            if (found := self._traces(session_id).get(trace_id)) is not None:
                return _trace_of(found)
        return None

    async def get_session_traces(
        self, session_id: str, since: float | None = None, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the traces of a session, in order; none once its rollouts were added.

        Args:
            session_id: of the gateway.
            since: seconds since 1970; those stored before are left out.
            limit: most traces.
        """
        await self.flush()
        traces = await self.waited(self._traces, session_id)
        found = [call for call in traces.values() if since is None or call.time >= since * 1e6]
        return [_trace_of(call) for call in found[:limit]]

    def _traces(self, session_id: str) -> dict[str, Call]:
        """Return the newest calls by trace, in the order in which they were first stored."""
        return {_trace_id(call): call for call in self.calls(session_id) if RLLM in call.metadata}

    async def delete_session(self, session_id: str) -> int:
        """Discard the traces of a session that is not finished; return their number."""
        await self.flush()
        return await self.waited(self._delete, session_id)

    def _delete(self, session_id: str) -> int:
        traces = self._traces(session_id)
        return len(traces) if self.discard(session_id) else 0

    async def list_sessions(self, since: float | None = None, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the sessions that have traces, the newest first, with their number and times.

        Args:
            since: seconds since 1970; sessions whose first trace is older are left out.
            limit: most sessions.
        """
        await self.flush()
        return (await self.waited(self._listed, since))[:limit]

    def _listed(self, since: float | None) -> list[dict[str, Any]]:
        found = []
        for info in self._sessions.listed():
            traces = self._traces(info.rollout_id)
            times = [call.time / 1e6 for call in traces.values()]
            if times and (since is None or min(times) >= since):
                about = {"session_id": info.rollout_id, "trace_count": len(traces)}
                found.append({**about, "first_trace_at": min(times), "last_trace_at": max(times)})
        return sorted(found, key=lambda about: about["first_trace_at"], reverse=True)


def _values(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[float] | None]:
    """Return the values of a trace that its call has, too, none if it has no tokens; and its log-probs."""
    prompt, sampled = data.get("prompt_token_ids"), data.get("completion_token_ids")
    if not (isinstance(prompt, list) and isinstance(sampled, list) and prompt and sampled):
        return {}, None
    messages, answer = data.get("messages"), data.get("response_message")
    if not (isinstance(messages, list) and isinstance(answer, dict) and messages and answer):
        messages, answer = [], {}
    log_probs = _log_probs_in(data)
    exact = log_probs if log_probs and is_exact(log_probs) else []
    copies = {"prompt": prompt, "sampled": sampled, "log_probs": exact, "messages": messages, "answer": answer}
    return copies, log_probs


def _log_probs_in(data: Mapping[str, Any]) -> list[float] | None:
    """Return the log-probs of a trace; None, with a warning, if they do not belong to its tokens."""
    values, count = data.get("logprobs"), len(data["completion_token_ids"])
    if not values:
        return None
    if len(values) == count and all(isinstance(value, int | float) and -1e30 < value <= 0 for value in values):
        return list(values)
    logger.warning(
        "trace %s: logprobs: not a number of at most 0 for each of %d tokens; its rollout has none",
        data.get("trace_id"),
        count,
    )
    return None


def _add_without_tokens(session: Session, trace_id: str, metadata: dict[str, Any]) -> None:
    """Add a trace without tokens; under another call id, if it was stored with other content."""
    known = [call for call in session.calls() if _trace_id(call) == trace_id]
    if known and known[-1].gap is None:
        raise CallConflictError(f"trace {trace_id!r} was stored with tokens, and is now without")
    if not known or known[-1].metadata[RLLM] != metadata[RLLM]:
        call_id = f"{trace_id} ({len(known) + 1})" if known else trace_id
        session.incomplete(call_id, "no token ids", metadata=metadata | {_TRACE: trace_id})


def _trace_id(call: Call) -> str:
    return str(call.metadata.get(_TRACE, call.id))


def _trace_of(call: Call) -> dict[str, Any]:
    conversation = call.conversation
    copies = {
        "prompt": call.prompt_ids.tolist(),
        "sampled": call.sampled_ids.tolist(),
        "log_probs": [] if call.log_probs is None else call.log_probs.tolist(),
        "messages": conversation[:-1],
        "answer": conversation[-1] if conversation else {},
    }
    trace: dict[str, Any] = restored(call.metadata[RLLM], copies)
    return trace
