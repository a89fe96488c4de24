"""The arguments with which sessions are opened and calls added, in every process: defined and checked once. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from trajstore._core.base.arguments import check_kind
from trajstore._core.columns.limits import shown, version_number
from trajstore._core.sessions.records import plain
from trajstore._core.sessions.tree import Call, CallTree, LogProbs, Tokens
from trajstore.errors import InvalidCallError, InvalidTrajectoryError, counted

Opened = TypeVar("Opened")
Added = TypeVar("Added")

_HIGHEST = (1 << 31) - 1
_LOWEST = float(np.finfo(np.float32).min)


class OpensSessions(Generic[Opened]):
    """Opens sessions: a buffer, the :class:`Sessions` of a store, a handle of Ray."""

    def session(
        self,
        task_id: str,
        rollout_id: str = "",
        *,
        query: str = "",
        data_id: str = "",
        tokenizer_fingerprint: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> Opened:
        """Open a session of an agent, or continue an open one of the same ``task_id`` and ``rollout_id``.

        A session takes the calls of a model one by one, each durable at once; when it is finished, its paths become
        rollouts. A buffer opens those of its own store; other processes of the machine use :class:`trajstore.Sessions`,
        those of other machines a handle, for which all sessions of a task are in one store.

        Args:
            task_id: its task: rollouts of one task are a group.
            rollout_id: its name within the task; empty for a new session, which is named by its UUID.
            query: the user's request.
            data_id: row of a dataset.
            tokenizer_fingerprint: identifies tokenizer and chat template.
            metadata: any JSON, for its rollouts; all but the key ``session``.

        Raises:
            InvalidCallError: a value cannot be stored, or differs from that of the open session.
            StoreLockedError: another process that is alive has this session open.
            StoreWriteError: it could not be recorded.
            StoreError: the buffer has no store.
            ConfigurationError: the buffer's store is not on a local disk.
            StoreUnreachableError: the store of a handle has not answered.
        """
        texts = {"task_id": task_id, "rollout_id": rollout_id, "query": query, "data_id": data_id}
        texts["tokenizer_fingerprint"] = tokenizer_fingerprint
        for name, value in texts.items():
            check_kind(name, value, str, "a text")
        check_kind("metadata", metadata, Mapping, "a dict")
        with Named(task_id, rollout_id):
            fields = plain({name: value or "" for name, value in texts.items()} | {"metadata": dict(metadata or {})})
        check_metadata(fields["metadata"])
        return self._open_session(fields)

    def _open_session(self, fields: dict[str, Any]) -> Opened:
        raise NotImplementedError


class TakesCalls(Generic[Added]):
    """Takes the calls of one run of an agent: a session, in this process or through a handle of Ray."""

    task_id: str
    rollout_id: str

    def add_call(
        self,
        prompt_ids: Any,
        sampled_ids: Any,
        log_probs: Any = None,
        *,
        call_id: str | None = None,
        parent: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        policy_version: int | None = None,
        finish_reason: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> Added:
        """Add a call of the model, and return it when it is durable; through a handle, its id.

        Only what it adds is stored: tokens and messages that it shares with an earlier call are not. Arrays and tensors
        are converted faster than lists. A call that was added before under the same ``call_id`` is returned again; one
        that was :meth:`incomplete` no longer is.

        Args:
            prompt_ids: token ids of the whole prompt, with the history ``[P]``, P > 0.
            sampled_ids: token ids that the model sampled ``[S]``.
            log_probs: of the sampled tokens ``[S]``, natural logarithm, as the engine reported them; None if unknown.
            call_id: unique within the session, for attempts that are repeated; None numbers the calls.
            parent: id of the call that this one continues; the prompt must begin with all its tokens. None: the call
                whose tokens are the longest prefix of the prompt; a root if there is none.
            messages: the conversation up to and including the model's answer. None: that of the parent.
            policy_version: training step whose weights sampled.
            finish_reason: why the model stopped.
            metadata: any JSON.

        Raises:
            InvalidCallError: arguments do not fit together; the session is as before.
            CallConflictError: another call has this ``call_id``.
            SessionFinishedError: the session was frozen, finished or discarded.
            StoreWriteError: it could not be written, and was not added; the next call may succeed.
            StoreClosedError: the sessions were closed, or belong to the parent process.
            StoreUnreachableError: the store of a handle has not answered. Add the call again, under the same
                ``call_id``.
        """
        with Named(self.task_id, self.rollout_id, call_id):
            prompt, sampled = token_ids("prompt_ids", prompt_ids), token_ids("sampled_ids", sampled_ids)
            if not len(prompt):
                raise InvalidCallError("prompt_ids: empty, must have at least one token")
            check_kind("call_id", call_id, str, "a text or None")
            check_kind("parent", parent, str, "the id of a call, or None")
            check_kind("metadata", metadata, Mapping, "a dict")
            check_kind("finish_reason", finish_reason, str, "a text")
            reason = finish_reason or ""
            more: dict[str, Any] = {"metadata": {}, "finish_reason": reason}
            if metadata or not (call_id or "").isascii() or not reason.isascii():
                more = plain({"metadata": dict(metadata or {}), "call": call_id, "finish_reason": reason})
            values = {
                "prompt": prompt,
                "sampled": sampled,
                "call_id": call_id,
                "parent": parent,
                "messages": messages,
                "log_probs": sampled_log_probs(log_probs, len(sampled)),
                "policy_version": None if policy_version is None else version_number("policy_version", policy_version),
                "finish_reason": more["finish_reason"],
                "metadata": more["metadata"],
            }
        return self._add_call(**values)

    def calls(self) -> list[Call]:
        """Return its calls as added, also those whose tokens are unknown (``call.gap``)."""
        raise NotImplementedError

    def paths(self) -> list[list[Call]]:
        """Return its paths, each from a root to a call that no other continues; a rollout has the calls of one."""
        return [leaf.line for leaf in CallTree(self.calls()).leaves()]

    def _add_call(self, **values: Any) -> Added:
        """Add a call with the checked arguments of :meth:`add_call`."""
        raise NotImplementedError


class CheckedCalls(TakesCalls[dict[str, Any]]):
    """Returns the checked arguments of calls, and adds none."""

    def __init__(self, task_id: str, rollout_id: str) -> None:
        self.task_id, self.rollout_id = task_id, rollout_id

    def _add_call(self, **values: Any) -> dict[str, Any]:
        return values


def token_ids(name: str, value: Any) -> Tokens:
    """Return token ids ``[n]`` as int32; the array may alias ``value``.

    Raises:
        InvalidCallError: they are no whole numbers in [0, 2^31).
    """
    quick = _from_list("i", value)
    if quick is not None and int(quick.min(initial=0)) >= 0:
        return quick
    array = _array(name, value)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidCallError(f"{name}: {shown(value)}, must be a list of whole numbers")
    if array.size and (int(array.min()) < 0 or int(array.max()) > _HIGHEST):
        at = int(np.argmax((array < 0) | (array > _HIGHEST)))
        raise InvalidCallError(f"{name}[{at}]: {array[at]}, must be in [0, {_HIGHEST}]")
    return array.astype(np.int32, copy=False)


def sampled_log_probs(value: Any, count: int) -> LogProbs | None:
    """Return the log-probabilities of ``count`` sampled tokens as float32, a copy; None stays None.

    Raises:
        InvalidCallError: their number differs, or one is above 0 or not finite.
    """
    if value is None:
        return None
    quick = _from_list("d", value)
    array = _array("log_probs", value) if quick is None else quick
    if array.size and array.dtype.kind not in "fiu":
        raise InvalidCallError(f"log_probs: {shown(value)}, must be a list of numbers")
    if len(array) != count:
        raise InvalidCallError(
            f"log_probs: has {counted(len(array), 'entry')}, must have one for each of {count} sampled tokens"
        )
    if array.size and not (array.max() <= 0 and array.min() >= _LOWEST):  # not so if one is no number
        at = int(np.argmin((array <= 0) & (array >= _LOWEST)))
        raise InvalidCallError(f"log_probs[{at}]: {array[at]}, must be a finite number of at most 0")
    return array.astype(np.float32)


def _from_list(code: str, value: Any) -> np.ndarray[Any, Any] | None:
    """Return the numbers of a list as an array, in half the time of numpy; None if they are other numbers."""
    try:
        is_plain = type(value) is list and bool(value) and type(value[0]) is not bool
        return np.frombuffer(struct.pack(f"{len(value)}{code}", *value), code) if is_plain else None
    except struct.error:
        return None


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    if hasattr(value, "detach"):  # a tensor: perhaps on a device, or of a dtype that numpy lacks
        value = value.detach().to("cpu")
        value = value.float() if value.is_floating_point() else value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # ragged
        array = np.zeros((), np.object_)
    if array.ndim != 1:
        raise InvalidCallError(f"{name}: {shown(value)}, must be a list of numbers, one for each token")
    return array


class Named:
    """Names session and call in refusals, all of which become :class:`InvalidCallError`."""

    def __init__(self, task_id: str, rollout_id: str, call_id: str | None = None) -> None:
        self._names = task_id, rollout_id, call_id

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InvalidCallError | InvalidTrajectoryError):
            made = type(error) if isinstance(error, InvalidCallError) else InvalidCallError
            task_id, rollout_id, call_id = self._names
            name = f"session {task_id}/{rollout_id}" + (f", call {call_id}" if call_id else "")
            name = name.encode("utf8", "backslashreplace").decode()  # half of a surrogate pair cannot be printed
            raise made(f"{name}: {error}") from error


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse metadata with the key that the session's rollouts use themselves."""
    if "session" in metadata:
        raise InvalidCallError("metadata: the key 'session' is the session's own; use another")
