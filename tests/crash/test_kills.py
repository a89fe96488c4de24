"""A short campaign of SIGKILLs; the long one is behind the slow marker. See docs/crash-testing.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.crash.campaign import run_campaign
from tools.crash.forked import forking
from tools.crash.journal import KEEP, Journal, Promises, read_journal


def test_nothing_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, kills=12, seed=5)
    assert result.problems == []
    assert result.counts["kills"] == 12
    assert result.counts["promises checked"] > 25


def _kernels_not_called() -> None:
    import numba

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


def _after_warming() -> None:
    import tools.crash.warm  # noqa: F401

    _kernels_not_called()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_lost_in_a_long_campaign(tmp_path: Path) -> None:
    result = run_campaign(tmp_path, kills=200, seed=6)
    assert result.problems == []
    assert result.counts["promises checked"] > 1000


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
