"""The writer's queue: grouping, commit order and failures."""

from __future__ import annotations

import threading

import pytest
import torch

from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.flat import FlatTrajectories, FlatTrajectory, copied
from trajstore._core.columns.memory import Arena
from trajstore._core.store.additions import NewEntries
from trajstore._core.store.packing import StringTable
from trajstore._core.writing.groups import Batch, Group
from trajstore._core.writing.options import WriterOptions
from trajstore._core.writing.queue import WriteQueue
from trajstore.errors import StoreClosedError, StoreWriteError
from trajstore.trajectory import Trajectory


def flat(steps: int, dtype: torch.dtype = torch.float32) -> FlatTrajectory:
    return flatten(Trajectory(rewards=torch.rand(steps, 1, 1, dtype=dtype)))


def queue(**options: object) -> WriteQueue:
    return WriteQueue("store", WriterOptions(commit_interval=0.0, **options), 0, 0, lambda: None)  # type: ignore[arg-type]


def add(target: WriteQueue, items: list[FlatTrajectory]) -> list[int]:
    batch = reserve(target, sum(item.nbytes for item in items))
    ids, uuids = target.take_ids(len(items))
    target.submit(
        batch,
        copied(FlatTrajectories.runs(items), Arena(0)),
        NewEntries.of(FlatTrajectories.runs(items), ids, uuids, StringTable()),
    )
    return ids


def reserve(target: WriteQueue, nbytes: int) -> Batch:
    batch = Batch(nbytes)
    target.reserve(batch, first=True)
    return batch


def three_groups() -> tuple[WriteQueue, list[Group]]:
    target = queue(shard_bytes=1)
    for _ in range(3):
        add(target, [flat(4)])
    groups = [group for _ in range(3) if (group := target.next_group()) is not None]
    return target, groups


def test_commits_wait_for_the_ones_before_them() -> None:
    target, (first, second, third) = three_groups()
    target.published(third)
    target.published(second)
    assert target.take_ready() == []
    target.published(first)
    assert target.take_ready() == [first, second, third]
    target.finish([first, second, third])
    assert target.committed == 2
    assert target.pending_bytes == 0
    assert target.take_ready() == []


def test_a_failure_beside_a_commit_does_not_take_what_is_being_committed() -> None:
    target, (first, second, third) = three_groups()
    target.published(first)
    target.published(third)
    committing = target.take_ready()
    assert committing == [first]
    second.failures = 1
    target.fail([second], StoreWriteError("no space"))  # in another thread, before the commit is done
    target.finish(committing)
    assert target.committed == 0
    with pytest.raises(StoreWriteError, match="no space"):
        target.wait(1)
    target.begin_flush()
    assert [target.next_group(), target.next_group()] == [second, third]
    target.published(third)
    target.published(second)
    assert target.take_ready() == [second, third]


def test_a_commit_that_failed_is_tried_again_with_what_waited_for_it() -> None:
    target, (first, second, third) = three_groups()
    for group in (first, second, third):
        target.published(group)
    first.failures = 1
    target.fail(target.take_ready(), StoreWriteError("no space"))
    with pytest.raises(StoreWriteError, match="no space"):
        reserve(target, 1)
    reserve(target, 0)  # the error is reported once
    assert target.begin_flush() == 2
    assert [target.next_group() for _ in range(3)] == [first, second, third]
    assert target.pending_bytes == sum(group.nbytes for group in (first, second, third))


def test_a_flush_during_the_failing_write_means_try_again() -> None:
    target, (first, second, third) = three_groups()
    target.begin_flush()
    target.fail([first], StoreWriteError("old news"))
    reserve(target, 0)  # raises nothing
    assert target.next_group() is first
    target.fail([first], StoreWriteError("new"))
    with pytest.raises(StoreWriteError, match="new"):
        target.wait(0)
    assert {second.ticket, third.ticket} == {1, 2}


def test_room() -> None:
    target = queue(max_pending_bytes=128)
    large = reserve(target, 1000)  # admitted alone, even beyond the limit
    assert not target._fits(1)
    assert target.withdraw(large)
    held = [reserve(target, 64), reserve(target, 64)]
    assert not target._fits(1)
    del held  # interrupted after reserving, and again during the release
    last = reserve(target, 1)
    target.close()
    with pytest.raises(StoreClosedError):
        reserve(target, 1)
    ids, uuids = target.take_ids(1)
    with pytest.raises(StoreClosedError):
        target.submit(
            last,
            copied(FlatTrajectories.runs([flat(1)]), Arena(0)),
            NewEntries.of(FlatTrajectories.runs([flat(1)]), ids, uuids, StringTable()),
        )


def test_an_adder_waits_for_room() -> None:
    target = queue(max_pending_bytes=128)
    ids = add(target, [flat(4)])
    held = reserve(target, 64)
    entered = threading.Thread(target=reserve, args=(target, 64))
    entered.start()
    group = target.next_group()
    assert group is not None
    assert group.ids == ids
    assert entered.is_alive()
    target.published(group)
    target.finish(target.take_ready())
    entered.join(60)
    assert not entered.is_alive()
    assert held.nbytes == 64
