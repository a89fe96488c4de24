"""What must be found after a kill, and after the restart: stores, cuts, checkpoints against the journals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tools.crash.verl.digest import digest
from tools.crash.verl.layout import CHECKPOINTS, GROUP, beginning_path, cut_path, rollouts_path, step_named_by_tracker
from tools.crash.verl.training import check_ledger
from trainer_hooks.config import ExperienceReplayConfig
from trainer_hooks.replay import PoolRules
from trainer_hooks.replay.entry import PoolEntry, Refusal, entry_of
from trainer_hooks.replay.late_values import with_training
from trainer_hooks.replay.state import Recovered, recover
from trainer_hooks.replay.store import PoolPoint, newest_point
from trainer_hooks.verl.cuts import MODEL_FOLDER
from trajstore import AgentTrajectory, TrajectoryReplayBuffer
from trajstore._core.files.local import LocalDirectory
from trajstore._core.store.catalog import Catalog
from trajstore.errors import TrajstoreError
from trajstore.operations.verify import verify

Tell = Callable[[str], None]
Held = dict[str, list[list[str]]]
"""``{task: [[rollout_id, digest], ...]}``, oldest first."""


@dataclass
class Promises:
    """What all drivers so far were promised.

    Attributes:
        rollouts: rollout id and digest by trajectory id, whose commit with its training was acknowledged.
        arrived: rollout id by trajectory id, whose commit on arrival was acknowledged.
        pool: the pool's trajectories by task when it was last known to be committed.
        finished: ids of rollouts of steps that a kill interrupted, by step; the repeated step trains all of them.
    """

    rollouts: dict[int, list[str]] = field(default_factory=dict)
    arrived: dict[int, str] = field(default_factory=dict)
    pool: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[int, set[int]] = field(default_factory=dict)

    def take(self, entry: Mapping[str, Any], tell: Tell) -> None:
        """Take in one line of a driver's journal."""
        if entry["event"] == "acknowledged":
            for number, content in entry["rollouts"].items():
                if self.rollouts.setdefault(int(number), content) != content:
                    tell(f"id {number} was given to {self.rollouts[int(number)]} and to {content}")
        elif entry["event"] == "arrived":
            self.arrived |= {int(number): name for number, name in entry["rollouts"].items()}
        elif entry["event"] == "pooled":
            self.pool = entry["entries"]
        elif entry["event"] == "loaded":
            self.pool = entry["pool"]["entries"]


@dataclass(frozen=True)
class Expected:
    """What the next driver must resume with.

    Attributes:
        step: of the checkpoint that verl's tracker names; 0 = none.
        pool: the pool's state, as far as it is known.
        held: the pool's trajectories; None = not known, for there is no sound cut.
    """

    step: int
    pool: Mapping[str, Any]
    held: Held | None


@dataclass
class Found:
    """What a look at the folder found.

    Attributes:
        expected: of the next driver.
        rollouts: that were compared with what was acknowledged.
        between: whether the crash fell between our cut and verl's checkpoint.
    """

    expected: Expected
    rollouts: int
    between: bool


