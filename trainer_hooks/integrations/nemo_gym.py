"""Token capture of NeMo Gym in a store: a ``TokenSink`` and ``TokenSource``.

Written for NeMo Gym 0.5, whose interfaces are in ``nemo_gym.token_id_capture.protocols``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn

from trainer_hooks.integrations.gateway import Gateway, is_exact
from trajstore import Session
from trajstore.errors import CallConflictError, SessionFinishedError

if TYPE_CHECKING:
    from nemo_gym.token_id_capture import TokenCaptureSnapshot, TokenEntry

_MOST_RETIRED = 100_000
"""Rollouts that are over and still known, so that late entries of them are refused."""

NEMO_GYM = "nemo_gym"
"""Key of a call's ``metadata`` with the fields of its entry that a call has not."""


class TokenStore(Gateway):
    """Keeps the entries of rollouts as calls of sessions, and gives them back. Thread-safe.

    As ``token_id_capture.sink`` with ``sink_kwargs: {store: PATH}``, or for ``install_token_sink`` and
    ``install_token_source``. All calls of a rollout go to one process, which also freezes it. A frozen rollout becomes
    rollouts of the store by :meth:`finish`; ``drop`` without it discards the entries. After either it takes no further
    entries, until :meth:`delete`, the end of the process, or 100,000 later rollouts.

    Args:
        store: path of the store, or the buffer that writes it, if that is in this process.
        task_of: returns the task of a rollout's id; rollouts of one task are a group.
    """

    def __init__(self, store: Any, **options: Any) -> None:
        super().__init__(store, **options)
        self._retired: OrderedDict[str, tuple[str, int]] = OrderedDict()  # the last snapshots of rollouts that are over

    async def put(self, entry: TokenEntry) -> None:
        """Return when an entry is durable. The same entry again does nothing.

        Raises:
            CallConflictError: the call's id was used with another entry; the rollout is now incomplete.
            RuntimeError: the rollout is frozen, or was dropped.
            TrajstoreError: it could not be added.
        """
        await self.recorded(self._put(entry))

    async def _put(self, entry: TokenEntry) -> None:
        session = await self.opened(entry.rollout_id)
        try:
            await session.add_call_async(**_call_of(entry))
        except (SessionFinishedError, CallConflictError) as error:
            await self.waited(_refuse, session, entry, error)

    def append(self, entry: TokenEntry) -> None:
        """:meth:`put`, without an event loop."""
        session = self.session(entry.rollout_id)
        try:
            session.add_call(**_call_of(entry))
        except (SessionFinishedError, CallConflictError) as error:
            _refuse(session, entry, error)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Record that a call begins; the rollout is incomplete until :meth:`put` has its entry."""
        await self.waited(lambda: self.session(rollout_id).incomplete(model_call_id, "begun"))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Record that a call of a rollout was lost, also if it is frozen."""
        await self.waited(lambda: self.session(rollout_id).incomplete(f"{model_call_id}: lost", "not captured"))

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Refuse further entries of a rollout, and return those that it has; again and again.

        Raises:
            RuntimeError: it was dropped.
        """
        return await self.waited(self.freeze_now, rollout_id)

    def freeze_now(self, rollout_id: str) -> TokenCaptureSnapshot:
        """:meth:`freeze`, without an event loop."""
        from nemo_gym.token_id_capture import TokenCaptureSnapshot

        session = self.session(rollout_id)
        session.freeze()
        snapshot_id, version = _snapshot(session)
        return TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=tuple(self.read_entries(rollout_id)),
            incomplete=self.is_incomplete(rollout_id),
            snapshot_id=snapshot_id,
            version=version,
        )

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Discard the entries of a frozen rollout, unless it changed since the snapshot; return whether it did not."""
        return await self.waited(self._drop, rollout_id, snapshot_id, version)

    def _drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        last = self._retired.get(rollout_id)
        if last is None:
            session = self.session(rollout_id)
            last = _snapshot(session)
            if session.state != "frozen" or last != (snapshot_id, version):
                return False
            self._retire(rollout_id, last)
            session.discard()
        return last == (snapshot_id, version)

    def _retire(self, rollout_id: str, snapshot: tuple[str, int]) -> None:
        self._retired[rollout_id] = snapshot
        while len(self._retired) > _MOST_RETIRED:
            self._retired.popitem(last=False)

    def finish(self, rollout_id: str, *arguments: Any, **options: Any) -> list[int]:
        """Make rollouts of a rollout's entries; see :meth:`Gateway.finish`."""
        session = self.session(rollout_id)
        ids = super().finish(rollout_id, *arguments, **options)
        self._retire(rollout_id, _snapshot(session))
        return ids

    def delete(self, rollout_id: str) -> None:
        """Discard the entries of a rollout, frozen or not; its id can be used again."""
        self._retired.pop(rollout_id, None)
        self.discard(rollout_id)

    def read_entries(self, rollout_id: str) -> list[TokenEntry]:
        """Return the entries of a rollout, in the order in which they were put; none after :meth:`drop`."""
        from nemo_gym.token_id_capture import TokenEntry

        return [
            TokenEntry(
                rollout_id=rollout_id,
                model_call_id=call.id,
                prompt_token_ids=call.prompt_ids.tolist(),
                generation_token_ids=call.sampled_ids.tolist(),
                **{"generation_log_probs": call.log_probs.tolist(), **call.metadata[NEMO_GYM]},
            )
            for call in self.calls(rollout_id)
            if call.gap is None and call.log_probs is not None
        ]

    def is_incomplete(self, rollout_id: str) -> bool:
        """Return whether a call of a rollout is missing."""
        calls = self.calls(rollout_id)
        added = {call.id for call in calls if call.gap is None}
        return any(call.gap is not None and call.id not in added for call in calls)

    def session(self, rollout_id: str) -> Session:
        """Return the session of a rollout that is not over; opened, if there is none."""
        if rollout_id in self._retired:
            raise RuntimeError(f"rollout {rollout_id} is retired: its snapshot was dropped")
        return super().session(rollout_id)


def _call_of(entry: TokenEntry) -> dict[str, Any]:
    """Return the arguments of the call of an entry."""
    tokens = {"prompt_ids": entry.prompt_token_ids, "sampled_ids": entry.generation_token_ids}
    log_probs = entry.generation_log_probs
    in_call = {"rollout_id", "model_call_id", "prompt_token_ids", "generation_token_ids"}
    if is_exact(log_probs):
        in_call.add("generation_log_probs")
    metadata = {NEMO_GYM: entry.model_dump(mode="json", exclude=in_call)}
    return {**tokens, "log_probs": log_probs, "call_id": entry.model_call_id, "metadata": metadata}


def _refuse(session: Session, entry: TokenEntry, error: Exception) -> NoReturn:
    """Raise the error of an entry that was not taken; another one of the same id makes the rollout incomplete."""
    if isinstance(error, SessionFinishedError):
        raise RuntimeError(f"rollout {entry.rollout_id} is already frozen: {error}") from error
    call_id = entry.model_call_id
    session.incomplete(f"{call_id}: reused", "its id was reused with a different payload")
    raise CallConflictError(f"call {call_id!r} was reused with a different payload: {error}") from error


def _snapshot(session: Session) -> tuple[str, int]:
    """Return id and version of a session's snapshot: the number of its records, which only grows."""
    return session.id, len(session.calls())
