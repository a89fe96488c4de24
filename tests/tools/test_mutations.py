"""A short campaign of damaged directories, and its detection of faults. See docs/crash-testing.md."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.witness import witness
from tools.mutate import pickles, worker
from tools.mutate.campaign import run_campaign
from tools.mutate.pristine import KINDS, Kind, build, files_of, kinds_of
from tools.mutate.probe import Report, probe
from tools.mutate.rules import Files, Level, weigh
from trajstore import TrajectoryReplayBuffer
from trajstore.operations.verification import Verification
from trajstore.trajectory import AnyTrajectory

STORE, RLINF = kinds_of("store_pt")[0], kinds_of("rlinf_pt")[0]


def test_damage_is_reported_or_without_effect(tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if kind.name not in ("store_zstd", "closed_zarr")]  # slow, like Zarr
    result = run_campaign(tmp_path, kinds, 10, seed=1)
    assert result.problems == []
    assert result.counts["mutations"] == 10
    assert 3 < sum(count for what, count in result.counts.items() if what.endswith("reported by verify")) < 10
    levels = {what.partition(":")[0] for what in result.counts}
    assert levels >= {Level.DAMAGE.value, Level.FORGED.value, Level.NOTHING.value}


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_damage_is_reported_or_without_effect_in_a_long_campaign(tmp_path: Path) -> None:
    assert run_campaign(tmp_path, KINDS, 5000, seed=5).problems == []


# -- the campaign detects faults: one by default, the others in the long campaign --------------------


def _troubles(tmp_path: Path, kind: Kind, look: Callable[[Path, Kind], Report] = probe, mutations: int = 12) -> str:
    return "\n".join(run_campaign(tmp_path, [kind], mutations, seed=1, probe=look).problems)


def test_a_verify_that_finds_nothing_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.mutate.probe.verify", lambda path: Verification(str(path), "store"))
    assert "verify finds nothing" in _troubles(tmp_path, STORE, mutations=3)


@pytest.mark.campaign
def test_a_verify_that_overlooks_payload_without_checksum_of_the_index_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.mutate.probe.verify", lambda path: Verification(str(path), "rlinf"))
    assert "differs, but verify finds nothing: trajectory" in _troubles(tmp_path, RLINF)


@pytest.mark.campaign
def test_an_error_of_another_kind_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrajectoryReplayBuffer.load_checkpoint

    def crude(self: TrajectoryReplayBuffer, path: Path, *args: object, **options: object) -> int:
        try:
            return honest(self, path, **options)  # type: ignore[arg-type]
        except Exception as error:
            if options.get("pin"):  # pins of truncated commits are refused in the undamaged directory, too
                raise
            raise ValueError(str(error)) from error

    monkeypatch.setattr(TrajectoryReplayBuffer, "load_checkpoint", crude)
    assert "load_checkpoint raised ValueError" in _troubles(tmp_path, STORE)


@pytest.mark.campaign
def test_wrong_values_in_files_that_were_not_touched_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrajectoryReplayBuffer.get
    pristine = {"now": True}

    def spoilt(self: TrajectoryReplayBuffer, number: int) -> AnyTrajectory:
        return honest(self, number) if pristine["now"] else witness(1000)

    def later(path: Path, kind: Kind) -> Report:
        pristine["now"] = "above" not in path.parts
        return probe(path, kind)

    monkeypatch.setattr(TrajectoryReplayBuffer, "get", spoilt)
    assert "in unchanged files, but served differently: trajectory" in _troubles(tmp_path, STORE, later)


@pytest.mark.campaign
def test_a_writer_that_loses_trajectories_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(path: Path) -> TrajectoryReplayBuffer:
        buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, sample_window_size=0)
        if "above" in path.parts and len(buffer):
            buffer.evict([int(buffer.trajectory_ids[0])])
        return buffer

    monkeypatch.setattr("tools.mutate.probe._writer", careless)
    assert "lost by a writer that continued: trajectory" in _troubles(tmp_path, STORE)


def test_a_reader_that_hangs_is_seen_and_replaced(tmp_path: Path) -> None:
    build(RLINF, tmp_path / "whole")
    readers = worker.Worker()
    try:
        readers.patience = 600.0  # a busy machine takes its time
        assert readers.probe(tmp_path / "whole", RLINF).problems == []
        os.kill(readers.pid, signal.SIGSTOP)
        readers.patience = 0.0
        assert readers.probe(tmp_path / "whole", RLINF).problems == ["the process has not come to an end in 0 s"]
        readers.patience = 600.0
        assert readers.probe(tmp_path / "whole", RLINF).problems == []
    finally:
        readers.close()


@pytest.mark.campaign
def test_a_reader_that_needs_much_memory_is_seen(tmp_path: Path) -> None:
    build(RLINF, tmp_path / "large")
    (tmp_path / "large" / "metadata.json").write_bytes(b" " * (worker.GROWTH + (32 << 20)))
    readers = worker.Worker()
    readers.patience = 600.0  # a busy machine takes its time
    try:
        assert "memory grew" in str(readers.probe(tmp_path / "large", RLINF).problems)
    finally:
        readers.close()


def test_hostile_pickles_would_run_code(tmp_path: Path) -> None:
    """When unpickled, they leave a marker; otherwise its absence would prove nothing."""
    fired = 0
    for seed in range(40):
        canary = tmp_path / f"canary_{seed}"
        with suppress(Exception):  # most raise after running their code
            pickle.loads(pickles.code(canary, random.Random(seed)))
        fired += canary.exists()
    assert fired > 15


# -- which bytes matter ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    path = tmp_path_factory.mktemp("weigh") / "store"
    build(STORE, path)
    return files_of(path)


LOG = "log/0000000000000006.log"


@pytest.mark.parametrize(
    ("name", "change", "level", "records"),
    [
        ("writer.lock", lambda data: b"", Level.NOTHING, 0),
        ("readers/gone.pin", lambda data: None, Level.NOTHING, 0),
        ("metadata.json", lambda data: data + b"\n ", Level.NOTHING, 0),
        ("metadata.json", lambda data: data[:-1], Level.DAMAGE, 0),
        ("trajectory_index.json", lambda data: data + b" ", Level.DAMAGE, 0),
        ("shards/shard_00000001.pt", lambda data: data[:9] + b"?" + data[10:], Level.DAMAGE, 0),
        ("shards/shard_00000001.pt", lambda data: None, Level.DAMAGE, 0),
        ("pins/first.json", lambda data: None, Level.UNPINNED, 0),
        ("pins/first.json", lambda data: data[:-1], Level.DAMAGE, 0),
        (LOG, lambda data: data[:-1], Level.TAIL, 4),
        (LOG, lambda data: None, Level.DAMAGE, 0),  # a pin that was made later remains
        (LOG, lambda data: data + b"half a rec", Level.TAIL, 5),
        (LOG, lambda data: data + b"no record\n", Level.DAMAGE, 0),
        (LOG, lambda data: data + data.splitlines(keepends=True)[1], Level.NOTHING, 0),
        (LOG, lambda data: b"".join(data.splitlines(keepends=True)[1:]), Level.DAMAGE, 0),
        (LOG, lambda data: data.replace(b"evict", b"evinct"), Level.DAMAGE, 0),
    ],
)
def test_levels(
    store_files: Files, name: str, change: Callable[[bytes], bytes | None], level: Level, records: int
) -> None:
    changed = change(store_files[name])
    after = (
        {**store_files, name: changed} if changed is not None else {k: v for k, v in store_files.items() if k != name}
    )
    stakes = weigh(STORE, store_files, after, forged=False)
    assert stakes.level is level
    assert records == (stakes.records if level is Level.TAIL else 0)
