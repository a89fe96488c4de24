"""Training runs that are killed: run by the tests as a program of its own, ``killed_run.py FOLDER``.

Each run has a process, forked where everything is loaded, and a folder of its name: ``in-step`` kills itself between
the rollouts and the update of a step; ``run`` is killed at any moment; ``files`` writes the pool as files and a
checkpoint every second step, and kills itself after the fifth. After every step, ``flushed.json`` says what the pool
held when it was flushed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.reference.runs import SORT, environment, replay, summary
from trainer_hooks.reference.checkpoint import save_checkpoint
from trainer_hooks.reference.trainer import ReferenceTrainer


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with ReferenceTrainer(SORT, environment(SORT)) as trainer:
        trainer.warm_start()
        started = trainer.model.state_dict()
    for mode in ("in-step", "run", "files"):
        (folder / mode).mkdir()
        pid = os.fork()
        if not pid:
            try:
                train(folder / mode, mode, started)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            os._exit(1)
        if mode == "run":
            kill_later(pid, folder / mode / "flushed.json")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            sys.exit(f"{mode}: the process ended by itself with {code}")


def kill_later(pid: int, flushed: Path) -> None:
    """Kill a process some time after its pool was flushed first."""
    while not flushed.exists():
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.01)
    time.sleep(0.137)
    os.kill(pid, signal.SIGKILL)


def train(folder: Path, mode: str, started: dict[str, Any]) -> None:
    """Train as the mode says until killed."""
    options = replay(store={"path": str(folder / "pool")}, experience_rbound=None)
    if mode == "files":
        options = replay(pool_path=str(folder / "experience_pool"), pool_save_freq=2, experience_rbound=None)
    config = replace(SORT, steps=10_000, replay=options)
    trainer = ReferenceTrainer(config, environment(config))
    trainer.model.load_state_dict(started)
    manager = trainer.hook.manager

    def note_flushed(_: Any) -> None:
        trainer.hook.flush()
        if not len(manager):
            return
        text = json.dumps({"step": trainer.step, "pool": summary(manager)})
        (folder / "flushed.tmp").write_text(text)
        os.replace(folder / "flushed.tmp", folder / "flushed.json")
        if mode == "in-step" and trainer.step >= 4:
            setattr(trainer.hook, "log_probs_computed", kill)  # noqa: B010 - mypy sees no assignment to a method

    def note_files(_: Any) -> None:
        if trainer.step % 2 == 0:
            save_checkpoint(trainer, folder / "checkpoints")
        if trainer.step == 5:
            kill()

    def kill(*_: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    trainer.train(after_step=note_files if mode == "files" else note_flushed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
