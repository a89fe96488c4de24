"""Sessions of agents through a handle: the calls go to the actor of one store, whose journal has them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any
from zlib import crc32

from trajstore._core.sessions.arguments import TakesCalls
from trajstore._core.sessions.records import decode_call, scan
from trajstore._core.sessions.tree import Call
from trajstore.distributed.actors import Stores
from trajstore.errors import CorruptStoreError, StoreUnreachableError


class RemoteSession(TakesCalls[str]):
    """A session in a store of a handle; as :class:`trajstore.Session`, unless a method says otherwise. Thread-safe.

    All sessions of a task are in one store. Every call may be sent again after the actor was lost: it is recorded once.

    Attributes:
        id: UUID, 32 hex digits.
        task_id: its task.
        rollout_id: its name within the task.
    """

    def __init__(self, stores: Stores, fields: Mapping[str, Any]) -> None:
        ranks = stores.all_ranks
        if not ranks:
            raise StoreUnreachableError(f"{stores.name}: has no store")
        self._stores = stores
        self._rank = ranks[crc32(str(fields["task_id"]).encode(errors="replace")) % len(ranks)]
        named = str(fields["rollout_id"] or uuid.uuid4().hex)
        self._fields = {**fields, "rollout_id": named}
        self.task_id: str = fields["task_id"]
        self.rollout_id = named
        self.id: str = self._ask("id")

    def _add_call(self, **values: Any) -> str:
        call_id: str = values.pop("call_id") or uuid.uuid4().hex[:12]  # so that a repeated attempt is recognized
        tokens = values.pop("prompt"), values.pop("sampled"), values.pop("log_probs")
        self._ask("add_call", *tokens, call_id=call_id, **values)
        return call_id

    def incomplete(self, call_id: str, reason: str = "", *, metadata: Mapping[str, Any] | None = None) -> None:
        """Record that a call happened whose tokens are unknown."""
        self._ask("incomplete", call_id, reason, metadata=metadata)

    def freeze(self) -> None:
        """Refuse further calls, durably."""
        self._ask("freeze")

    def discard(self) -> None:
        """End the session without rollouts, durably."""
        self._ask("discard")

    def finish(
        self, reward: Any = None, *, is_terminated: bool | None = None, metadata: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Freeze the session, durably, and return the ids of its rollouts when they survive a crash."""
        found: list[int] = self._ask("finish", reward, is_terminated=is_terminated, metadata=metadata)
        return found

    @property
    def state(self) -> str:
        """``open``, ``frozen``, ``finished`` or ``discarded``."""
        return str(self._ask("state"))

    def calls(self) -> list[Call]:
        """Return its calls as added.

        Raises:
            CorruptStoreError: the answer is not readable, as from another version of trajstore.
        """
        data, calls = self._ask("calls"), list[Call]()
        records, end, _ = scan(data)
        if end != len(data):
            raise CorruptStoreError(
                f"{self._stores.name}: the calls of session {self.task_id}/{self.rollout_id} are not readable here; "
                "use one version of trajstore on all nodes"
            )
        for record in records:
            calls.append(decode_call(record, calls))
        return calls

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        known = getattr(self, "id", None)
        return self._stores.call(self._rank, "session", self._fields, known, method, arguments, options)
