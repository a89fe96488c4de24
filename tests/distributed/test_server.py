"""One served store without Ray: requests, retries, restarts, reports."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.witness import check_trajectory, witness
from tools.bench.t35_run import points_of
from trajstore import AgentTrajectory, Retention, Reward, Trajectory, TrajectoryReplayBuffer, annotate
from trajstore._core.buffer.content_watch import flatten_all
from trajstore._core.columns.memory import Arena
from trajstore._core.store.late_values import LateValues
from trajstore.distributed.add_request import AddRequest, Piece, new_key, pack, unpack
from trajstore.distributed.hold import Hold
from trajstore.distributed.run_index import RunIndex
from trajstore.distributed.server import MOST_STORES, Known, StoreServer
from trajstore.distributed.sessions import RemoteSession
from trajstore.errors import (
    CallConflictError,
    ConfigurationError,
    InvalidCallError,
    SessionFinishedError,
    StoreWriteError,
)
from trajstore.operations.conversion import convert
from trajstore.operations.mending import prune
from trajstore.trajectory import AnyTrajectory


def agent(number: int) -> AgentTrajectory:
    tokens = torch.arange(5 + number)
    return AgentTrajectory(
        messages=[{"role": "user", "content": "é" * number}],
        input_ids=tokens,
        loss_mask=(tokens > 2).long(),
        response_start=3,
        old_log_probs=-torch.rand(2 + number),
        task_id=f"task_{number % 3}",
        reward=Reward(outcome=None if number % 2 else 1.0),
        policy_version=None if number % 2 else number,
    )


def server(path: Path, rank: int = 0, began: str = "first", **options: Any) -> StoreServer:
    return StoreServer(str(path), rank, options, ("host", "node", began))


def request_of(*calls: Sequence[AnyTrajectory]) -> AddRequest:
    arena = Arena(1 << 20)
    return AddRequest(new_key(), [pack(flatten_all(call), arena)[0] for call in calls])


def ids_of(answer: list[int] | None) -> list[int]:
    assert answer is not None
    return answer


def test_a_request_of_another_version_is_refused() -> None:
    (piece,) = request_of([witness(0)]).pieces
    for head in (b"{}", b"nonsense", piece.head.replace(b'"runs"', b'"other"')):
        with pytest.raises(ConfigurationError, match="same trajstore"):
            unpack(AddRequest(new_key(), [Piece(head, piece.data)]))
    with pytest.raises(ConfigurationError, match="bytes arrived"):
        unpack(AddRequest(new_key(), [Piece(piece.head, piece.data[:-64])]))


def test_a_request_that_comes_again_is_stored_once(tmp_path: Path) -> None:
    store = server(tmp_path, 7)
    request = request_of([witness(key) for key in range(5)])
    results: list[Sequence[int] | None] = []
    threads = [threading.Thread(target=lambda: results.append(store.add(request, 5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[7 + MOST_STORES * place for place in range(5)]] * 4
    store.close()
    again = server(tmp_path, 7, "second")  # the process was killed before its answer arrived
    assert again.add(request, 5) == results[0]
    assert again.stats()["num_trajectories"] == 5
    assert again.add(request_of([witness(9)]), 1) == [7 + MOST_STORES * 5]
    again.close()


@pytest.mark.parametrize("late", [False, True], ids=["added before", "arrives late"])
def test_a_request_that_another_store_has_is_deleted(tmp_path: Path, late: bool) -> None:
    store = server(tmp_path)
    store.add(request_of([witness(9)]), 1)
    request = request_of([witness(key) for key in range(5)])
    if not late:
        store.add(request, 5)
    store.disown(request.key, 5)
    assert store.add(request, 5) is None
    store.disown(request.key, 5)
    assert look_at(store) == 1
    store.close()


def test_a_request_that_two_stores_have_counts_once_where_they_are_united(tmp_path: Path) -> None:
    """The second store ends before it is told to delete its copy, and so does the producer."""
    pytest.importorskip("polars", reason="needs polars, of the extra 'query'")
    request, path = request_of([agent(key) for key in range(4)]), tmp_path / "run"
    for rank in range(2):
        store = server(path, rank)
        store.add(request, 4)
        store.close()
    for number, value in (("0/0", 1.0), ("1/1", 2.0), ("1/1025", 3.0)):
        annotate(path, number, {"judge": value})

    def shown(of: Path) -> list[tuple[str | None, float | None]]:
        with TrajectoryReplayBuffer.open(of) as reader:
            rows = reader.query().order_by("response").select("task", "judge").rows()
        return [(row["task"], row["judge"]) for row in rows]

    tasks = ["task_0", "task_1", "task_2", "task_0"]
    assert shown(path) == list(zip(tasks, [1.0, None, None, None], strict=True)), "of the copies that are shown"
    convert(path, tmp_path / "united", "pt")
    assert shown(tmp_path / "united") == list(zip(tasks, [2.0, 3.0, None, None], strict=True)), "of both"
    assert prune(path, "task = 'task_0'", dry_run=True).trajectories == 2
    assert prune(path, "task = 'task_0'").trajectories == 2
    for of in (path, path / "rank_0", path / "rank_1"):
        with TrajectoryReplayBuffer.open(of) as reader:
            assert {row["task"] for row in reader.query().rows()} == {"task_1", "task_2"}


def look_at(store: StoreServer) -> int:
    return sum(map(len, store.changes("", -1).changes))


def test_values_of_a_request_that_comes_again_are_set_once(tmp_path: Path) -> None:
    first = server(tmp_path)
    (number,) = ids_of(first.add(request_of([witness(1)]), 1))
    said = LateValues(np.array([number]), {"judge": [0.5]}, "anna", 7)
    rows = {"advantages": [torch.ones(witness(1).rewards.shape[:2])]}
    for _ in range(2):
        first.annotate(said, rows)
    first.close()
    second = server(tmp_path, began="second")
    second.annotate(said, rows)
    second.annotate(replace(said, time=8), {})
    assert [(note.name, note.time) for note in second.history(number)] == [
        ("judge", 7),
        ("advantages", 7),
        ("judge", 8),
    ]
    second.close()


def test_a_store_whose_uuids_begin_alike_opens_again(tmp_path: Path) -> None:
    flats = flatten_all([Trajectory(rewards=torch.full((2, 1, 1), float(number))) for number in range(1000)])
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer._sink.add_flattened(
            flats, b"".join([b"one origin, " + place.to_bytes(4, "big") for place in range(1000)])
        )
    with TrajectoryReplayBuffer.open(tmp_path) as reader:
        assert len(reader) == 1000


def test_a_request_of_before_a_rollback_is_added_again(tmp_path: Path) -> None:
    store = server(tmp_path)
    store.hold("me", 60.0)
    store.save_point("me", 1, {}, 1)
    store.release("me")
    late = request_of([witness(0)])
    before = ids_of(store.add(late, 1))
    store.hold("me", 60.0)
    store.go_to("me", 1, True)
    store.release("me")
    assert look_at(store) == 0
    (number,) = ids_of(store.add(late, 1))
    assert check_trajectory(store.trajectories([number])[0]) == 0
    assert look_at(store) == len(before) == 1
    store.close()


def test_a_request_of_which_a_part_was_committed_is_completed(tmp_path: Path) -> None:
    request = request_of([witness(key) for key in range(4)])
    store = server(tmp_path)
    ids = ids_of(store.add(request, 4))
    store.flush()
    store.evict(ids[2:])
    store.close()
    two = server(tmp_path, began="second")  # as if the last two were uncommitted
    assert ids_of(two.add(request, 4))[:2] == ids[:2]
    assert two.stats()["num_trajectories"] == 4
    for key, number in enumerate(ids_of(two.add(request, 4))):
        assert check_trajectory(two.trajectories([number])[0]) == key
    two.close()


@pytest.mark.parametrize("name", ["auto_save", "auto_save_path", "sample_window_size", "seed", "on_commit"])
def test_what_the_server_decides_is_no_option(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        server(tmp_path, **{name: 1})


def test_known_forgets_the_oldest() -> None:
    known = Known(limit=2)
    uuids = b"".join(bytes([number]) * 16 for number in range(3))
    known.note(uuids, [10, 11, 12])
    assert known.ids(uuids) == [None, 11, 12]


def test_the_index_hears_of_what_retention_lets_go(tmp_path: Path) -> None:
    store, index = server(tmp_path, retention=Retention(max_trajectories=6)), RunIndex()
    for key in range(8):
        store.add(request_of([witness(key)]), 1)
        store.flush()  # evicts before the index is updated
        index.take(0, store.changes(*index.received(0)))
        index.show(lambda ids: ids)
        assert [check_trajectory(store.trajectories([number])[0]) for number in index.ids.tolist()] == [
            *range(max(0, key - 5), key + 1)
        ]
    store.close()


# -- A store held during a save of all stores: waiting, admitted and refused callers --


def test_changes_wait_until_they_are_let_through() -> None:
    hold, done = Hold(), threading.Event()

    def change() -> None:
        with hold.changing():
            done.set()

    hold.begin("a", 600.0)
    hold.begin("a", 600.0)  # a retry of the same caller
    thread = threading.Thread(target=change)
    thread.start()
    with hold.keeping("a"):
        assert not done.is_set()
    hold.end("b")  # not its own hold
    assert not done.is_set()
    hold.end("a")
    thread.join()
    assert done.is_set()


def test_a_holder_that_says_nothing_more_is_forgotten() -> None:
    hold = Hold()
    hold.begin("a", 0.05)
    with hold.changing():  # after the timeout
        pass
    with pytest.raises(StoreWriteError, match="released before it was saved"), hold.keeping("a"):
        pass
    hold.begin("a", 0.05)
    hold.begin("b", 600.0)  # waits for it
    with pytest.raises(StoreWriteError, match="released before it was saved"), hold.keeping("a"):
        pass
    with pytest.raises(StoreWriteError, match="another handle"):
        hold.begin("c", 0.01)
    hold.end("b")
    with hold.changing(), pytest.raises(StoreWriteError, match="has not ended"):
        hold.begin("d", 0.01)
    with hold.changing():
        pass


def test_what_is_held_is_saved_and_nothing_else(tmp_path: Path) -> None:
    store = StoreServer(str(tmp_path / "run"), 0, {}, ("host", "node", "first"))
    for save in (
        lambda: store.save_point("a", 1, {}, 1),
        lambda: store.pin("a", "name"),
        lambda: store.go_to("a", 1, True),
    ):
        with pytest.raises(StoreWriteError, match="released before it was saved"):
            save()
    store.hold("a", 600.0)
    store.hold("a", 600.0)  # replaces the first
    assert [point.name for point in store.pin("a", "name")] == ["name"]
    store.release("a")
    store.close()


class OneStore:
    """The store of a handle, without Ray: each call may be sent to a store that was opened anew."""

    name = "one"
    all_ranks = (0,)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server = server(path)

    def call(self, rank: int, *asked: Any) -> Any:
        method, *arguments = pickle.loads(pickle.dumps(asked))
        return pickle.loads(pickle.dumps(getattr(self.server, method)(*arguments)))

    def restart(self) -> None:
        self.server.close()
        self.server = server(self.path)


def test_a_session_through_a_handle_goes_on_after_a_restart(tmp_path: Path) -> None:
    store: Any = OneStore(tmp_path)
    fields = {"task_id": "task", "rollout_id": "a", "query": "q"}
    session = RemoteSession(store, fields)
    first = session.add_call([1, 2], [3], [-0.5], policy_version=3)
    store.restart()
    assert session.add_call([1, 2], [3], [-0.5], policy_version=3, call_id=first) == first
    session.add_call([1, 2, 3, 4], torch.tensor([5]), [-0.25], call_id="b", parent=first, messages=[{"role": "user"}])
    session.incomplete("gap", "timeout")
    with pytest.raises(InvalidCallError, match=r"session task/a: log_probs: has 1 entry"):
        session.add_call([1], [2, 3], [-0.5])
    with pytest.raises(CallConflictError, match="session task/a, call b"):
        session.add_call([1], [2], call_id="b")
    assert [call.id for call in session.calls()] == [first, "b", "gap"]
    assert [[call.id for call in path] for path in session.paths()] == [[first, "b"]]
    assert RemoteSession(store, fields).id == session.id
    session.freeze()
    assert session.state == "frozen"
    ids = session.finish(Reward(outcome=1.0), is_terminated=True)
    for _ in range(2):  # a lost answer: asked again, of the same process and of another one
        assert session.finish(Reward(outcome=1.0), is_terminated=True) == ids
        assert session.state == "finished"
        store.restart()
    with pytest.raises(SessionFinishedError):
        session.add_call([1], [2])
    (row,) = store.server.trajectories(ids)
    assert row is not None
    assert row.input_ids.tolist() == [1, 2, 3, 4, 5]
    other = RemoteSession(store, fields)
    assert other.id != session.id
    other.discard()
    store.restart()
    other.discard()
    assert other.state == "discarded"
    store.server.close()


def test_handles_that_save_at_once_hold_the_first_store_in_turn_and_the_others_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, begin = threading.Barrier(3, timeout=60.0), StoreServer.hold

    def hold(store: StoreServer, by: str, seconds: float) -> None:
        if store.describe().rank:
            others.wait()  # all of one handle, as another one waits for the first store
        begin(store, by, seconds)

    monkeypatch.setattr(StoreServer, "hold", hold)
    servers = [StoreServer(str(tmp_path), rank, {}, ("", "", "")) for rank in range(4)]
    saving = [threading.Thread(target=points_of(servers).pin, args=(name,)) for name in ("a", "b", "c")]
    for thread in saving:
        thread.start()
    for thread in saving:
        thread.join()
    for server in servers:
        assert [point.name for point in server.snapshots()] == ["a", "b", "c"]
        server.close()
