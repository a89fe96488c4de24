"""The guides' complete programs give the same result when they are killed again and again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import programs
from tests.pages import blocks

_DRIVER = '''
import json, os, signal, sys
from pathlib import Path

import torch._dynamo  # an optimizer imports it: here once for all processes

from trainer_hooks.hook import ReplayHook
from trajstore import TrajectoryReplayBuffer
from trajstore.points import Points


def replacing(source, target):
    return Path(target).name == "model.pt"


CALLS = {
    "add": (TrajectoryReplayBuffer, "add_trajectories", lambda *_: True),
    "save": (Points, "save", lambda *_: True),
    "replace": (os, "replace", replacing),
    "step": (ReplayHook, "step_done", lambda *_: True),
}


def die_at(name, count, when):
    owner, attribute, counts = CALLS[name]
    genuine, seen = getattr(owner, attribute), [0]

    def call(*arguments, **options):
        seen[0] += counts(*arguments)
        if seen[0] == count and when == "before" and counts(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        result = genuine(*arguments, **options)
        if seen[0] == count and counts(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, call)


def life(program, name, where, steps, kill):
    """Run a program in a process of its own; return how it ended."""
    pid = os.fork()
    if not pid:
        try:
            if kill:
                die_at(*kill)
            result = program[name](Path(where), steps)
            Path(where, "result.json").write_text(json.dumps(result))
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


ends = []
for code, name, folder, steps, kills in json.loads(Path(sys.argv[1]).read_text()):
    program = {"__name__": "program"}
    exec(compile(code, name, "exec"), program)
    for where, deaths in (("whole", []), ("killed", kills)):
        os.makedirs(f"{folder}/{where}")
        ends.append([life(program, name, f"{folder}/{where}", steps, kill) for kill in [*deaths, None]])
json.dump(ends, sys.stdout)
'''


PROGRAMS = {
    # by function of the guide: its page, the number of steps, and the kills
    "train_with_loader": (
        "resume.md",
        40,
        [
            ("add", 1, "after"),  # trajectories added, no point saved
            ("replace", 1, "before"),  # point 0 without its model
            ("add", 8, "before"),  # within the first ten steps
            ("replace", 2, "before"),  # point 20 without its model: back to 10
            ("save", 2, "before"),  # back to 20
            ("replace", 1, "after"),  # step 30 is complete
            ("add", 3, "before"),
        ],
    ),
    "train_agents": (
        "agents.md",
        20,
        [
            ("replace", 1, "before"),  # point 0 without its model and pool
            ("add", 1, "after"),  # rollouts of step 1, not trained on yet
            ("add", 7, "before"),  # the pool has successes, but only the checkpoint of step 0 exists
            ("replace", 2, "before"),  # point 10 without its model: back to 5
            ("step", 3, "before"),  # steps 6 and 7 are in the pool; the rollouts of 8 are only in the store
            ("save", 2, "before"),  # back to 10
            ("replace", 1, "after"),  # step 15 is complete
        ],
    ),
}


@pytest.mark.parametrize("deaths", [1, pytest.param(7, marks=pytest.mark.campaign)])
def test_programs_survive_kills(project_root: Path, tmp_path: Path, deaths: int) -> None:
    """One process forks all runs, because imports take longer than the runs; one death needs half the steps."""
    given = []
    for name, (page, steps, kills) in PROGRAMS.items():
        text = (project_root / "docs" / "howto" / page).read_text()
        [code] = [block for block in blocks(text, "python") if f"def {name}" in block]
        given.append([code, name, str(tmp_path / name), steps if deaths > 1 else steps // 2, kills[:deaths]])
    (tmp_path / "given.json").write_text(json.dumps(given))
    done = programs.run(tmp_path, _DRIVER, tmp_path / "given.json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0], [*[-9] * deaths, 0]] * 2, done.stderr
    for name in PROGRAMS:
        whole, killed = (
            json.loads((tmp_path / name / part / "result.json").read_text()) for part in ("whole", "killed")
        )
        assert killed == whole, name
    assert "stay on disk" not in done.stderr