class _Reader:
    """The rollouts of a store whose writer is dead, and its newest pool or that of a point. Nothing is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffer = TrajectoryReplayBuffer.open(path)
        self.point: str | None = None

    def newest_point(self) -> PoolPoint | None:
        return newest_point(Catalog.open(LocalDirectory(self._path)), self.point)

    def newest_id(self) -> int:
        return max(self.ids(), default=-1)

    def kept(self, ids: Collection[int], /) -> set[int]:
        return {*ids} & {*self.ids()}

    def entry(self, trajectory_id: int, /) -> tuple[PoolEntry | Refusal, str]:
        record = self.get(trajectory_id)
        return entry_of(record, trajectory_id), record.tokenizer_fingerprint

    def get(self, number: int, /) -> AgentTrajectory:
        found = self._buffer.get(number)
        if not isinstance(found, AgentTrajectory):
            raise TypeError(f"trajectory {number} is a {type(found).__name__}")
        return with_training(found)

    def ids(self) -> list[int]:
        numbers: list[int] = self._buffer.trajectory_ids.tolist()
        return numbers

    def close(self) -> None:
        self._buffer.close()


def look(folder: Path, promises: Promises, run: str, tell: Tell) -> Found:
    """Check everything that a killed driver left; return what the next one must find.

    Args:
        folder: the campaign's.
        promises: of this driver and all before.
        run: how the killed driver called itself in its cuts.
        tell: gets each problem.
    """
    for trouble in verify(rollouts_path(folder)).problems:
        tell(f"rollouts: {trouble.file}: {trouble.message}")
    rollouts = _Reader(rollouts_path(folder))
    try:
        present = {number: rollouts.get(number) for number in rollouts.ids()}
        _check_rollouts(present, promises, tell)
        recovered = _check_pool(rollouts, promises, tell)
        cuts = {step: cut for step, cut in _cuts(folder, rollouts, tell) if _check_cut(step, cut, tell)}
        step = step_named_by_tracker(folder)
        version = (step or 0) + 1
        check_ledger(folder, present.keys(), step or 0, promises.finished, tell)
        interrupted = {number for number, one in present.items() if one.policy_version == version}
        promises.finished.setdefault(version, set()).update(interrupted)
        between = any(cut["run"] == run and later > (step or 0) for later, cut in cuts.items())
        if step is not None and step not in cuts:
            tell(f"the checkpoint of step {step} has no sound cut of ours")
            return Found(Expected(step, {}, None), len(promises.rollouts), between)
        if step is not None:
            state = cuts[step]["pool"]
        elif beginning_path(folder).exists():
            begun = orjson.loads(beginning_path(folder).read_bytes())
            state = _state_at(rollouts, begun["pool"]["point"])
        else:
            state = _state(recovered)
        if not state["entries"]:
            state.pop("tokenizer_fingerprint", None)  # an empty pool accepts any tokenizer
        state.pop("point", None)
        entries: dict[str, list[int]] = {}
        held: dict[str, list[AgentTrajectory]] = {}
        for task, numbers in state["entries"].items():
            # The interrupted step is repeated with its rollouts, which enter the pool then.
            if kept := {number: one for number in numbers if (one := present[number]).policy_version != version}:
                entries[task], held[task] = [*kept], [*kept.values()]
        state = {**state, "entries": entries}
        return Found(Expected(step or 0, state, _contents(held)), len(promises.rollouts), between)
    finally:
        rollouts.close()


def check_resumed(loaded: Mapping[str, Any], expected: Expected, tell: Tell) -> None:
    """Compare what a driver resumed with: its step, every part of the pool's state, and the pool's trajectories."""
    if loaded["step"] != expected.step:
        tell(f"resumed at step {loaded['step']}, verl's tracker says {expected.step}")
    for name, wanted in expected.pool.items():
        found = loaded["pool"][name]
        if name == "refused":  # a reason that never occurred may be there with 0
            found, wanted = ({why: count for why, count in one.items() if count} for one in (found, wanted))
        if found != wanted:
            tell(f"resumed at step {loaded['step']}: {name} of the pool is {found}, must be {wanted}")
    if expected.held is None:
        return
    found = Counter(_names(loaded["held"]))
    for task, rollout in sorted(set(_names(expected.held)) - found.keys()):
        tell(f"resumed at step {loaded['step']}: rollout {rollout} of task {task} belongs in the pool and is missing")
    for (task, rollout), times in found.items():
        if times > 1:
            tell(f"resumed at step {loaded['step']}: rollout {rollout} of task {task} is in the pool {times} times")
    if loaded["held"] != expected.held:
        tell(f"resumed at step {loaded['step']}: the pool holds {loaded['held']}, must hold {expected.held}")


def _contents(held: Mapping[str, list[AgentTrajectory]]) -> Held:
    return {task: [[one.rollout_id, digest(one)] for one in several] for task, several in held.items()}


def _names(held: Held) -> list[tuple[str, str]]:
    """Return task and rollout of each trajectory."""
    return [(task, name) for task, contents in held.items() for name, _ in contents]


def _check_rollouts(present: Mapping[int, AgentTrajectory], promises: Promises, tell: Tell) -> None:
    """Check that every acknowledged rollout is there, once."""
    contents = {number: [one.rollout_id, digest(one)] for number, one in present.items()}
    for number, name in promises.arrived.items():
        if number not in present or present[number].rollout_id != name:
            tell(f"rollout {number} ({name}) arrived and is lost")
    for name, times in Counter(one.rollout_id for one in present.values()).items():
        if times > 1:
            tell(f"rollout {name} is recorded {times} times")
    for number, wanted in promises.rollouts.items():
        if number not in contents:
            tell(f"rollout {number} ({wanted[0]}) was acknowledged and is lost")
        elif contents[number] != wanted:
            tell(f"rollout {number} is {contents[number]}, {wanted} was acknowledged")
        elif not any("author" in message for message in present[number].messages):
            tell(f"rollout {number} ({wanted[0]}) has lost its text")


def _check_pool(pool: _Reader, promises: Promises, tell: Tell) -> Recovered:
    """Recover the pool as a driver would; what was acknowledged is in it, or left it by the pool's own rules."""
    rules = _rules()
    recovered = recover(pool)
    ids = _ids(recovered)
    for task, numbers in promises.pool.items():
        now = ids.get(task, [])
        full = len(now) == rules.max_trajectories_per_task
        for number in set(numbers) - set(now):
            if not full and task not in recovered.state.skip:
                tell(f"trajectory {number} of task {task} was in the pool, committed, and is lost")
    return recovered


