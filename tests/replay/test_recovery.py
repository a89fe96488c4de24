"""A crash leaves a prefix of the changes to the store; every prefix must open as a pool."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.replay.conftest import build, rollouts, step, view
from trainer_hooks.replay import BufferStore, ExperienceManager, PoolRules
from trainer_hooks.replay.ledger import MOST_LEFT
from trainer_hooks.replay.store import PoolPoint
from trajstore.errors import CorruptStoreError, TrajectoryUnavailableError
from trajstore.trajectory import AgentTrajectory

TASKS = ("a", "b", "c")
RULES = PoolRules(n_rollout=4, max_trajectories_per_task=2, seed=5)


class LoggedStore(BufferStore):
    """A store in memory that logs its operations, so that any prefix can be restored."""

    def __init__(self) -> None:
        super().__init__()
        self.store_id = "of this test"
        self.log: list[tuple[str, Any]] = []
        self.points: dict[str, Any] = {}
        self.hidden: set[int] = set()
        self.fail_after: int | None = None

    def _write(self) -> None:
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                raise OSError(28, "No space left on device")

    def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
        self._write()
        self.log += [("add", trajectory) for trajectory in trajectories]
        return super().add_trajectories(trajectories)

    def ids(self) -> list[int]:
        return [number for number in super().ids() if number not in self.hidden]

    def kept(self, ids: Collection[int], /) -> set[int]:
        return super().kept(ids) - self.hidden

    def get(self, trajectory_id: int, /) -> AgentTrajectory:
        if trajectory_id in self.hidden:
            raise TrajectoryUnavailableError(f"trajectory {trajectory_id} was evicted")
        return super().get(trajectory_id)

    def hide(self, ids: Sequence[int]) -> None:
        self.hidden.update(ids)

    def evict(self, ids: Sequence[int], /) -> None:
        assert self.log[-1][0] == "save", "evicted before a point says so"
        self.log.append(("evict", list(ids)))
        self.hide(ids)

    def save(self, document: Mapping[str, Any], keep: bool, /) -> str:
        self._write()
        self.log.append(("save", document))
        self._current = PoolPoint(f"step-{len(self.log)}", dict(document))
        self.points[self._current.name] = self._current, set(self.hidden)
        return self._current.name

    def go_to(self, name: str, /) -> None:
        self._current, hidden = self.points[name]
        self.hidden = set(hidden)

    def first(self, count: int) -> LoggedStore:
        restored = LoggedStore()
        for kind, value in self.log[:count]:
            if kind == "add":
                restored.add_trajectories([value])
            elif kind == "save":
                restored.save(value, False)
            else:
                restored.evict(value)
        return restored


def whole(manager: ExperienceManager) -> dict[str, Any]:
    """Return a pool's contents, step and random generator state."""
    return {**view(manager), "generator": manager._ledger.document()["generator"], "step": manager.global_steps}


