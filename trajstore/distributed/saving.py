"""The saving part of a handle: atomic snapshots over all stores of a run."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajstore._core.base.arguments import check_kind, text, truth, whole, whole_or_none
from trajstore._core.buffer.runs import RunPoint, incomplete_sentence, unite_points
from trajstore._core.buffer.saved_points import KEPT
from trajstore._core.store.pin_names import STEP, point_name
from trajstore._core.store.saved_points import SavedPoint
from trajstore._core.store.states import asked
from trajstore.distributed.drawing import DrawingHandle
from trajstore.distributed.starting import everywhere
from trajstore.errors import ConfigurationError, StoreNotFoundError, StoreUnreachableError, counted, listed

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
        begun = []
        try:
            for rank in ranks:  # in a fixed order, to avoid a deadlock of two saving handles
                begun.append(rank)
                self._stores.call(rank, "hold", by, _HELD)
            yield _Cut(by, ranks)
        finally:
            for rank in begun:
                try:
                    self._stores.submit(rank, "release", by)
                except StoreUnreachableError as error:  # its process ended, and the hold with it
                    logger.info("%s", error)

    @property
    def points(self) -> PointsOfHandle:
        """Snapshots of all stores: saved points, for rollback, and pins."""
        return PointsOfHandle(self)

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(self, save_path: str | Path) -> None:
        """Save all stores at one moment to ``save_path/rank_<r>``, each on its own machine.

        Includes everything added by this handle. Every store first writes its checkpoint next to the earlier one; when
        all have, each replaces the earlier one. Object stores have no atomic replacement: stores are saved one after
        another, and a failure may leave ranks of two moments.

        Raises:
            StoreUnreachableError, StoreWriteError: a store could not be saved. If the message says "publish", some
                ranks may be of the new moment; otherwise all earlier checkpoints are unchanged.
            ConfigurationError: ``save_path`` holds something else.
        """
        check_kind("save_path", save_path, str | Path, "a path or URL")
        with self._held() as cut:
            for call in ("prepare_checkpoint", "publish_checkpoint"):
                self._stores.call_all({rank: (cut.by, everywhere(save_path)) for rank in cut.ranks}, call)


@dataclass(frozen=True, slots=True)
class PointsOfHandle:
    """``handle.points``: snapshots of all stores of a run: saved points and pins.

    Args:
        _handle: the handle.
    """

    _handle: RestorableHandle

    def pin(self, name: str) -> dict[int, int]:
        """Pin all stores at one moment; return their generations by rank.

        Raises:
            StoreUnreachableError, StoreWriteError: a store could not be pinned; others may be pinned.
        """
        with self._handle._held() as cut:
            return self._handle._stores.call_all(dict.fromkeys(cut.ranks, (cut.by, name)), "pin")

    def remove(self, name: str | int) -> None:
        """Remove a snapshot, by name or by the step of a saved point, from all stores."""
        self._handle._stores.call_all(dict.fromkeys(self._handle._all_ranks(), (name,)), "remove_snapshot")

    @property
    def saved(self) -> list[RunPoint]:
        """Saved points of the run, lowest step first, including incomplete ones, which some stores lack.

        Raises:
            StoreUnreachableError: a store does not answer.
        """
        return unite_points(self._by_rank())

    def _by_rank(self) -> dict[int, list[SavedPoint]]:
        return self._handle._stores.call_all(dict.fromkeys(self._handle._stores.look_whole(), ()), "saved_points")

    def save(self, step: int, state: Mapping[str, Any] | None = None, *, keep: int | None = KEPT) -> RunPoint:
        """Save a point of all stores at one moment, for :meth:`go_to`.

        The point is complete when every store has it. Older points are removed only after that, so a complete point
        exists at any time, whatever process is killed.

        Args:
            step: training step of the model.
            state: other state of the run: plain values, tensors, and objects with a ``state_dict`` (a loader, a
                sampler), which is called at that moment. This handle's generator is always saved.
            keep: number of points to keep, those with the highest steps; None = all.

        Raises:
            ConfigurationError: a point of this or a later step exists, or ``state`` cannot be saved.
            StoreUnreachableError, StoreWriteError: a store has not saved the point; earlier points are unchanged.
        """
        step, keep = whole("step", step, 0), whole_or_none("keep", keep, 1)
        check_kind("state", state, Mapping, "a dict")
        with self._handle._held() as cut:
            points = self._by_rank()
            self._check_step(step, unite_points(points))
            begun = [rank for rank, saved in points.items() if any(point.step == step for point in saved)]
            self._handle._stores.call_all(dict.fromkeys(begun, (step,)), "remove_snapshot")  # left by a failed attempt
            parts = asked(state or {})  # before the draws: collecting it may advance the generator
            with self._handle._lock:
                first_state = {"parts": parts, "draws": self._handle._draws.state_dict()}
            given = {rank: (cut.by, step, {} if rank else first_state, len(cut.ranks)) for rank in cut.ranks}
            self._handle._stores.call_all(given, "save_point")
        saved = self.saved
        complete = [point.step for point in saved if point.is_complete]
        for old in saved:
            if keep is not None and len(complete) > keep and old.step < complete[-keep]:
                self.remove(old.step)
        return next(point for point in saved if point.step == step)

    def _check_step(self, step: int, points: list[RunPoint]) -> None:
        later = [point.step for point in points if point.step > step]
        if later:
            raise ConfigurationError(
                f"points.save({step}): the saved point of step {max(later)} is later; go back with rollback first, or "
                f"remove it with points.remove({max(later)})"
            )
        if any(point.step == step and point.is_complete for point in points):
            raise ConfigurationError(
                f"points.save({step}): every store has a point of this step already; to replace it, remove it "
                f"first with points.remove({step})"
            )

    def go_to(self, name: str | int, *, aside: bool = True) -> dict[str, Any]:
        """Restore a snapshot in all stores, and the state of the draws saved with it.

        Stop producers first: trajectories that they resend afterwards are added again. Each store names the state that
        it leaves, see :meth:`PointsOfBuffer.go_to`. If a store is killed meanwhile, call this again.

        Args:
            name: name of a snapshot that every store has, or step of a saved point.
            aside: False deletes the current states instead of naming them.

        Returns:
            The state saved with the point, with the returned dict of each ``state_dict``; empty if none was saved.

        Raises:
            StoreNotFoundError: no such snapshot, or stores lack it; the message names them.
            ConfigurationError: the point was saved by another number of stores.
            StoreUnreachableError, StoreWriteError: a store has not changed, others have; call again.
        """
        name = text("name", name) if isinstance(name, str) else whole("name", name, 0)
        aside = truth("aside", aside)
        with self._handle._held() as cut:
            if isinstance(name, int):
                self._check_point(name, len(cut.ranks))
            else:
                self._check_name(name, cut.ranks)
            state = self._handle._stores.call_all(dict.fromkeys(cut.ranks, (cut.by, name, aside)), "go_to")[0]
        with self._handle._lock:
            if "draws" in state:
                self._handle._draws.load_state_dict(state["draws"])
            self._handle._sync.refresh(True)
        return dict(state.get("parts", state))

    def rollback(self, step: int, *, aside: bool = True) -> dict[str, Any]:
        """Restore the saved point of a step in all stores, see :meth:`go_to`."""
        return self.go_to(whole("step", step, 0), aside=aside)

    def _check_name(self, name: str, ranks: list[int]) -> None:
        there = self._handle._stores.call_all(dict.fromkeys(ranks, ()), "snapshot_names")
        lacking = [f"rank_{rank}" for rank, names in there.items() if name not in names]
        match = STEP.fullmatch(name)
        if match is not None and match[2] is None:
            self._check_point(int(match[1]), len(ranks))
        elif lacking:
            raise StoreNotFoundError(
                f"{self._handle._stores.name!r}: no snapshot is called {name!r} in {listed(lacking)}; all stores have: "
                f"{listed(sorted(set.intersection(*map(set, there.values())))) or 'none'}"
            )

    def _check_point(self, step: int, stores: int) -> None:
        points = self.saved
        found = next((point for point in points if point.step == step), None)
        if found is not None and found.saved_by is not None and found.saved_by != stores:
            raise ConfigurationError(
                f"points.rollback({step}): saved by {counted(found.saved_by, 'store')} together, and there "
                f"{'is' if stores == 1 else 'are'} {stores} now; begin a new run from it: "
                f"load_checkpoint(..., pin={point_name(step)!r})"
            )
        if found is None or not found.is_complete:
            why = f"no saved point of step {step}" if found is None else incomplete_sentence(found)
            complete = listed(str(point.step) for point in points if point.is_complete)
            raise StoreNotFoundError(f"{self._handle._stores.name!r}: {why}; complete are: {complete or 'none'}")
