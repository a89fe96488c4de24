"""The saving part of a handle: atomic snapshots over all stores of a run."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trajstore._core.buffer.points import Listing, Points, Stores, asked, united
from trajstore._core.store.rollback import SnapshotChanges
from trajstore._core.store.saved_points import SavedPoint
from trajstore.distributed.drawing import DrawingHandle
from trajstore.errors import ConfigurationError, StoreUnreachableError

logger = logging.getLogger(__name__)

_HELD = 20.0  # time limit of each hold, in seconds


@dataclass(frozen=True, slots=True)
class _Cut:
    """All stores, held at the same time.

    Attributes:
        by: name of the holder.
        ranks: ranks of the stores, ``0 .. n - 1``.
    """

    by: str
    ranks: list[int]


class RestorableHandle(DrawingHandle):
    """Saves and restores the contents of many stores. Users make a ``DistributedReplayBuffer``.

    Saving has two steps. First all stores are held: they flush, and additions and evictions wait. Then each store saves
    itself. If a store does not answer, or restarts in between, saving fails and earlier saves are unchanged.
    """

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything added by this handle survives the kill of any process."""
        raise NotImplementedError

    @contextmanager
    def _held(self) -> Iterator[_Cut]:
        """Block changes in all stores until the ``with`` block ends.

        Raises:
            StoreUnreachableError: a store is lost, or does not answer for ``patience``, as after its node's death.
            StoreWriteError: a store cannot flush, or another handle holds it for too long.
        """
        ranks = self._stores.look_whole()
        self._stores.call_all(dict.fromkeys(ranks, ()), "describe", min(self._options.patience, self._stores.deadline))
        self.flush()
        by = uuid.uuid4().hex
        begun: list[int] = []
        try:
            # All handles that save begin with the same store, so that no two of them wait for each other.
            for together in filter(None, (ranks[:1], ranks[1:])):
                begun += together
                self._stores.call_all(dict.fromkeys(together, (by, _HELD)), "hold")
            yield _Cut(by, ranks)
        finally:
            for rank in begun:
                try:
                    self._stores.submit(rank, "release", by)
                except StoreUnreachableError as error:  # its process ended, and the hold with it
                    logger.info("%s", error)

    @property
    def points(self) -> Points:
        """Saved points, pins and heads that were left, of all stores at one moment."""
        return Points(StoresOfHandle(self))


class StoresOfHandle(Stores):
    """The stores of a handle; see :class:`~trajstore._core.buffer.points.Stores`.

    Args:
        handle: the handle.
    """

    def __init__(self, handle: RestorableHandle) -> None:
        self._handle = handle
        self._stores = handle._stores
        self._cut = _Cut("", [])
        self.name, self.count = self._stores.name, None

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._handle._held() as self._cut:
            yield

    def begun(self) -> Container[int]:
        commits = self._stores.call_all(dict.fromkeys(self._stores.look_whole(), ()), "commits")
        return [rank for rank, (_, above, _) in commits.items() if above]

    def snapshots(self) -> Listing:
        ranks = self._stores.look_whole()
        self.count = len(ranks)
        listing: Listing = self._stores.call_all(dict.fromkeys(ranks, ()), "snapshots")
        return listing

    def state(self, name: str | int) -> dict[str, Any]:
        state = self._stores.call(self._stores.look_whole()[0], "state_at", name)
        return dict(state.get("parts", state))

    def save(self, step: int, state: Mapping[str, Any]) -> Listing:
        self._check_step(step, united(self.snapshots()))
        parts = asked(state)  # before the draws: collecting it may advance the generator
        with self._handle._lock:
            first_state = {"parts": parts, "draws": self._handle._draws.state_dict()}
        return self._each(
            "save_point", {r: (step, {} if r else first_state, len(self._cut.ranks)) for r in self._cut.ranks}
        )

    def pin(self, name: str) -> Listing:
        return self._each("pin", dict.fromkeys(self._cut.ranks, (name,)))

    def remove(self, name: str | int) -> list[str | None]:
        return [*self._stores.call_all(dict.fromkeys(self._handle._all_ranks(), (name,)), "remove_snapshot").values()]

    def go_to(self, name: str | int, aside: bool) -> dict[str, Any]:
        state = self._each("go_to", dict.fromkeys(self._cut.ranks, (name, aside)))[0]
        with self._handle._lock:
            if "draws" in state:
                self._handle._draws.load_state_dict(state["draws"])
            self._handle._sync.refresh(True)
        return dict(state.get("parts", state))

    def changes(self, name: str | int, aside: bool) -> list[SnapshotChanges]:
        self._handle.flush()
        ranks = self._stores.look_whole()
        found = self._stores.call_all(dict.fromkeys(ranks, (name, aside)), "changes_to")
        return [change for rank in ranks for change in found[rank]]

    def _each(self, call: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Return the results of a call of all stores, which are held."""
        given = {rank: (self._cut.by, *own) for rank, own in arguments.items()}
        results: dict[int, Any] = self._stores.call_all(given, call)
        return results

    def _check_step(self, step: int, points: Sequence[SavedPoint]) -> None:
        """Refuse a step that would leave a complete point of two moments, or a point before a later one."""
        steps = [point.step for point in points if point.on_line]
        if max(steps, default=step) > step:
            raise ConfigurationError(
                f"points.save({step}): the saved point of step {max(steps)} is later; go to an earlier one first "
                f"(points.go_to), or remove it with points.remove({max(steps)})"
            )
        if any(point.step == step and point.on_line and point.is_complete for point in points):
            raise ConfigurationError(
                f"points.save({step}): every store has a point of this step already; to replace it, remove it "
                f"first with points.remove({step})"
            )