rollout = st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.5, 1.0, 1.5]), st.integers(0, 5))


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with dicts and lists, with crashes between any two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.store = LoggedStore()
        self.manager = ExperienceManager(RULES, store=self.store)
        self.bucket: dict[str, int] = {}
        self.skip: set[str] = set()
        self.held: dict[str, list[tuple[int, float]]] = {}

    @rule(work=st.dictionaries(st.sampled_from(TASKS), st.lists(rollout, min_size=1, max_size=4), min_size=1))
    def train_step(self, work: dict[str, list[tuple[float, float, int]]]) -> None:
        self.manager.global_steps += 1
        made = [
            (build(task, tokens, entry), entropy)
            for task, made_of_task in work.items()
            for entry, entropy, tokens in made_of_task
        ]
        step(self.manager, *map(list, zip(*made, strict=True)))  # type: ignore[arg-type]
        for task, made_of_task in work.items():
            successes = sum(outcome == 1.0 for outcome, _, _ in made_of_task)
            if successes == len(made_of_task) >= 2:
                self.skip.add(task)
                self.bucket.pop(task, None)
                self.held.pop(task, None)
                continue
            if successes == len(made_of_task) and task in self.skip:
                continue
            self.skip.discard(task)
            share = successes * 4 / len(made_of_task)
            self.bucket[task] = max(min(successes, 1), min(int(share + 0.5), 3))
            for outcome, entropy, tokens in made_of_task:
                held = self.held.setdefault(task, [])
                if outcome == 1.0 and all(tokens != other for other, _ in held):
                    worst = max((value for _, value in held), default=0.0)
                    if len(held) < 2 or entropy < worst:
                        if len(held) == 2:
                            held.remove(next(entry for entry in held if entry[1] == worst))
                        held.append((tokens, entropy))
            if not self.held[task]:
                del self.held[task]

    @rule(n=st.integers(1, 3))
    def sample(self, n: int) -> None:
        drawn = self.manager.sample_tasks_from_replaypool(n)
        valid = {task for task in self.bucket if task in self.held}
        assert len(drawn) == len(set(drawn)) == min(n, len(valid))
        assert set(drawn) <= valid

    @rule()
    def flush(self) -> None:
        self.manager.flush()

    @rule()
    def crash_after_a_point(self) -> None:
        self.manager.flush()
        self.store = self.store.first(len(self.store.log))
        self.manager = ExperienceManager(RULES, store=self.store)

    @rule(back=st.integers(1, 6))
    def every_earlier_moment_is_a_pool(self, back: int) -> None:
        restored = ExperienceManager(RULES, store=self.store.first(max(0, len(self.store.log) - back)))
        listed = [task for tasks in restored.difficulty2task_dict.values() for task in tasks]
        assert len(listed) == len(set(listed))
        assert all(restored.task2trajectories.values())
        assert not restored.skip_uid_set & set(restored.task2trajectories)

    @invariant()
    def equals_the_reference(self) -> None:
        buckets = self.manager.difficulty2task_dict
        assert {task: d for d, tasks in buckets.items() for task in tasks} == self.bucket
        assert all(buckets.values())
        assert self.manager.skip_uid_set == self.skip
        histories = {
            task: [(int(history.rollout_id[2:]), history.entropy) for history in held]
            for task, held in self.manager.task2trajectories.items()
        }
        assert histories == self.held


PoolMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_after_a_crash_the_pool_is_that_of_its_point() -> None:
    """What was admitted since, and the trajectories of others, stay in the store; none of them is drawn."""
    store = LoggedStore()
    store.add_trajectories([build("foreign")])
    manager = ExperienceManager(RULES, store=store)
    step(manager, rollouts("a", [1.0, 1.0, 0.0]))
    manager.flush()
    before = whole(manager)
    step(manager, [*rollouts("a", [1.0, 0.0], first=10), *rollouts("c", [1.0, 0.0])], [0.5] * 4)
    assert store.log[-1][0] == "add", "no point since"
    again = ExperienceManager(RULES, store=store.first(len(store.log)))
    assert whole(again) == before
    again.flush()
    assert len(again._ledger.store.ids()) == 5


def test_what_a_crash_kept_from_being_evicted_goes_later() -> None:
    store = LoggedStore()
    manager = ExperienceManager(RULES, store=store)
    for entropy in (3, 2, 1):
        step(manager, rollouts("a", [1.0, 1.0, 0.0], first=10 * entropy), [entropy] * 3)
    manager.flush()
    assert store.log[-1][0] == "evict"
    restored = store.first(len(store.log) - 1)
    again = ExperienceManager(RULES, store=restored)
    assert whole(again) == whole(manager)
    assert len(restored.ids()) == 6
    again.flush()
    assert len(restored.ids()) == 2
    assert whole(ExperienceManager(RULES, store=restored)) == whole(manager)


def test_a_full_disk_leaves_the_pool_as_it_was() -> None:
    store = LoggedStore()
    manager = ExperienceManager(RULES, store=store)
    step(manager, rollouts("a", [1.0, 0.0]))
    manager.flush()
    before = whole(manager)
    store.fail_after = 0
    with pytest.raises(OSError, match="No space"):
        manager.seed([build("a", 7)])
    assert whole(manager) == before
    manager.judge([build("b", 8, 0.0)])
    with pytest.raises(OSError, match="No space"):
        manager.flush()
    assert whole(ExperienceManager(RULES, store=store.first(len(store.log)))) == before
    store.fail_after = None
    manager.flush()
    assert whole(ExperienceManager(RULES, store=store.first(len(store.log)))) == whole(manager) != before


