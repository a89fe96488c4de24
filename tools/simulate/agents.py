"""Clients that record sessions of agents, in the writer's process and others; compared with the acknowledged calls."""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.simulate.judge import BrokenPromiseError
from trajstore import Call, Reward, Session, Sessions, TrajectoryReplayBuffer
from trajstore.errors import StoreNotFoundError, StoreWriteError


@dataclass
class Acknowledged:
    """Acknowledged calls and sessions.

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
        """Compare with an unused store; open sessions are dropped."""
        problems = compare(store, self.calls, self.finished, self.finishing)
        if problems:
            raise BrokenPromiseError(f"an acknowledged call is there, once: {problems[:3]}")
        self.calls.clear()  # dropped, or in rollouts
        self.owners.clear()


class Recorder:
    """Records one session after the other.

    Args:
        acknowledged: of all recorders.
        chance: random numbers, which choose the calls.
        faulty: whether the disk may fail now.
        process: of this recorder.
        living: processes that live.
        opener: the buffer that writes the store, or the path of the store.
    """

    def __init__(
        self,
        acknowledged: Acknowledged,
        chance: random.Random,
        faulty: Callable[[], bool],
        process: int,
        living: Collection[int],
        opener: TrajectoryReplayBuffer | Path,
    ) -> None:
        self._acknowledged, self._chance, self._faulty = acknowledged, chance, faulty
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
                call = add_call(self._session, self._chance)
                self._acknowledged.calls[self._session.rollout_id][call.id] = checksum(call)
            else:
                self._finish(self._session)
        except StoreNotFoundError:
            return
        except (StoreWriteError, OSError):
            if not (faulty or self._faulty()):
                raise

    def _open(self) -> None:
        opener: TrajectoryReplayBuffer | Sessions | Path = self._opener
        if isinstance(opener, Path):
            opener = self._sessions = self._sessions or Sessions(opener)
        left = sorted(name for name, owner in self._acknowledged.owners.items() if owner not in self._living)
        name = self._chance.choice(left) if left else f"rollout-{next(self._acknowledged.names)}"
        self._acknowledged.owners[name] = self._process
        session = opener.session("task", name)
        lost = self._acknowledged.calls[name].items() - {call.id: checksum(call) for call in session.calls()}.items()
        if lost:
            raise BrokenPromiseError(f"an acknowledged call is there: {name} lacks {sorted(lost)}")
        self._session = session

    def _finish(self, session: Session) -> None:
        name = session.rollout_id
        self._acknowledged.finishing.add(name)
        self._acknowledged.owners.pop(name, None)
        session.finish(Reward(outcome=1.0))
        self._acknowledged.finished.add(name)
        self._session = None

    def close(self) -> None:
        """Close what belongs to this recorder alone."""
        if self._sessions is not None:
            try:
                self._sessions.close()
            except (StoreWriteError, OSError):
                if not self._faulty():
                    raise


def checksum(call: Call) -> int:
    """Return a number of the tokens and log-probs of a call."""
    log_probs = b"" if call.log_probs is None else call.log_probs.tobytes()
    return zlib.crc32(call.tokens.tobytes() + log_probs)


def add_call(session: Session, chance: random.Random) -> Call:
    """Add a call that continues one of the last calls, or a history that was rewritten; return it.

    Args:
        session: to add to.
        chance: decides about tokens.
    """
    calls = session.calls()
    tokens = chance.choice(calls[-3:]).tokens if calls else np.zeros(0, np.int32)
    if len(tokens) and chance.random() < 0.2:  # a history that was rewritten
        tokens = tokens[: chance.randrange(len(tokens))]
    prompt = [*tokens.tolist(), *(chance.randrange(150_000) for _ in range(chance.randint(1, 6)))]
    sampled = [chance.randrange(150_000) for _ in range(chance.randint(0, 3))]
    call_id = f"{len(calls)}-{chance.randrange(1 << 60):x}"
    return session.add_call(prompt, sampled, np.full(len(sampled), -0.5), call_id=call_id)


def compare(
    store: Path, calls: Mapping[str, Mapping[str, int]], finished: Collection[str], finishing: Collection[str]
) -> list[str]:
    """Compare the sessions of an unused store with the acknowledged calls.

    Args:
        store: its directory.
        calls: checksums of acknowledged calls, by id, by the rollout id of their session.
        finished: sessions that were finished.
        finishing: these, and those whose end had begun.

    Returns:
        The problems.
    """
    problems: list[str] = []
    rows: dict[str, list[dict[str, object]]] = defaultdict(list)
    trained: dict[str, Counter[str]] = defaultdict(Counter)
    there: dict[str, dict[str, int]] = defaultdict(dict)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store, sample_window_size=0) as buffer:
        for number in buffer.trajectory_ids.tolist():
            row: Any = buffer.get(number)
            about, mask = row.metadata["session"], row.loss_mask
            rows[row.rollout_id].append(about)
            for call in about["calls"]:
                start_at, stop = call["start"], call["stop"]
                trained[row.rollout_id][call["id"]] += int(stop > start_at and mask[start_at])
                probs = row.rollout_log_probs[start_at - row.response_start : stop - row.response_start]
                whole = Call(
                    number=0, id="", start=start_at, added=row.input_ids[:stop].int().numpy(), log_probs=probs.numpy()
                )
                there[row.rollout_id][call["id"]] = checksum(whole)
    with Sessions(store) as sessions:
        for info in sessions.listed():
            there[info.rollout_id] |= {call.id: checksum(call) for call in sessions.read("task", info.rollout_id)}
            if info.state == "finished" or info.rollout_id in rows:
                problems.append(f"session {info.rollout_id}: is {info.state} and has {len(rows[info.rollout_id])} rows")
    for name, acknowledged in calls.items():
        if lost := acknowledged.items() - there[name].items():
            problems.append(f"session {name}: {len(lost)} acknowledged calls are lost or differ: {sorted(lost)[:3]}")
        for call_id, count in trained[name].items():
            if count > 1:
                problems.append(f"session {name}: call {call_id} is trained {count} times")
        paths = sorted((str(about["id"]), int(str(about["path"]))) for about in rows[name])
        if paths and paths != [(paths[0][0], path) for path in range(int(str(rows[name][0]["paths"])))]:
            problems.append(f"session {name}: has the rows {paths}")
        if name in finished and not paths:
            problems.append(f"session {name}: was finished and has no rows")
        if paths and name not in finishing:
            problems.append(f"session {name}: has rows and was not finished")
    return problems
