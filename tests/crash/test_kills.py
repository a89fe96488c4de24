"""Short campaigns of kills, freezes and lost nodes; long ones are behind the slow marker. See docs/crash-testing.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.crash.campaign import run_campaign
from tools.crash.forked import forking
from tools.crash.frozen.campaign import run_campaign as freeze
from tools.crash.journal import KEEP, Journal, Promises, read_journal
from tools.crash.node.campaign import run as lose_nodes
from tools.crash.node.campaign import s3
from tools.crash.resume.campaign import MOMENTS
from tools.crash.resume.campaign import run_campaign as kill_around_checkpoints

LONG = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("kills", "promises"), [(12, 25), pytest.param(200, 1000, marks=LONG)])
def test_nothing_is_lost_when_the_writer_is_killed(tmp_path: Path, kills: int, promises: int) -> None:
    result = run_campaign(tmp_path, kills=kills, seed=5)
    assert result.problems == []
    assert result.counts["kills"] == kills
    assert result.counts["promises checked"] > promises


def _after_warming() -> None:
    import numba

    import tools.crash.warm  # noqa: F401
    from trajstore import _kernels
    from trajstore.sampling import _tree_kernels

    found = [
        name
        for module in (_kernels, _tree_kernels)
        for name, kernel in vars(module).items()
        if isinstance(kernel, numba.core.dispatcher.Dispatcher) and not kernel.signatures
    ]
    sys.exit(f"add to tools/crash/warm.py: {', '.join(found)}" if found else 0)


def test_children_load_no_kernel() -> None:
    """A kernel that is loaded only in a child counts as memory and calls of what the child looks at."""
    child = forking().Process(target=_after_warming)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_loss_is_seen(tmp_path: Path) -> None:
    """The campaign itself: a trajectory that was promised and is absent must not pass for evicted."""
    journal = Journal(tmp_path / "journal")
    journal.note("flushed", keys={"0": 0, "1": 1, "2": 2})
    journal.note("evicting", ids=[1])
    journal.close()
    with (tmp_path / "journal").open("ab") as file:
        file.write(b'{"event": "flus')
    promises = read_journal(tmp_path / "journal", Promises())
    assert promises.flushed == {0: 0, 1: 1, 2: 2}
    assert not promises.gone_rightly(0, [2, 3])
    assert promises.gone_rightly(1, [2])
    assert promises.gone_rightly(0, range(2, KEEP + 1))
    assert not promises.gone_rightly(2, range(3, KEEP + 2))


# -- around the checkpoints of a loop --


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=LONG)])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, kills: int) -> None:
    result = kill_around_checkpoints(tmp_path, kills=kills, seed=2)
    assert result.problems == []
    assert result.counts["kills"] == kills
    assert result.counts["steps compared"] > 0
    assert kills < 100 or all(result.counts[f"killed {moment}"] for moment in MOMENTS)


# -- a node is lost with its disk, and its store is made anew of the mirror --


def test_nothing_on_the_mirror_is_lost_with_the_node(tmp_path: Path) -> None:
    result = lose_nodes(tmp_path, str(tmp_path / "mirrors"), {}, rounds=3, seed=3)
    assert result.problems == []
    assert result.counts["nodes lost"] == 3
    assert result.counts["compared in all"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_on_a_mirror_in_s3_is_lost_in_a_long_campaign(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with s3() as (url, options):
        result = lose_nodes(tmp_path, url, options, rounds=60, seed=4)
    assert result.problems == []
    assert result.counts["nodes lost"] == 60


# -- writers that are frozen and lose their store --


@pytest.mark.parametrize("freezes", [1, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_a_frozen_writer_overwrites_nothing(tmp_path: Path, freezes: int) -> None:
    pytest.importorskip("s3fs", reason="needs s3fs, of the extra 's3'")
    pytest.importorskip("moto.server", reason="needs moto[server]")
    result = freeze(tmp_path, freezes, seed=7)
    assert result.problems == []
    assert result.counts["writers frozen"] == freezes
    assert result.counts["trajectories compared"] > freezes
