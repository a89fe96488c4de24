"""One parcel on its way: filled, sent, and sent again until a store says that it has committed it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

from trajstore.core.columns.flat import FlatTrajectory
from trajstore.core.columns.memory import Arena
from trajstore.distributed.actors import Stores, away, first_line, ray
from trajstore.distributed.parcel import Parcel, Piece, new_key, pack
from trajstore.distributed.routes import Routes
from trajstore.distributed.server import Answer
from trajstore.errors import StoreUnreachableError

logger = logging.getLogger(__name__)

Stage = Literal["filling", "adding", "committing", "done"]

STAGES: Sequence[Stage] = ("filling", "adding", "committing", "done")

_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
_ASK_AGAIN = 5.0  # seconds that a store waits for a commit before it answers "not yet"


class Watermarks:
    """How far each store has said that all it was given is committed: one answer is about many parcels. Pure."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[str, int]] = {}

    def hear(self, rank: int, answer: Answer) -> None:
        """Note what a store has answered, whatever it was asked."""
        began, committed = self._heard.get(rank, ("", -1))
        if answer.began != began or answer.committed > committed:
            self._heard[rank] = answer.began, answer.committed

    def cover(self, rank: int, began: str, ids: Sequence[int]) -> bool:
        """Return whether ids that a start of a store gave out are known to be committed."""
        heard, committed = self._heard.get(rank, ("", -1))
        return heard == began and max(ids) <= committed


class Shipment:
    """One parcel on its way. Used by one thread at a time.

    Args:
        stores: where it may go.
        routes: chooses among them.
        watermarks: what the stores have committed, heard by all shipments.
    """

    def __init__(self, stores: Stores, routes: Routes, watermarks: Watermarks) -> None:
        self.nbytes = 0
        self.count = 0
        self.stage: Stage = "filling"
        self.ids: Sequence[int] = []
        self.rank = -1
        self._stores = stores
        self._routes = routes
        self._watermarks = watermarks
        self._key = new_key()
        self._pieces: list[Piece] = []
        self._parcel: Any = None
        self._answer: Any = None
        self._began = ""
        self._pause = _PAUSE
        self._not_before = 0.0
        self._since = 0.0
        """When a store last did anything for it, or the first one was asked: the deadline is counted from here."""
        self._turned = 0.0
        """The same of the store that has it now: its patience is counted from here."""
        self._sent = False
        """Whether that store may have got it."""

    def fill(self, flats: Sequence[FlatTrajectory], arena: Arena) -> range:
        """Add trajectories, copied into memory of the arena, before it departs; return their places in it."""
        self._pieces.append(pack(flats, arena))
        self.nbytes += self._pieces[-1].nbytes
        self.count += len(flats)
        return range(self.count - len(flats), self.count)

    def depart(self) -> None:
        """Send it, unless it is sent already. What raises here leaves it as it was: call again."""
        if self.stage != "filling":
            return
        self._parcel = ray().put(Parcel(self._key, self._pieces))  # kept there until it is committed
        self._pieces = []
        self.rank = self._routes.next()
        self.stage = "adding"
        self._since = self._turned = time.monotonic()
        self._submit()

    @property
    def answer(self) -> Any:
        """Reference of the call that is under way; None if none is."""
        return self._answer

    def reached(self, stage: Stage) -> bool:
        """Return whether it has come so far, as far as is known without asking."""
        if self.stage == "committing" and self._watermarks.cover(self.rank, self._began, self.ids):
            self.stage, self._parcel, self._answer = "done", None, None
            self._routes.answered(self.rank)
        return STAGES.index(self.stage) >= STAGES.index(stage)

    def take(self) -> None:
        """Take in the answer that has come, and go on if that needs no waiting.

        Raises:
            StoreUnreachableError: no store has answered for the deadline. It is kept; call again to try again.
            StoreWriteError: the store cannot write at present. It is kept, here or there; call again to try again.
        """
        reference, self._answer = self._answer, None
        try:
            answer: Answer = ray().get(reference)
        except away() as error:
            self._lost(error)
            return
        self._since = self._turned = time.monotonic()
        self._pause = _PAUSE
        self._routes.answered(self.rank)
        self._watermarks.hear(self.rank, answer)
        if answer.ids is None:
            logger.warning("rank_%d began anew before it committed %d trajectories; sent again", self.rank, self.count)
            self.stage = "adding"
        else:
            self.ids, self._began, self.stage = answer.ids, answer.began, "committing"
            self._stores.note(max(answer.ids) + 1)

    def advance(self, until: float, stage: Stage) -> bool:
        """Go on until a stage is reached, or a moment (of the monotonic clock); return whether it is.

        Raises:
            StoreUnreachableError, StoreWriteError: see :meth:`take`.
        """
        self.depart()
        while not self.reached(stage):
            now = time.monotonic()
            if self._answer is None:
                if now < self._not_before:
                    if until <= self._not_before:
                        time.sleep(max(0.0, min(until - now, _PAUSE)))
                        return False
                    time.sleep(self._not_before - now)
                self._submit()
                continue
            patience = self._turned + self._routes.patience
            ready, _ = ray().wait([self._answer], timeout=max(0.0, min(until, max(patience, now + _PAUSE)) - now))
            if ready:
                self.take()
            elif time.monotonic() >= max(patience, now):
                self._lost(TimeoutError("no answer"))
            elif time.monotonic() >= until:
                return False
        return True

    def _submit(self) -> None:
        try:
            if self.stage == "adding":
                self._answer = self._stores.submit(self.rank, "add", self._parcel, self.count, self._stores.clock)
                self._sent = True
            else:
                self._answer = self._stores.submit(self.rank, "committed", self._key, self.count, _ASK_AGAIN)
        except StoreUnreachableError as error:
            self._lost(error)

    def _lost(self, error: BaseException) -> None:
        """Try again a little later; elsewhere if the store is away for long, or is not there and was sent nothing."""
        self._answer = None
        now = time.monotonic()
        away_for = now - self._since
        self._stores.forget(self.rank)
        if away_for >= self._stores.deadline:
            self._since = self._turned = now  # the next call tries for as long again
            raise self._stores.unreachable(self.rank, away_for, error) from error
        if now - self._turned >= self._routes.patience or not self._sent:
            elsewhere = self._routes.instead_of(self.rank)
            if elsewhere is not None:
                logger.warning(
                    "store rank_%d does not answer (%s); %d trajectories go to rank_%d",
                    self.rank,
                    first_line(error),
                    self.count,
                    elsewhere,
                )
                self.rank, self.stage = elsewhere, "adding"
                self._turned, self._sent, self._pause, self._not_before = now, False, _PAUSE, now
                return
            self._routes.hopeful()  # none answers: each gets its patience again, this one first
            self._turned = now
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