def _cuts(folder: Path, rollouts: _Reader, tell: Tell) -> list[tuple[int, dict[str, Any]]]:
    """Return our cuts with the steps of the checkpoints that they lie in, complete ones or not.

    ``pool`` is the state at the point that the cut names.
    """
    steps = sorted(int(path.name.rpartition("_")[2]) for path in (folder / CHECKPOINTS).glob("global_step_*"))
    cuts = []
    for step in steps:
        if (path := cut_path(folder, step)).exists():
            cut = orjson.loads(path.read_bytes())
            try:
                cuts.append((step, {**cut, "pool": _state_at(rollouts, cut["pool"]["point"])}))
            except TrajstoreError as error:
                # Without a model verl cannot load it, so its point may be gone.
                if (path.parent / MODEL_FOLDER).is_dir():
                    tell(f"the cut of step {step} names {cut['pool']['point']}: {error}")
    return cuts


def _state_at(rollouts: _Reader, point: str) -> dict[str, Any]:
    """Return the pool's state at a point, with the ids of its trajectories, as JSON has it."""
    rollouts.point = point
    recovered = recover(rollouts)
    document = recovered.state.to_document() | {"generator": recovered.generator, "entries": _ids(recovered)}
    state: dict[str, Any] = orjson.loads(orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS))
    return {**state, "point": point}


def _check_cut(step: int, cut: Mapping[str, Any], tell: Tell) -> bool:
    """Return whether a cut and its pool are of the step."""
    steps = (cut["step"], cut["pool"]["global_steps"])
    if steps != (step, step):
        tell(f"the cut of step {step} says step {steps[0]}, its pool step {steps[1]}")
    return steps == (step, step)


def _rules() -> PoolRules:
    return ExperienceReplayConfig.from_mapping({"enable": True}, n_rollout=GROUP).pool_rules(GROUP)


def _ids(recovered: Recovered) -> dict[str, list[int]]:
    entries = recovered.state.entries.items()
    return {task: [entry.trajectory_id for entry in held] for task, held in entries}


def _state(recovered: Recovered) -> dict[str, Any]:
    """Return what is known of the state of a pool that is used as it lies in its store."""
    buckets = {str(difficulty): tasks for difficulty, tasks in recovered.state.buckets.to_dict().items()}
    return {"difficulty2task_dict": buckets, "skip_uid_set": list(recovered.state.skip), "entries": _ids(recovered)}
