"""Loading damaged stores: each fault is named, and none hides intact data."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forging import forged_index, forged_log
from tests.stores import add_each, damage_indexes, flip, opened, overwrite_by_rlinf
from tests.support.copies import copy_live, tell_ids
from tests.support.witness import check_trajectory, witness
from trajstore import TrajectoryReplayBuffer, errors
from trajstore._core.reading import shard_access
from trajstore.operations.copying import copy_store, repair_store
from trajstore.operations.inspect import inspect
from trajstore.operations.verify import verify
from trajstore.points import points_at


def fill(path: Path, keys: range, commits: int = 1, trajectory_format: str = "pt") -> Path:
    """Write a closed store of witnesses with this many commits."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format=trajectory_format) as buffer:
        for part in range(commits):
            buffer.add_trajectories([witness(key) for key in keys[part::commits]])
            buffer.flush()
    return path


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks with three trajectories each."""
    path = tmp_path_factory.mktemp("whole") / "run"
    for rank in range(4):
        fill(path / f"rank_{rank}", range(3 * rank, 3 * rank + 3))
    return path


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def load(path: Path, *, strict: bool = True, **options: object) -> tuple[TrajectoryReplayBuffer, int]:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    return buffer, buffer.load_checkpoint(path, strict=strict, **options)  # type: ignore[arg-type]


def keys_of(buffer: TrajectoryReplayBuffer) -> list[int]:
    """Return the keys of all witnesses, after checking each."""
    return sorted(check_trajectory(buffer.get(number)) for number in buffer.trajectory_ids.tolist())


def cut(file: Path, count: int = 1) -> None:
    os.truncate(file, file.stat().st_size - count)


# -- a store beside ranks ----------------------------------------------------------------------------


def test_a_store_beside_ranks_is_told_by_everybody(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"rank_0, rank_1, rank_2, rank_3"):
        opened(run)
    assert sorted(os.listdir(run)) == [f"rank_{rank}" for rank in range(4)]
    for file in fill(run.parent / "other", range(20, 22)).iterdir():
        file.rename(run / file.name)
    with pytest.raises(errors.StoreError, match=r"beside rank_0, rank_1, rank_2, rank_3"):
        load(run)
    assert load(run / "rank_1")[1] == 0
    assert keys_of(load(run, strict=False)[0]) == [*range(12), 20, 21]
    assert "beside rank_0" in caplog.text
    result = verify(run)
    assert (result.sound, result.trajectories) == (False, 14)
    assert any("beside rank_0" in problem.message for problem in result.problems)
    report = inspect(run)
    assert (report["kind"], report["trajectories"]) == ("run", 14)
    assert "beside rank_0" in report["integrity"]["problems"][0]
    with pytest.raises(errors.ConfigurationError, match="rank_0"):
        opened(run)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_store_beside_ranks_is_repaired_by_itself(run: Path, damaged: bool) -> None:
    own = fill(run.parent / "other", range(20, 26), 3)
    if damaged:
        flip(next((own / "shards").glob("shard_00000001*")))
        shutil.rmtree(run / "rank_1")
    for file in own.iterdir():
        file.rename(run / file.name)
    with pytest.raises(errors.StoreError, match="beside rank_0"):
        copy_store(run, run.with_name("copy"))
    repaired = repair_store(run, run.with_name("new"))
    assert (repaired.is_whole, repaired.trajectories) == (not damaged, 13 if damaged else 18)
    beside = "rank_0, rank_2, rank_3" if damaged else "rank_0, rank_1, rank_2, rank_3"
    assert f"beside {beside} is copied to own" in str(repaired.problems)
    assert keys_of(load(run.with_name("new") / "own")[0]) == ([20, 22, 23, 25] if damaged else [*range(20, 26)])
    assert len(load(run.with_name("new"))[0]) == (9 if damaged else 12)
    (first,) = repaired.parts[0].problems or [""]
    assert first.count("shards/") == int(damaged), "a file is named once"


# -- missing ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["emptied", "gone", "overwritten"])
def test_a_rank_that_is_not_there_or_cannot_be_read_is_told_and_the_run_can_be_repaired(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    if how == "overwritten":
        overwrite_by_rlinf(run / "rank_2")
    else:
        shutil.rmtree(run / "rank_2")
        (run / "rank_2").mkdir() if how == "emptied" else None
    for share in ({}, {"is_distributed": True, "local_rank": 0, "world_size": 4}):
        error = errors.CorruptStoreError if how == "overwritten" else errors.IncompleteCheckpointError
        with pytest.raises(error, match="rank_2"):
            load(run, **share)
    buffer, skipped = load(run, strict=False)
    assert (keys_of(buffer), skipped) == ([0, 1, 2, 3, 4, 5, 9, 10, 11], 3 if how == "overwritten" else 0)
    assert ("rank_2 is left out with 3 trajectories" if how == "overwritten" else "rank_2") in caplog.text
    result = verify(run)
    assert not result.sound
    assert how == "overwritten" or result.problems[0].uncounted
    assert "rank_2" in str(result.parts[2].path if how == "overwritten" else result.problems[0])
    assert "rank_2" in inspect(run)["integrity"]["problems"][0]
    if how == "gone":
        with pytest.raises(errors.ConfigurationError, match="rank_2 is absent"):
            points_at(run).go_to(1)
    repaired = repair_store(run, tmp_path / "new")
    assert (repaired.is_whole, repaired.left_out) == (False, 1)
    assert "an empty store takes its place" in str(repaired.problems)
    assert verify(tmp_path / "new").sound
    buffer, left_out = load(tmp_path / "new")
    assert (keys_of(buffer), left_out) == ([0, 1, 2, 3, 4, 5, 9, 10, 11], 0)
    with opened(tmp_path / "new" / "rank_2") as rank:
        assert rank.add_trajectories([witness(7)]) == [0]


# -- one damaged rank --------------------------------------------------------------------------------


def test_all_damaged_ranks_are_named(run: Path) -> None:
    (run / "rank_1" / "metadata.json").write_bytes(b"{")
    damage_indexes(run / "rank_3")
    with pytest.raises(errors.CorruptStoreError, match=r"(?s)rank_1.*rank_3.*strict=False"):
        load(run)
    (run / "rank_1" / "metadata.json").unlink()
    with pytest.raises(errors.CorruptStoreError, match=r"(?s)rank_1.*rank_3"):
        load(run)
    for rank in (0, 1, 2):
        shutil.rmtree(run / f"rank_{rank}")
    assert keys_of(load(run, strict=False)[0]) == [9, 10, 11], "by the labels of the shards"


def as_nobody(call: Callable[[], None]) -> None:
    """Call in another process as an unprivileged user, because root may read everything."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("name", ["rank_1", "rank_1/metadata.json"])
