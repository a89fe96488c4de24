"""Forged index numbers with valid checksums are refused, or at least never cause reads out of bounds."""

from __future__ import annotations

import base64
import multiprocessing
import random
import shutil
import tracemalloc
import zlib
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forging import forged_index, forged_log
from tests.stores import opened, refused_to_all
from tests.support.copies import copy_live
from tests.support.witness import WitnessError, check_batch, check_trajectory, witness
from tools.crash.forked import forking
from tools.mutate import forgery
from tools.mutate.pristine import files_of
from trajstore import TrajectoryReplayBuffer, errors
from trajstore._core.formats import FORMATS
from trajstore._core.store.index import COLUMNS
from trajstore._core.store.index_file import index_from_json
from trajstore._core.store.json_arrays import StringTable, array_to_json
from trajstore._core.store.log_records import decode_lines
from trajstore._core.store.sealed import INDEX_NAME, unseal
from trajstore._core.store.shard_table import ShardTable
from trajstore.operations.verify import verify


def _shards_in(path: Path) -> Any:
    """Return the shards by the index and by the log; None if either is unreadable."""
    with suppress(*forgery._SPOILT):
        (log,) = (path / "log").iterdir()
        records = decode_lines(log.read_bytes(), log.name).records
        logged = [
            [{name: value for name, value in shard.items() if name != "entries"} for shard in record.get("shards", ())]
            for record in records
        ]
        return unseal("snapshot", (path / INDEX_NAME).read_bytes(), "")["shards"], logged
    return None


def _forge_and_read(path: Path, seed: int, rounds: int, pipe: Connection) -> None:
    """Forge values of a store repeatedly and send the outcomes of reading it."""
    chance, pristine, shards = random.Random(seed), files_of(path), _shards_in(path)
    ways = [forgery._packed, forgery._packed, forgery._values]
    outcomes: dict[str, Any] = {"refused": 0, "read": 0, "else": [], "foreign": []}
    for number in range(rounds):
        for name, data in pristine.items():
            (path / name).write_bytes(data)
        for _ in range(chance.choice([1, 1, 2])):
            with suppress(*forgery._SPOILT):  # an earlier forgery may have made the file unreadable
                chance.choice(ways)(path, files_of(path), path / "canary", chance)
        for strict in (True, False):
            buffer = TrajectoryReplayBuffer(sample_window_size=0, enable_cache=False)
            try:
                buffer.load_checkpoint(path, strict=strict)
                for each in buffer.trajectory_ids.tolist()[:8]:
                    with suppress(WitnessError):  # mixes rows of other trajectories, or has another max_episode_length
                        check_trajectory(buffer.get(each))
                # Whole rows of other trajectories in the shard are acceptable, because each proves itself. Memory
                # beside the shard is not, nor are file bytes at which a forged shard table makes a column begin.
                if buffer.total_samples:
                    check_batch(buffer.sample(64, columns=["curr_obs.tag", "actions", "rewards", "curr_obs.image"]))
                outcomes["read"] += 1
            except errors.StoreError:
                outcomes["refused"] += 1
            except (WitnessError, errors.SchemaMismatchError) as error:
                if shards is not None and _shards_in(path) == shards:
                    outcomes["foreign"].append(f"{number}: {error}")
            except errors.TrajstoreError as error:
                outcomes["else"].append(f"{number}: {type(error).__name__}: {error}")
            finally:
                buffer.close()
    pipe.send(outcomes)


def store_with_log(path: Path, form: str = "pt") -> Path:
    """Make a store of four trajectories in its snapshot and three in its log, as after a crash."""
    with opened(path / "live", trajectory_format=form) as buffer:
        buffer.add_trajectories([witness(key) for key in (5, 5, 6, 7)])
    with opened(path / "live", trajectory_format=form) as buffer:
        for keys in ((5, 5), (8,)):
            buffer.add_trajectories([witness(key) for key in keys])
            buffer.flush()
        return copy_live(path / "live", path / "crashed")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_with_log(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def path(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "crashed"))


def campaign(path: Path, seed: int, rounds: int) -> dict[str, Any]:
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = forking().Process(target=_forge_and_read, args=(path, seed, rounds, theirs))
    process.start()
    theirs.close()
    outcomes: dict[str, Any] = {}
    with suppress(EOFError):
        outcomes = mine.recv()
    process.join()
    assert process.exitcode == 0, "if it is negative, the reader was killed by a signal"
    assert outcomes["foreign"] == [], "rows of no trajectory, the shard table being as it was: memory beside a shard"
    assert outcomes["else"] == []
    return outcomes


def test_forged_numbers_never_crash_a_reader(path: Path) -> None:
    outcomes = campaign(path, 3, 60)
    assert outcomes["refused"] > 20
    assert outcomes["read"] > 10


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", list(FORMATS))
def test_forged_numbers_never_crash_a_reader_in_a_long_campaign(tmp_path: Path, form: str) -> None:
    outcomes = campaign(store_with_log(tmp_path, form), 11, 4000)
    assert min(outcomes["refused"], outcomes["read"]) > 500


def _zeros(nbytes: int) -> str:
    """Return ``nbytes`` zero bytes as a packed array, compressed as far as deflate can."""
    return base64.b64encode(zlib.compress(bytes(nbytes), 9)).decode()


