"""A session: the calls of one run of an agent, durable one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from trajstore._core.base import locks
from trajstore._core.base.arguments import check_kind, text
from trajstore._core.base.clock import microseconds
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.limits import shown
from trajstore._core.sessions.arguments import CheckedCalls, Named, TakesCalls, check_metadata
from trajstore._core.sessions.journal import CallJournal, Entry
from trajstore._core.sessions.records import encode_call, payload, plain
from trajstore._core.sessions.rows import path_rows
from trajstore._core.sessions.tree import Call, CallTree, Tokens
from trajstore.errors import CallConflictError, InvalidCallError, SessionFinishedError
from trajstore.trajectory import Reward


class Session(TakesCalls[Call]):
    """One run of an agent: a tree of model calls, each durable before :meth:`add_call` returns. Thread-safe.

    ``TrajectoryReplayBuffer.session`` and ``Sessions.session`` return it. When it is finished, each path of the tree,
    from a root to a call that no other continues, becomes a rollout of the store.

    Attributes:
        id: UUID, 32 hex digits.
        task_id: its task.
        rollout_id: its name within the task.
        fields: the fields of :class:`AgentTrajectory` that its rollouts share.
        row_ids: ids of its rollouts, once this process has added them; None before.
    """

    def __init__(
        self,
        journal: CallJournal,
        number: int,
        session_id: str,
        fields: Mapping[str, Any],
        add_rows: Callable[[Session], list[int]],
        calls: Sequence[Call] = (),
        state: str = "open",
        finish: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.id = session_id
        self.task_id: str = fields["task_id"]
        self.rollout_id: str = fields["rollout_id"]
        self.fields = dict(fields)
        self.row_ids: list[int] | None = None
        self._journal = journal
        self._number = number
        self._add_rows = add_rows
        self._lock = locks.lock("Session._lock")
        self._tree = CallTree(calls)
        self._state = state
        self._finish = dict(finish)
        # Records that were not known to be durable, in order: each with the number of its call, or the state before.
        self._pending: deque[tuple[Entry, int | str]] = deque()

    def __repr__(self) -> str:
        return f"Session({self.id}, task_id={self.task_id!r}, rollout_id={self.rollout_id!r})"

    async def add_call_async(self, prompt_ids: Any, sampled_ids: Any, log_probs: Any = None, **about: Any) -> Call:
        """:meth:`add_call`, from a task of an event loop, which runs other tasks until the call is durable.

        The values are taken over before the first other task runs. A call whose task is cancelled meanwhile may have
        been added.

        Args:
            prompt_ids: token ids of the whole prompt ``[P]``.
            sampled_ids: token ids that the model sampled ``[S]``.
            log_probs: of the sampled tokens ``[S]``; None if unknown.
            about: the other arguments of :meth:`add_call`.

        Raises:
            TrajstoreError: as :meth:`add_call`.
        """
        checked = CheckedCalls(self.task_id, self.rollout_id).add_call(prompt_ids, sampled_ids, log_probs, **about)
        call, entry = self._queued_call(**checked)
        if entry is not None:
            await self._journal.written(entry)
        return call

    def _add_call(self, **values: Any) -> Call:
        call, entry = self._queued_call(**values)
        if entry is not None:
            self._journal.wait(entry)
        return call

    def _queued_call(
        self,
        prompt: Tokens,
        sampled: Tokens,
        *,
        call_id: str | None,
        parent: str | None,
        messages: Sequence[Mapping[str, Any]] | None,
        **about: Any,
    ) -> tuple[Call, Entry | None]:
        """Return a call, and its record if it may not be durable yet."""
        self._check()
        about["time"] = microseconds()
        with Named(self.task_id, self.rollout_id, call_id), self._lock:
            while True:
                failures = self._settle()
                call = self._prepared(prompt, sampled, call_id, parent, messages, about)
                known = self._tree.by_id.get(call.id)
                if known is not None and known.gap is None:
                    _check_same(known, call, named=parent is not None, spoken=messages is not None)
                    entry = next((entry for entry, number in self._pending if number == known.number), None)
                    call = known
                    break
                if (entry := self._queue(call, failures)) is not None:
                    break
        return call, entry

    def incomplete(self, call_id: str, reason: str = "", *, metadata: Mapping[str, Any] | None = None) -> Call:
        """Record that a call happened whose tokens are unknown, and return it when this is durable.

        It is named in the metadata of the session's rollouts. Doing so again does nothing.

        Args:
            call_id: unique within the session.
            reason: why they are unknown.
            metadata: any JSON.

        Raises:
            InvalidCallError: an argument cannot be stored.
            CallConflictError: a call with this id was added.
            SessionFinishedError: the session was finished or discarded.
            StoreWriteError, StoreClosedError: as :meth:`add_call`.
        """
        self._check()
        text("call_id", call_id)
        check_kind("reason", reason, str, "a text")
        check_kind("metadata", metadata, Mapping, "a dict")
        with Named(self.task_id, self.rollout_id, call_id), self._lock:
            more = plain({"id": call_id, "reason": reason or "", "metadata": dict(metadata or {})})
            while True:
                failures = self._settle()
                known = self._tree.by_id.get(call_id)
                if known is not None:
                    if known.gap is None:
                        raise CallConflictError("was added with its tokens, so it is not incomplete")
                    entry = next((entry for entry, number in self._pending if number == known.number), None)
                    call = known
                    break
                call = Call(
                    number=len(self._tree.calls),
                    id=more["id"],
                    time=microseconds(),
                    gap=more["reason"],
                    metadata=more["metadata"],
                )
                if (entry := self._queue(call, failures)) is not None:
                    break
        if entry is not None:
            self._journal.wait(entry)
        return call

    def finish(
        self, reward: Any = None, *, is_terminated: bool | None = None, metadata: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Freeze the session, durably: each path becomes a rollout. Doing so again with the same arguments is no error.

        In the process that writes the store, the rollouts are added at once; ``flush`` and ``wait`` apply to them. From
        any other process, the store's writer adds them within about a second, or when it is next opened.

        Args:
            reward: a :class:`Reward` of all its rollouts; a score can also come later (:func:`trajstore.annotate`).
            is_terminated: whether the run ended by itself; None if unknown.
            metadata: any JSON, for the rollouts; in addition to the session's.

        Returns:
            The ids of the rollouts, one for each path; empty in a process that does not write the store.

        Raises:
            InvalidCallError: an argument cannot be stored; the session is as before.
            SessionFinishedError: it was finished with other arguments.
            StoreWriteError: it could not be written. If this was recorded, the writer tries again to add the rollouts.
        """
        self._check()
        entry: Entry | None
        with Named(self.task_id, self.rollout_id):
            check_kind("metadata", metadata, Mapping, "a dict")
            check_kind("is_terminated", is_terminated, bool | np.bool_, "True, False or None")
            if not isinstance(reward, Reward | None):
                raise InvalidCallError(f"reward: {shown(reward)}, must be a Reward or None")
            given = plain(
                {
                    "reward": None if reward is None else dict(vars(reward)),
                    "is_terminated": None if is_terminated is None else bool(is_terminated),
                    "metadata": dict(metadata or {}),
                }
            )
            check_metadata(given["metadata"])
            entry = self._change("finished", given)
        if entry is not None:
            self._journal.wait(entry)
        return self._add_rows(self)

    def freeze(self) -> None:
        """Refuse further calls, durably; :meth:`finish` can follow when the reward is known. Again does nothing.

        A call that was added before can still be repeated, and :meth:`incomplete` still records gaps.

        Raises:
            SessionFinishedError: it was discarded.
            StoreWriteError, StoreClosedError: as :meth:`add_call`.
        """
        self._check()
        if (entry := self._change("frozen")) is not None:
            self._journal.wait(entry)

    def discard(self) -> None:
        """End the session without rollouts, durably. Again does nothing.

        Raises:
            SessionFinishedError: it was finished.
            StoreWriteError, StoreClosedError: as :meth:`add_call`.
        """
        self._check()
        if (entry := self._change("discarded")) is not None:
            self._journal.wait(entry)
        self._add_rows(self)

    @property
    def state(self) -> str:
        """``open``, ``frozen``, ``finished`` or ``discarded``."""
        with self._lock:
            self._settle()
            return self._state

    @property
    def outcome(self) -> dict[str, Any]:
        """The arguments of :meth:`finish` as JSON; empty before."""
        with self._lock:
            self._settle()
            return dict(self._finish)

    def calls(self) -> list[Call]:
        """Return its calls as added, also those whose tokens are unknown (``call.gap``)."""
        with self._lock:
            self._settle()
            unsure = {number for _, number in self._pending if isinstance(number, int)}
            return [call for call in self._tree.calls if call.number not in unsure]

    # -- inside -----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuse a forked child, and a session that was closed before its end."""
        self._journal.check_process()
        if self.state in ("open", "frozen"):  # the journal of a session that is over may be deleted
            self._journal.check()

    def _settle(self) -> int:
        """Forget records that are durable, and undo those that failed; return the journal's number of failures."""
        pending, failures = self._pending, self._journal.failures
        while pending and pending[0][0].is_done and pending[0][0].error is None:
            pending.popleft()
        bad = next((at for at, (entry, _) in enumerate(pending) if not entry.is_queued or entry.error), None)
        if bad is not None:
            for _, before in reversed(list(pending)[bad:]):
                if isinstance(before, str):
                    self._state = before
                else:
                    self._tree = CallTree(self._tree.calls[:before])
            self._pending = deque(list(pending)[:bad])
        return failures

    def _change(self, state: str, finish: Mapping[str, Any] | None = None) -> Entry | None:
        """Queue a change of the state; None if there is nothing to wait for."""
        with self._lock:
            while True:
                failures = self._settle()
                if self._state == state or (state == "frozen" and self._state == "finished"):
                    if finish is not None and self._finish != finish:
                        raise SessionFinishedError(f"{self!r}: was finished with other arguments")
                    return next((entry for entry, before in reversed(self._pending) if isinstance(before, str)), None)
                if self._state in ("finished", "discarded"):
                    raise SessionFinishedError(f"{self!r}: was {self._state}, so it cannot be {state}")
                fields: dict[str, Any] = {"s": self._number, "at": microseconds()}
                if finish is not None:
                    for row in path_rows(self.id, self._tree, self.fields, finish):
                        flatten(row)  # refuses what the store would refuse
                entry = Entry(payload(fields | ({"state": state} if finish is None else {"finish": finish})))
                self._pending.append((entry, self._state))
                self._state, self._finish = state, dict(finish or {})
                if self._journal.queue(entry, failures):
                    return entry

    def _queue(self, call: Call, failures: int) -> Entry | None:
        """Add a call to the tree and to the journal's queue; None if it must be prepared again."""
        if self._state not in (("open", "frozen") if call.gap is not None else ("open",)):
            raise SessionFinishedError(f"{self!r}: was {self._state}, so no call can be added; open a new session")
        entry = Entry(encode_call(call, self._number))
        self._pending.append((entry, call.number))  # first: an interrupted addition is undone by the next call
        self._tree.add(call)
        return entry if self._journal.queue(entry, failures) else None

    def _prepared(
        self,
        prompt: Tokens,
        sampled: Tokens,
        call_id: str | None,
        parent: str | None,
        messages: Sequence[Mapping[str, Any]] | None,
        about: Mapping[str, Any],
    ) -> Call:
        """Return a call with its place in the tree, and the other fields ``about`` it."""
        above, base, taken = self._tree.find(prompt)
        if parent is not None:
            named = self._tree.by_id.get(parent)
            if named is None or named.gap is not None:
                raise InvalidCallError(
                    f"parent {shown(parent)}: the session has no such call" + (" with tokens" if named else "")
                )
            if named.stop > len(prompt) or not np.array_equal(named.tokens, prompt[: named.stop]):
                raise InvalidCallError(
                    f"prompt_ids: do not begin with the {named.stop} tokens of the parent {shown(parent)}; omit parent "
                    "for a call with a rewritten history"
                )
            above = named
        number = len(self._tree.calls)
        kept, spoken = _new_messages(above, messages)
        return Call(
            number=number,
            id=call_id or _unused(str(number), self._tree),
            parent=above,
            base=base,
            taken=taken,
            start=len(prompt),
            added=np.concatenate([prompt[taken:], sampled]),
            kept=kept,
            messages=spoken,
            **about,
        )