def test_a_rank_that_may_not_be_read_is_named_and_left_out(run: Path, name: str) -> None:
    def look() -> None:
        with pytest.raises(errors.IncompleteCheckpointError, match=r"rank_1 may not be read: .*Permission denied"):
            load(path)
        buffer, _ = load(path, strict=False)
        assert keys_of(buffer) == [0, 1, 2, *range(6, 12)]
        assert "rank_1 may not be read" in "".join(problem.message for problem in verify(path).problems)

    with tempfile.TemporaryDirectory() as reachable:
        Path(reachable).chmod(0o755)
        path = Path(reachable) / "run"
        shutil.copytree(run, path)
        (path / name).chmod(0)
        try:
            as_nobody(look)
        finally:
            (path / name).chmod(0o755)


@pytest.mark.parametrize("content", [b"{", b"", b"{}", b"null", None])
def test_metadata_is_worked_out_again(run: Path, content: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    metadata = run / "rank_1" / "metadata.json"
    metadata.unlink()
    if content is not None:
        metadata.write_bytes(content)
    with pytest.raises(errors.CorruptStoreError, match=r"rank_1/metadata\.json|rank_1: without metadata\.json"):
        load(run)
    with pytest.raises(errors.StoreError, match="rank_1"):
        opened(run / "rank_1")
    buffer, skipped = load(run, strict=False)
    assert (keys_of(buffer), skipped) == (list(range(12)), 0)
    assert "rank_1/metadata.json" in caplog.text
    alone, _ = load(run / "rank_1", strict=False)
    assert keys_of(alone) == [3, 4, 5]
    assert alone._trajectory_counter == 3
    result = verify(run)
    assert (result.sound, result.trajectories) == (False, 12), "the rest is checked all the same"


def _with_record(store: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    (log,) = (store / "log").iterdir()
    log.write_bytes(b"".join(change(log.read_bytes().splitlines(keepends=True))))


@pytest.fixture(scope="module")
def whole_crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of four one-trajectory commits, as after a crash: all in the log."""
    path = tmp_path_factory.mktemp("crashed")
    with opened(path / "live") as buffer:
        add_each(buffer, range(4))
        return copy_live(path / "live", path / "crashed")


@pytest.fixture
def crashed(whole_crashed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_crashed, tmp_path / "crashed"))


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_damaged_record_costs_only_what_no_shard_has(
    crashed: Path, place: int, shard: bool, caplog: pytest.LogCaptureFixture
) -> None:
    left = [0, 1, 2, 3] if shard else [number for number in range(4) if number != place]
    if not shard:
        (crashed / "shards" / f"shard_{place:08d}.pt").unlink()
    # The first two records also defined the columns of the last two.
    _with_record(crashed, lambda lines: [b"?" + line[1:] if at == place else line for at, line in enumerate(lines)])
    with pytest.raises(errors.CorruptStoreError, match=r"\.log"):
        load(crashed)
    buffer, left_out = load(crashed, strict=False)
    assert keys_of(buffer) == left
    assert left_out == 4 - len(left)
    assert "1 record is damaged" in caplog.text
    ranges = [each for problem in verify(crashed).problems for each in problem.lost]
    lost = [number for low, high in ranges for number in range(low, high + 1)]
    assert sorted([*lost, *buffer.trajectory_ids.tolist()]) == [0, 1, 2, 3]
    repaired = repair_store(crashed, crashed.with_name("repaired"))
    assert (repaired.lost, repaired.is_whole, repaired.trajectories) == (sorted(lost), shard, len(left))


def test_a_damaged_record_that_only_evicted_loses_nothing(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "live") as buffer:
        buffer.add_trajectories([witness(key) for key in range(3)])
        buffer.flush()
        buffer.evict([1])
        add_each(buffer, [3])
        copy_live(tmp_path / "live", tmp_path / "crashed")
    _with_record(tmp_path / "crashed", lambda lines: [lines[0], b"?" + lines[1][1:], *lines[2:]])
    repaired = repair_store(tmp_path / "crashed", tmp_path / "repaired")
    assert repaired.is_whole
    assert repaired.trajectories == 4
    assert "no trajectory is lost by it" in str(repaired.problems)


@pytest.mark.parametrize(("line", "place"), [(0, 2), (1, 3), (2, 3), (0, 1)])
def test_a_record_that_is_in_the_log_twice_says_nothing_new(crashed: Path, line: int, place: int) -> None:
    shown = keys_of(load(crashed)[0])
    _with_record(crashed, lambda lines: [*lines[:place], lines[line], *lines[place:]])
    assert verify(crashed).problems == []
    assert keys_of(load(crashed)[0]) == shown


@pytest.mark.parametrize(
    ("content", "sound"),
    [
        (b"5d1b", True),
        (b"5d1b0c2e ", True),
        (b'5d1b0c2e {"gen', True),
        (bytes(64), True),
        (bytes(range(11, 99)), False),
        (bytes(range(9)), False),
        (b'{"pid": 1}', False),
        (b'0badc0de {"generation":99}\n', False),
        (b"\x80\x04K\x01.", False),
    ],
    ids=range(9),
)
def test_a_log_that_became_something_else_is_no_interrupted_commit(crashed: Path, content: bytes, sound: bool) -> None:
    _with_record(crashed, lambda lines: [*lines[:2], content])
    tell_ids(crashed, 2)
    verification = verify(crashed)
    assert (verification.problems == []) == sound
    assert any("interrupted commit" in note for note in verification.notes) == sound


def test_two_different_records_of_one_generation_are_refused(crashed: Path) -> None:
    with forged_log(crashed) as records:
        (shard,) = records[1]["shards"]
        entries = shard["entries"]
        forged = {**shard, "entries": {**entries, "uuids": "0" * len(entries["uuids"])}}
        records.insert(2, {**records[1], "shards": [forged]})
    with pytest.raises(errors.CorruptStoreError, match=r"two records of generation \d+"):
        load(crashed)


# -- shards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trajectory_format", "damage"), [("pt", "missing"), ("pkl", "grown"), ("zarr", "missing"), ("zarr", "cut")]
)
def test_shards_of_another_size_are_found_when_loading(
    tmp_path: Path, trajectory_format: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = fill(tmp_path / "store", range(6), 3, trajectory_format)
    victim = sorted(path for path in (store / "shards").rglob("*") if path.is_file())[-1]
    if damage == "missing":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size + (1 if damage == "grown" else -1))
    name = str(victim.relative_to(store))
    with pytest.raises(errors.IncompleteCheckpointError, match=name):
        load(store)
    buffer, skipped = load(store, strict=False)
    left = keys_of(buffer)
    assert 0 < len(left) == 6 - skipped < 6
    buffer.sample(100)
    assert name in caplog.text
    caplog.clear()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=store, sample_window_size=0) as writer:
        assert name in caplog.text
        lost = sorted(set(range(6)) - set(writer.trajectory_ids.tolist()))
        assert f"ids {lost[0]}" in caplog.text
        assert keys_of(writer) == left
        writer.sample(100)
        assert writer.add_trajectories([witness(50)]) == [6]


@pytest.mark.parametrize("what", ["shard", "entries", "count"])
def test_a_rank_reads_its_share_though_another_part_is_damaged(run: Path, what: str) -> None:
    if what == "shard":
        cut(next((run / "rank_3" / "shards").iterdir()))
    else:
        with forged_index(run / "rank_3") as value:
            if what == "entries":
                value["live"]["columns"]["steps"] = {}
            else:
                value["live"]["columns"]["shard"]["shape"] = [2]
    kind = errors.IncompleteCheckpointError if what == "shard" else errors.CorruptStoreError
    if what == "count":  # from which every share follows
        with pytest.raises(kind, match=r"rank_3.*: 3 UUIDs, must be 2"):
            load(run, is_distributed=True, local_rank=0, world_size=4)
    else:
        buffer, _ = load(run, is_distributed=True, local_rank=0, world_size=4)
        assert keys_of(buffer) == [0, 1, 2]
    with pytest.raises(kind, match="rank_3"):
        load(run, is_distributed=True, local_rank=3, world_size=4)


# -- changed bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("trajectory_format", "own"), [("pt", True), ("pkl", False), ("zarr", False)])
def test_a_changed_byte_is_refused_when_shards_are_verified(
    tmp_path: Path, trajectory_format: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fill(tmp_path / "store", range(6), 3, trajectory_format)
    files = sorted(path for path in (store / "shards").rglob("*") if path.is_file())
    victim = next(path for path in files if "00000001" in str(path) and (path.suffix or path.parts[-2] == "c"))
    flip(victim)
    checks: list[str] = []
    honest = shard_access.check_file
    monkeypatch.setattr(shard_access, "check_file", lambda *given: checks.append(given[1].name) or honest(*given))
    options = {"auto_save": True, "auto_save_path": store} if own else {}
    with TrajectoryReplayBuffer(sample_window_size=0, verify_shards=True, **options) as buffer:
        if not own:
            buffer.load_checkpoint(store)
        for number in (0, 1, 4, 5):
            check_trajectory(buffer.get(number))
        for number in (2, 3):
            with pytest.raises(errors.CorruptStoreError, match=rf"{victim.relative_to(store)}.*trajectories 2 to 3"):
                buffer.get(number)
        message = "checksum.*evict these trajectories, or let `trajstore repair`"
        with pytest.raises(errors.CorruptStoreError, match=message):
            buffer.sample(1000)
        first = checks.count("shard_00000000")
        buffer.get(0)
        assert checks.count("shard_00000000") == first, "once for each shard"


def test_a_changed_byte_of_a_directory_of_rlinf_is_refused_too(tmp_path: Path, shared_fixtures: Path) -> None:
    shutil.copytree(shared_fixtures / "rlinf" / "auto_save_pt", tmp_path / "rlinf")
    victim = next((tmp_path / "rlinf").glob("trajectory_3_*.pt"))
    flip(victim)
    buffer = TrajectoryReplayBuffer(sample_window_size=0, verify_shards=True)
    buffer.load_checkpoint(tmp_path / "rlinf")
    buffer.get(2)
    with pytest.raises(errors.CorruptStoreError, match=victim.name):
        buffer.get(3)


@pytest.mark.parametrize("gone", [[3], [2, 3]])
def test_the_highest_ranks_are_missed_where_a_saved_point_says_how_many_there_were(run: Path, gone: list[int]) -> None:
    for rank in range(4):
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=run / f"rank_{rank}") as buffer:
            buffer._own_store.save(1, {}, ranks=4)
    assert len(load(run)[0]) == 12
    for rank in gone:
        shutil.rmtree(run / f"rank_{rank}")
    absent = rf"rank_{gone[0]}.*absent: 4 ranks saved together"
    with pytest.raises(errors.IncompleteCheckpointError, match=absent):
        load(run)
    assert len(load(run, strict=False)[0]) == 3 * (4 - len(gone))
    lost = [(problem.file, problem.lost, problem.uncounted) for problem in verify(run).problems]
    assert lost == [(f"rank_{gone[0]}", (), True)]
    assert len(inspect(run)["integrity"]["problems"]) == 1
    repaired = repair_store(run, run.with_name("repaired"))
    assert (repaired.is_whole, repaired.left_out, repaired.uncounted) == (False, len(gone), True)
    assert sorted(os.listdir(repaired.target)) == [f"rank_{rank}" for rank in range(4)], "empty stores in their places"
    for rank in gone:
        assert f"rank_{rank} is absent: 4 ranks saved together; an empty store" in str(repaired.problems)
    assert len(load(run.with_name("repaired"))[0]) == 3 * (4 - len(gone))
    with TrajectoryReplayBuffer.open(run / "rank_0") as reader:
        assert len(reader) == 3, "a rank by itself says of nothing that it is absent"