@pytest.mark.parametrize("additions", [0, 1])
def test_loading_replaces_the_pool_whole_or_not_at_all(additions: int) -> None:
    source = ExperienceManager(RULES)
    step(source, rollouts("new", [1.0, 1.0, 0.0]))
    saved = source.state_dict()

    store = LoggedStore()
    manager = ExperienceManager(RULES, store=store)
    step(manager, rollouts("old", [1.0, 0.0]))
    manager.flush()
    before = whole(manager)
    store.fail_after = additions
    with pytest.raises(OSError, match="No space"):
        manager.load_state_dict(saved)
    store.fail_after = None
    assert whole(manager) == before
    assert whole(ExperienceManager(RULES, store=store.first(len(store.log)))) == before

    start = len(store.log)
    manager.load_state_dict(saved)
    after = whole(manager)
    assert list(after["entries"]) == ["new"]
    end = len(store.log)
    assert [
        tuple(view(ExperienceManager(RULES, store=store.first(length)))["entries"]) for length in range(start, end + 1)
    ] == [("old",)] * 3 + [("new",)] * 2
    assert whole(ExperienceManager(RULES, store=store.first(end))) == after


@pytest.mark.parametrize(
    "damage",
    [{"version": 99}, {"uses": 3}, {"difficulty2task_dict": {"1": ["a"], "2": ["a"]}}, {"entries": {"a": ["x"]}}],
)
def test_a_point_of_another_version_is_named(damage: dict[str, Any]) -> None:
    store = LoggedStore()
    manager = ExperienceManager(RULES, store=store)
    manager.flush()
    store.save({**store.log[-1][1], **damage}, False)
    with pytest.raises(CorruptStoreError, match="not the state of an experience pool"):
        ExperienceManager(RULES, store=store)


def test_a_store_that_evicts_its_oldest_gives_up_trajectories_and_nothing_else() -> None:
    class Bounded(LoggedStore):
        def add_trajectories(self, trajectories: list[AgentTrajectory], /) -> list[int]:
            ids = super().add_trajectories(trajectories)
            self.hide(self.ids()[:-8])
            return ids

    store = Bounded()
    manager = ExperienceManager(RULES, store=store)
    for number in range(12):
        step(manager, rollouts(f"t{number}", [1.0, 1.0, 0.0]))
        manager.flush()
        again = ExperienceManager(RULES, store=store)
        assert again.difficulty2task_dict == manager.difficulty2task_dict
        assert view(again)["entries"] == view(manager)["entries"]
    assert len(manager) == 8
    assert manager.left["unavailable"] == 16


def test_what_gave_up_its_place_stays_away_whatever_the_rules_are() -> None:
    store = LoggedStore()
    manager = ExperienceManager(RULES, store=store)  # two of a task
    for number in range(6):
        manager.seed([build("a", number, entropy=2.0 - number / 10)])
    several = [build("a", 10 + number, entropy=1.0 - number / 10) for number in range(3)]
    manager.seed(several)  # the third replaces the first
    manager.seed([build("b", number, entropy=2.0 - number / 10) for number in range(3)])
    assert len(store.ids()) > len(manager), "those that left are not deleted yet"
    store.save(manager._ledger.to_save(), False)
    there = view(manager)["entries"]
    assert {task: len(held) for task, held in there.items()} == {"a": 2, "b": 2}
    for most in (1, 2, 10):
        other = ExperienceManager(PoolRules(n_rollout=4, max_trajectories_per_task=most), store=store)
        assert view(other)["entries"] == there


@pytest.mark.parametrize("mode", ["argmin", "argmax", "reward", "random"])
def test_the_pool_of_every_step_is_found_again(mode: str) -> None:
    """Includes demonstrations, kept failures, and several changes of one task in a step."""
    generator = np.random.default_rng(3)
    checked = PoolRules(n_rollout=4, max_trajectories_per_task=2, exp_select_mode=mode, save_filter="positive")
    store = LoggedStore()
    manager = ExperienceManager(checked, store=store)
    ends = {}
    for number in range(25):
        manager.global_steps = number
        if generator.random() < 0.3:
            shown = {"entropy": None, "old_log_probs": None, "metadata": {"demonstration": True}}
            manager.seed([build("a", int(generator.integers(30)), 1.0, **shown)])
        manager.admit(
            [
                build(
                    task, int(generator.integers(30)), float(generator.choice([0, 0.5, 1])), entropy=generator.random()
                )
                for task in TASKS
                for _ in range(4)
            ]
        )
        if number % 3 == 0:
            manager.flush()
            ends[len(store.log)] = view(manager)
    for end, seen in [*list(ends.items())[:8], *list(ends.items())[8::3]]:
        assert view(ExperienceManager(checked, store=store.first(end))) == seen


def test_a_pool_that_is_never_flushed_evicts_what_left_it() -> None:
    store = LoggedStore()
    manager = ExperienceManager(RULES, store=store)
    for number in range(3 * MOST_LEFT):
        manager.seed([build("a", number, entropy=1 / (1 + number))])
    assert len(store.ids()) < MOST_LEFT + len(manager)
