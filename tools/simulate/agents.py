"""Clients that record sessions of agents, in the writer's process and others; compared with what was acknowledged."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.crash.calls.campaign import compare
from tools.crash.calls.child import add_call, checksum
from tools.simulate.judge import BrokenPromiseError
from trajstore import Reward, Session, Sessions, TrajectoryReplayBuffer
from trajstore.errors import StoreNotFoundError, StoreWriteError


@dataclass
class Told:
    """What was acknowledged.

    Attributes:
        calls: checksums of calls by id, by rollout id of their session.
        finishing: sessions whose end has begun.
        finished: sessions whose end was acknowledged.
        owners: process of each session whose end has not begun.
    """

    calls: defaultdict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    finishing: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    owners: dict[str, int] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=itertools.count)

    def check(self, store: Path) -> None:
        """Compare with a store that nobody uses; open sessions are dropped."""
        problems, _, _ = compare(store, self.calls, self.finished, self.finishing)
        if problems:
            raise BrokenPromiseError(f"an acknowledged call is there, once: {problems[:3]}")
        self.calls.clear()  # dropped, or in rollouts
        self.owners.clear()


class Recorder:
    """Records one session after the other.

    Args:
        told: of all recorders.
        chance: decides what is done.
        faulty: whether the disk may fail now.
        process: of this recorder.
        living: processes that live.
        opener: the buffer that writes the store, or the path of the store.
    """

    def __init__(
        self,
        told: Told,
        chance: random.Random,
        faulty: Callable[[], bool],
        process: int,
        living: Collection[int],
        opener: TrajectoryReplayBuffer | Path,
    ) -> None:
        self._told, self._chance, self._faulty = told, chance, faulty
        self._process, self._living, self._opener = process, living, opener
        self._sessions: Sessions | None = None
        self._session: Session | None = None

    def step(self) -> None:
        """Open a session, add a call, or finish."""
        faulty = self._faulty()
        try:
            if self._session is None:
                self._open()
            elif self._chance.random() < 0.75 or not self._session.calls():
                call = add_call(self._session, self._chance, 6)
                self._told.calls[self._session.rollout_id][call.id] = checksum(call)
            else:
                self._finish(self._session)
        except StoreNotFoundError:
            return
        except (StoreWriteError, OSError):
            if not (faulty or self._faulty()):
                raise

    def _open(self) -> None:
        opener = self._opener
        if isinstance(opener, Path):
            opener = self._sessions = self._sessions or Sessions(opener)
        left = sorted(name for name, owner in self._told.owners.items() if owner not in self._living)
        name = self._chance.choice(left) if left else f"rollout-{next(self._told.names)}"
        self._told.owners[name] = self._process
        session = opener.session("task", name)
        lost = self._told.calls[name].items() - {call.id: checksum(call) for call in session.calls()}.items()
        if lost:
            raise BrokenPromiseError(f"an acknowledged call is there: {name} lacks {sorted(lost)}")
        self._session = session

    def _finish(self, session: Session) -> None:
        name = session.rollout_id
        self._told.finishing.add(name)
        self._told.owners.pop(name, None)
        session.finish(Reward(outcome=1.0))
        self._told.finished.add(name)
        self._session = None

    def close(self) -> None:
        """Close what belongs to this recorder alone."""
        if self._sessions is not None:
            with contextlib.suppress(StoreWriteError) if self._faulty() else contextlib.nullcontext():
                self._sessions.close()