def _unused(name: str, tree: CallTree) -> str:
    while name in tree.by_id:
        name += "'"
    return name


def _new_messages(
    parent: Call | None, messages: Sequence[Mapping[str, Any]] | None
) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of messages in common with the parent, and the others."""
    if messages is None:
        return 0 if parent is None else parent.kept + len(parent.messages), []
    before = [] if parent is None else parent.conversation
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not (is_list and all(isinstance(message, Mapping) for message in messages)):
        raise InvalidCallError(f"messages: {shown(messages)}, must be a list of dicts")
    try:
        kept = next((at for at, pair in enumerate(zip(before, messages, strict=False)) if pair[0] != pair[1]), None)
    except ValueError:  # an array of numpy compares its items
        return _new_messages(parent, plain({"messages": [dict(message) for message in messages]})["messages"])
    kept = min(len(before), len(messages)) if kept is None else kept
    spoken: list[dict[str, Any]] = plain({"messages": [dict(message) for message in messages[kept:]]})["messages"]
    return kept, spoken


def _check_same(known: Call, call: Call, *, named: bool, spoken: bool) -> None:
    """Refuse a repeated id with other content.

    Args:
        known: the call that has the id.
        call: the new one.
        named: whether its parent was named.
        spoken: whether its messages were given.
    """
    pairs = {
        "prompt_ids": known.start == call.start and np.array_equal(known.prompt_ids, call.prompt_ids),
        "sampled_ids": np.array_equal(known.sampled_ids, call.sampled_ids),
        "log_probs": (known.log_probs is None) == (call.log_probs is None)
        and (known.log_probs is None or np.array_equal(known.log_probs, call.log_probs)),  # type: ignore[arg-type]
        "parent": not named or known.parent is call.parent,
        "messages": not spoken or known.conversation == call.conversation,
        "policy_version": known.policy_version == call.policy_version,
        "finish_reason": known.finish_reason == call.finish_reason,
        "metadata": known.metadata == call.metadata,
    }
    if differ := [name for name, is_same in pairs.items() if not is_same]:
        raise CallConflictError(f"was added before with other {', '.join(differ)}; give each call an id of its own")
