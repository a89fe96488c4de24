"""A training run that is killed: run by the tests as a program of its own.

``killed_run.py FOLDER in-step`` kills itself between the rollouts and the update of a step; ``run`` trains
until it is killed; ``files`` writes the pool as files and a checkpoint every second step, and kills itself after the
fifth. After every step, ``FOLDER/flushed.json`` says what the pool held when it was flushed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.reference.runs import SORT, environment, replay, summary
from trainer_hooks.reference.checkpoint import save_checkpoint
from trainer_hooks.reference.trainer import ReferenceTrainer


def main(folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    options = replay(store={"path": str(folder / "pool")}, experience_rbound=None)
    if mode == "files":
        options = replay(pool_path=str(folder / "experience_pool"), pool_save_freq=2, experience_rbound=None)
    config = replace(SORT, steps=10_000, replay=options)
    trainer = ReferenceTrainer(config, environment(config))
    trainer.warm_start()
    manager = trainer.hook.manager
    assert manager is not None

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
    main(Path(sys.argv[1]), sys.argv[2])
