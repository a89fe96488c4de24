"""The simulator: its runs are sound, a seed repeats a run, and it finds known faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.faults import FAULTS, Fault

RUNS = 10
FOUND_EARLY = (
    *("files are not synced", "the name of a log segment is not synced", "flush returns one commit early"),
    "a writer does not wait for a tool",
)


def simulated(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process without threads, from which runs are forked."""
    command = [sys.executable, "-m", "tools.simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)


def test_no_promise_is_broken() -> None:
    done = simulated("--seed", "0", "--runs", str(RUNS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{RUNS} runs" in done.stdout


def test_a_seed_repeats_a_run_step_by_step() -> None:
    """Ten runs of each seed, more at a time than there are cores, in two processes whose addresses differ."""
    command = ("--seed", "103", "--runs", "3", "--repeat", "5", "--jobs", "5", "--json")
    first, second = (json.loads(simulated(*command).stdout) for _ in range(2))
    assert not first["failed"]
    assert first["runs"] == 15
    assert first["digests"] == second["digests"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_known_fault_is_in_the_store(fault: Fault) -> None:
    assert fault.wrong in fault.source()


@pytest.mark.parametrize("name", FOUND_EARLY)
def test_a_known_fault_is_found(name: str) -> None:
    done = simulated("--seed", "0", "--runs", "200", "--fault", name, "--until-failure", "--json")
    (report,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert report["failed"], name


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_known_fault_is_found(fault: Fault) -> None:
    done = simulated("--seed", "20000", "--runs", "2000", "--fault", fault.name, "--until-failure", "--json")
    (report,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert report["failed"]
