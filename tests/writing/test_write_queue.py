"""The writer's queue: grouping, commit order and failures."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.flat import FlatTrajectories, FlatTrajectory, copied
from trajstore._core.columns.memory import Arena
from trajstore._core.columns.schema import Schema
from trajstore._core.store.additions import NewEntries
from trajstore._core.store.packing import StringTable
from trajstore._core.writing.groups import Batch, Group, Run, random_uuids
from trajstore._core.writing.options import WriterOptions
from trajstore._core.writing.queue import WriteQueue
from trajstore.errors import StoreClosedError, StoreWriteError
from trajstore.trajectory import Trajectory


def flat(steps: int, dtype: torch.dtype = torch.float32) -> FlatTrajectory:
    return flatten(Trajectory(rewards=torch.rand(steps, 1, 1, dtype=dtype)))


def content_of(run: Run) -> list[tuple[Schema, bytes]]:
    """Return the schema and bytes of each trajectory of a run."""
    block, end = run.block, run.first + len(run)
    return [
        (block.schema, bytes(block.bytes_at(int(block.places[at, 0]), int(block.sizes[at, 0]))))
        for at in range(run.first, end)
    ]


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


def drain(target: WriteQueue) -> list[Group]:
    target.close()
    groups = []
    while (group := target.next_group()) is not None:
        groups.append(group)
    return groups


@settings(max_examples=30, deadline=None)
@given(
    calls=st.lists(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=6), max_size=8),
    limit=st.integers(1, 600),
)
def test_groups_have_a_shard_for_each_schema_and_leave_nothing_out(
    calls: list[list[tuple[int, bool]]], limit: int
) -> None:
    target = queue(shard_bytes=limit)
    items = [[flat(steps, torch.float64 if wide else torch.float32) for steps, wide in call] for call in calls]
    ids = [number for call in items for number in add(target, call)]
    groups = drain(target)
    assert [number for group in groups for number in group.ids] == ids
    parts = [part for group in groups for part in group.parts]
    assert [part.number for part in parts] == list(range(len(parts)))
    runs = [run for part in parts for run in part.runs]
    placed = {number: content for run in runs for number, content in zip(run.entries.ids, content_of(run), strict=True)}
    assert [placed[number] for number in ids] == [
        (item.schema, bytes(item.column_bytes(0))) for call in items for item in call
    ]
    uuids = [uuid for part in parts for uuid in part.entries.columns["uuid"].tolist()]
    assert len(set(uuids)) == len(uuids) == len(ids)
    for number, group in enumerate(groups):
        assert (group.ticket, group.last) == (number, group.ids[-1])
        schemas = [{id(run.block.schema) for run in part.runs} for part in group.parts]
        assert sum(map(len, schemas)) == len(group.parts) == len(set.union(*schemas))
        assert all(part.ids == sorted(part.ids) for part in group.parts)
        assert group.nbytes == sum(part.nbytes for part in group.parts)
        assert group.nbytes <= limit or len(group.ids) == 1
    for earlier, other in pairwise(groups):  # each is as long as the limit allows
        assert earlier.nbytes + len(placed[other.ids[0]][1]) > limit


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 1))
def test_the_halves_of_a_part_have_all_that_it_has(sizes: list[int]) -> None:
    target = queue()
    for size in sizes:
        add(target, [flat(1 + at) for at in range(size)])
    ((part,),) = [group.parts for group in drain(target)]
    halves = part.split(7)
    assert [half.number for half in halves] == [part.number, 7]
    assert [len(half.ids) for half in halves] == [sum(sizes) // 2, -(-sum(sizes) // 2)]
    assert [number for half in halves for number in half.ids] == part.ids
    uuids = [half.entries.columns["uuid"].tobytes() for half in halves]
    assert b"".join(uuids) == part.entries.columns["uuid"].tobytes()
    assert sum(half.nbytes for half in halves) == part.nbytes
    contents = [content for half in halves for run in half.runs for content in content_of(run)]
    assert contents == [content for run in part.runs for content in content_of(run)]
    assert [half.entries.extents[:, 0].tolist() for half in halves] == [
        [len(data) // 4 for run in half.runs for _, data in content_of(run)] for half in halves
    ]


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


def test_uuids_are_version_4_and_different() -> None:
    data = random_uuids(1000)
    assert len({data[at : at + 16] for at in range(0, len(data), 16)}) == 1000
    assert {(data[at + 6] >> 4, data[at + 8] >> 6) for at in range(0, len(data), 16)} == {(4, 2)}
