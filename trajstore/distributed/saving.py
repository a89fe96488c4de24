"""The part of a handle that saves: all stores of a run at one moment, or none of them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajstore.core.base.arguments import check_kind, text, truth, whole, whole_or_none
from trajstore.core.buffer.runs import RunPoint, incomplete_sentence, unite_points
from trajstore.core.buffer.saved_points import KEPT
from trajstore.core.store.pin_names import STEP, point_name
from trajstore.core.store.saved_points import SavedPoint
from trajstore.core.store.states import asked
from trajstore.distributed.drawing import DrawingHandle
from trajstore.distributed.starting import everywhere
from trajstore.errors import ConfigurationError, StoreNotFoundError, StoreUnreachableError, listed

logger = logging.getLogger(__name__)

_HELD = 20.0  # seconds for which stores wait for each other, each time


@dataclass(frozen=True, slots=True)
class _Cut:
    """All stores, held since one moment.

    Attributes:
        by: who holds them.
        ranks: of the stores, ``0 .. n - 1``.
    """

    by: str
    ranks: list[int]


class RestorableHandle(DrawingHandle):
    """What many stores hold can be saved, and gone back to. Users make a ``DistributedReplayBuffer``.

    Saving has two steps. First all stores are held: nothing is added to or evicted from any of them, and what was added
    is on disk; producers wait. Then each saves itself. A store that does not answer, or that was started again in
    between, ends it with an error, and what was saved before stays as it is.
    """

    def flush(self, timeout: float | None = None) -> None:
        """Return when everything that this handle has added survives the kill of any process."""
        raise NotImplementedError

    @contextmanager
    def _held(self) -> Iterator[_Cut]:
        """Keep all stores as they are, from one moment on until the block ends.

        Raises:
            StoreUnreachableError: one of them is not there, or does not answer.
            StoreWriteError: one cannot write what was added, or somebody else holds it for long.
        """
        self.flush()
        ranks = self._stores.look_whole()
        by = uuid.uuid4().hex
        begun = []
        try:
            for rank in ranks:  # in this order, so that two handles that save do not wait for each other
                begun.append(rank)
                self._stores.call(rank, "hold", by, _HELD)
            yield _Cut(by, ranks)
        finally:
            for rank in begun:
                try:
                    self._stores.submit(rank, "release", by)
                except StoreUnreachableError as error:  # its process is gone, and what it held
                    logger.info("%s", error)

    @property
    def points(self) -> PointsOfHandle:
        """Moments of all stores that are kept: saved points, to which the run can go back, and pins."""
        return PointsOfHandle(self)

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(self, save_path: str | Path) -> None:
        """Save all stores at one moment to ``save_path/rank_<r>``, each on its own machine.

        What this handle has added is in it. Every store first makes its checkpoint beside the earlier one, and only
        when all have, each puts it in its place. In an object store nothing can be put in place: there one store is
        saved after another, and a failure half-way leaves ranks of two moments.

        Raises:
            StoreUnreachableError, StoreWriteError: a store could not be saved. If it says "publish", some ranks may be
                of the new moment; else all earlier ones are there as they were.
            ConfigurationError: something else lies there.
        """
        check_kind("save_path", save_path, str | Path, "a path or URL")
        with self._held() as cut:
            for call in ("prepare_checkpoint", "publish_checkpoint"):
                self._stores.call_all({rank: (cut.by, everywhere(save_path)) for rank in cut.ranks}, call)


@dataclass(frozen=True, slots=True)
class PointsOfHandle:
    """``handle.points``: moments of all stores of a run that are kept, saved points and pins.

    Args:
        _handle: of the stores.
    """

    _handle: RestorableHandle

    def pin(self, name: str) -> dict[int, int]:
        """Pin every store, all at one moment; return their generations by rank.

        Raises:
            StoreUnreachableError, StoreWriteError: a store could not be pinned; others may be.
        """
        with self._handle._held() as cut:
            return self._handle._stores.call_all(dict.fromkeys(cut.ranks, (cut.by, name)), "pin")

    def remove(self, name: str | int) -> None:
        """Remove the snapshots of this name, or a saved point by its step, from all stores."""
        self._handle._stores.call_all(dict.fromkeys(self._handle._all_ranks(), (name,)), "remove_snapshot")

    @property
    def saved(self) -> list[RunPoint]:
        """The saved points of the run, lowest step first; those that a store lacks are among them, and say so.

        Raises:
            StoreUnreachableError: a store does not answer.
        """
        return unite_points(self._by_rank())

    def _by_rank(self) -> dict[int, list[SavedPoint]]:
        return self._handle._stores.call_all(dict.fromkeys(self._handle._stores.look_whole(), ()), "saved_points")

    def save(self, step: int, state: Mapping[str, Any] | None = None, *, keep: int | None = KEPT) -> RunPoint:
        """Mark what all stores hold at one moment with the model's step, so that :meth:`go_to` can go back to it.

        It counts when every store has it. Earlier points are let go of after that only, so a complete one is there at
        every moment, whatever is killed.

        Args:
            step: of the model.
            state: what else the resumed run needs: plain values, tensors, and objects with a ``state_dict`` (a loader,
                a sampler), which are asked for it at that very moment. This handle's own generator is saved anyway.
            keep: points that stay, those of the highest steps; older ones are released. None = all.

        Raises:
            ConfigurationError: there is a point of this step, or a later one; or ``state`` has what cannot be saved.
            StoreUnreachableError, StoreWriteError: a store has not saved it; earlier points are as they were.
        """
        step, keep = whole("step", step, 0), whole_or_none("keep", keep, 1)
        check_kind("state", state, Mapping, "a dict")
        with self._handle._held() as cut:
            points = self._by_rank()
            self._check_step(step, unite_points(points))
            begun = [rank for rank, saved in points.items() if any(point.step == step for point in saved)]
            self._handle._stores.call_all(dict.fromkeys(begun, (step,)), "remove_snapshot")  # of an attempt that failed
            parts = asked(state or {})  # first: parts bring their own state of the generator
            with self._handle._lock:
                told = {"parts": parts, "draws": self._handle._draws.state_dict()}
            given = {rank: (cut.by, step, {} if rank else told, len(cut.ranks)) for rank in cut.ranks}
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
                f"points.save({step}): there is a saved point of step {max(later)}, which is later; go back with "
                f"rollback first, or remove it with points.remove({max(later)})"
            )
        if any(point.step == step and point.is_complete for point in points):
            raise ConfigurationError(
                f"points.save({step}): every store has a point of this step; saving it again would leave none while it "
                f"is saved. Remove it first with points.remove({step})"
            )

    def go_to(self, name: str | int, *, aside: bool = True) -> dict[str, Any]:
        """Go to a snapshot in all stores: they show what they showed then, and draws go on from there.

        No producer should be adding: what is added again after this stays. Each store gives the state that it leaves a
        name, see :meth:`PointsOfBuffer.go_to`. When a store is killed meanwhile, call it again.

        Args:
            name: of a snapshot that every store has; or step of a saved point.
            aside: False deletes the states that are left.

        Returns:
            The state that was saved with the point, what had a ``state_dict`` as what that returned; empty if none was.

        Raises:
            StoreNotFoundError: there is no such snapshot, or a store lacks it; says which.
            ConfigurationError: another number of stores saved it.
            StoreUnreachableError, StoreWriteError: a store could not change; others have, call again.
        """
        name = text("name", name) if isinstance(name, str) else whole("name", name, 0)
        aside = truth("aside", aside)
        with self._handle._held() as cut:
            if isinstance(name, int):
                self._check_point(name, len(cut.ranks))
            else:
                self._check_name(name, cut.ranks)
            told = self._handle._stores.call_all(dict.fromkeys(cut.ranks, (cut.by, name, aside)), "go_to")[0]
        with self._handle._lock:
            if "draws" in told:
                self._handle._draws.load_state_dict(told["draws"])
            self._handle._survey.refresh(True)
        return dict(told.get("parts", told))

    def rollback(self, step: int, *, aside: bool = True) -> dict[str, Any]:
        """Go to the saved point of a step in all stores, see :meth:`go_to`."""
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
        if found is not None and found.saved_by not in (None, stores):
            raise ConfigurationError(
                f"points.rollback({step}): {found.saved_by} stores saved it together, there are {stores} now; begin a "
                f"new run from it: load_checkpoint(..., pin={point_name(step)!r})"
            )
        if found is None or not found.is_complete:
            why = f"no saved point of step {step}" if found is None else incomplete_sentence(found)
            complete = listed(str(point.step) for point in points if point.is_complete)
            raise StoreNotFoundError(f"{self._handle._stores.name!r}: {why}; complete are: {complete or 'none'}")
