"""The simulator: its runs are sound, a seed repeats a run, and it finds known faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.faults import FAULTS, Fault

FOUND_EARLY = (
    *("files are not synced", "the name of a log segment is not synced", "flush returns one commit early"),
    "a writer does not wait for a tool",
)

FIND = """
import json, sys
import tools.crash.warm
from tests.simulation.faults import FAULTS
from tools.simulate.runs import outcomes

found = {}
for fault in FAULTS:
    if fault.name in sys.argv[1:]:
        seeds = outcomes(range(200), jobs=2, before=fault.put_in)
        found[fault.name] = next((outcome.seed for outcome in seeds if outcome.problem), None)
print(json.dumps(found))
"""


def simulated(*arguments: str, command: tuple[str, ...] = ("-m", "tools.simulate")) -> Any:
    """Run the command in a process without threads, from which runs are forked; return its JSON."""
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        env=os.environ | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_no_promise_is_broken_and_a_seed_repeats_a_run_step_by_step() -> None:
    """More at a time than there are cores, in two processes whose addresses differ."""
    command = ("--seed", "0", "--runs", "6", "--jobs", "3", "--json")
    first, second = (simulated(*command) for _ in range(2))
    assert first["failed"] == second["failed"] == []
    assert first["runs"] == 6
    assert first["digests"] == second["digests"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_known_fault_is_in_the_store(fault: Fault) -> None:
    assert fault.wrong in fault.source()


def test_known_faults_are_found() -> None:
    """One process finds all, as importing torch dominates."""
    found = simulated(*FOUND_EARLY, command=("-c", FIND))
    assert found.keys() == {*FOUND_EARLY}
    assert None not in found.values(), found


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_known_fault_is_found(fault: Fault) -> None:
    runs = ("--seed", "20000", "--runs", "2000", "--fault", fault.name)
    assert simulated(*runs, "--until-failure", "--json")["failed"]