def _refused_before_unpacking(call: Any, match: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(errors.CorruptStoreError, match=match):
            call()
        assert tracemalloc.get_traced_memory()[1] < 32 << 20, "with what other threads of the process take meanwhile"
    finally:
        tracemalloc.stop()


def test_an_index_that_claims_more_entries_than_fit_is_refused_before_it_is_unpacked() -> None:
    rows = 10**7
    data = {nbytes: _zeros(rows * nbytes) for nbytes in (8, 16)}
    columns = {
        name: {"dtype": np.dtype(dtype).str, "shape": [rows], "data": data[16 if name == "uuid" else 8]}
        for name, dtype in COLUMNS.items()
    }
    value = {"columns": columns, "facts": {}, "weights": StringTable().to_json()}
    _refused_before_unpacking(lambda: index_from_json(value, 1), "claims 10000000 entries")
    columns["steps"]["shape"] = [3]
    _refused_before_unpacking(lambda: index_from_json(value, 1), "index column steps has 3 entries, not 10000000")


def test_a_string_table_that_claims_more_than_fits_is_refused_before_it_is_unpacked() -> None:
    rows = 5 * 10**7
    text = {"dtype": "|V1", "shape": [rows], "data": _zeros(rows)}
    ends = {"dtype": "<i8", "shape": [rows], "data": _zeros(8 * rows)}
    _refused_before_unpacking(lambda: StringTable.from_json({"bytes": text, "ends": ends}), "more text than")
    few = array_to_json(np.frombuffer(b"abc", "V1"))
    _refused_before_unpacking(lambda: StringTable.from_json({"bytes": few, "ends": ends}), "more strings than")


def test_shards_without_trajectories_are_refused_before_they_are_unpacked(path: Path) -> None:
    rows = 10**7
    with forged_index(path) as value:
        value["shards"]["numbers"] = {"dtype": "<i8", "shape": [rows], "data": _zeros(8 * rows)}
    _refused_before_unpacking(lambda: TrajectoryReplayBuffer().load_checkpoint(path), "more shards than trajectories")
    table: dict[str, Any] = {"schemas": [], "families": [], "numbers": value["shards"]["numbers"]}
    table |= dict.fromkeys(("family", "row"), array_to_json(np.zeros(1, np.int32)))
    _refused_before_unpacking(lambda: ShardTable.from_json(table), "different lengths")


def test_as_many_ranges_as_one_likes_cost_what_they_are_long(path: Path) -> None:
    ranges = [[3 * n + 10, 3 * n + 11] for n in range(100_000)] + [[0, 1]]
    with forged_log(path) as records:
        records.append({"generation": records[-1]["generation"] + 1, "operation": "evict", "ids": ranges})
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(path)
    assert buffer.trajectory_ids.tolist() == [2, 3, 4, 5, 6]
    assert verify(path).sound


# -- values of the wrong kind, with valid checksums --------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"versions": value}
            for value in ([None], [[1], [2]], [[1, 2, 3], [1, 2]], ["ab", "cd"], [[1.5, 2], None], 7)
        ),
        *({"weights": value} for value in ([None, 3], ["a"], [[], []], "ab")),
        *({"max_episode_length": value} for value in ([1], [1.5, 2], ["1", "2"], [None, None], [2**63, 1], {})),
        *(
            {"extents": value}
            for value in ([[1, 1, 0], [1, 1, 0]], [[1, 1, 0, 0]], [], [[2**64 - 1, 1, 0, 0]] * 2, None)
        ),
        *({"uuids": value} for value in ("00", "zz" * 32, "00" * 16, None)),
        *({"ids": value} for value in (None, 3, [[4]], [[4.5, 5.5]], [[5, 4]], [["4", "5"]], [[4, 2**63 - 1]])),
        *({"ids": value} for value in ([[4, 1 << 60]], [[4, 4]], [[4, 6]], [])),  # not one id per trajectory
    ],
    ids=str,
)
def test_entries_of_the_log_of_the_wrong_kind(path: Path, change: dict[str, Any]) -> None:
    with forged_log(path) as (record, *_):
        record["shards"][0]["entries"].update(change)
    with pytest.raises(errors.CorruptStoreError, match=rf"\.log: generation {record['generation']}: "):
        TrajectoryReplayBuffer().load_checkpoint(path)
    assert not verify(path).sound


def test_shards_without_files(tmp_path: Path) -> None:
    path = store_with_log(tmp_path, "pkl")
    with forged_log(path) as (record, *_):
        record["shards"][0]["shard"]["files"] = []
    refused_to_all(path, errors.CorruptStoreError, r"\.log: generation \d+: not a shard's description: it has no files")
    with forged_index(path) as value:
        value["shards"]["families"][0]["file_names"] = []
    refused_to_all(path, errors.CorruptStoreError, r"trajectory_index\.json.*shards without files")
    assert not verify(path).sound


@pytest.mark.parametrize(
    ("name", "value"),
    [("next_id", 2**64 - 1), ("next_id", 2**62), ("next_shard", 2**63 - 1), ("generation", 10**16), ("next_id", 1.5)],
)
def test_counters_that_leave_no_room(path: Path, name: str, value: Any) -> None:
    with forged_index(path) as body:
        body[name] = value
    refused_to_all(path, errors.CorruptStoreError, r"trajectory_index\.json")


def test_a_log_file_named_with_digits_that_are_no_ascii(path: Path) -> None:
    (path / "log" / ("\N{SUPERSCRIPT TWO}" * 16 + ".log")).write_bytes(b"x")
    assert TrajectoryReplayBuffer().load_checkpoint(path) == 0
    assert verify(path).sound
