"""The driver that is killed: a real training, with notes of what it does and of what it was promised.

The trainer is observed, not changed: methods of this one object are wrapped in ones that write a line and call
the original.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from tests.verl_plugin.assets import Assets, make_assets
from tests.verl_plugin.harness import VerlSession, make_config
from tests.verl_plugin.runs import REPLAY
from tools.crash.journal import Journal
from tools.crash.verl.digest import digest
from tools.crash.verl.layout import ASSETS, SAVE_EVERY, calls_path, journal_path
from trainer_hooks.verl.arrival import recorded_rollouts
from trajstore import TrajectoryReplayBuffer
from trajstore._core.buffer.reader import Reader

NEVER = 1_000_000
"""Steps and epochs of a training that ends by being killed."""
OVERRIDES = (
    *REPLAY,
    f"trainer.total_training_steps={NEVER}",
    f"trainer.total_epochs={NEVER}",
    f"trainer.save_freq={SAVE_EVERY}",
    "trainer.resume_mode=auto",
)
CALLS = "TRAJSTORE_VERL_CALLS"
"""Environment variable of the agent loop, with the path of the calls."""
_LOOK_EVERY = 0.02  # seconds


def main(folder: Path, life: int) -> None:
    """Train in ``folder`` until killed."""
    assets = _assets(folder / ASSETS)
    loop = folder / "loop.yaml"
    loop.write_text("- name: seeds\n  _target_: trajstore_verl_cpu_sessions.SessionSeeds\n", encoding="utf-8")
    os.environ[CALLS] = str(calls_path(folder, life))  # inherited by Ray's workers
    session = VerlSession.start()
    journal = Journal(journal_path(folder, life))
    overrides = (
        *OVERRIDES,
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loop}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeds",
    )
    session.run(make_config(assets, folder, overrides), prepare=partial(observe, journal=journal))


def _assets(folder: Path) -> Assets:
    if not folder.exists():
        return make_assets(folder)
    return Assets(folder / "model", folder / "train.parquet", folder / "val.parquet", folder / "reward.py")


def observe(trainer: Any, journal: Journal) -> None:
    """Let a trainer that was not initialised yet write into a journal.

    ``loaded``: where it resumed. ``phase``: what begins, or is done, in which step. ``arrived``: rollouts that were
    committed. ``acknowledged``: those whose training was committed too. ``pooled``: what the pool held when everything
    up to there was committed.

    Args:
        trainer: of verl.
        journal: to write into.
    """

    def phase(name: str) -> None:
        journal.note("phase", name=name, step=trainer.global_steps)

    def loaded() -> None:
        session = trainer._session
        acknowledgements = _Acknowledgements(session, journal)
        journal.note("loaded", step=trainer.global_steps, run=session._run, **_pool(session.hook.manager))
        _wrap(session, "save", after=partial(phase, "cut"))
        threading.Thread(target=acknowledgements.run, daemon=True).start()

    _wrap(trainer, "_load_checkpoint", after=loaded)
    _wrap(trainer, "on_sample_begin", before=partial(phase, "generation"))
    _wrap(trainer, "_compute_old_log_prob", before=partial(phase, "scoring"))
    _wrap(trainer, "_update_actor", before=partial(phase, "update"))
    _wrap(trainer, "_save_checkpoint", before=partial(phase, "saving"), after=partial(phase, "saved"))
    _wrap(trainer, "on_step_end", before=partial(phase, "trained"))


def _wrap(
    thing: Any, name: str, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Call ``before`` and ``after`` around a method of one object."""
    original = getattr(thing, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before()
        result = original(*arguments, **named)
        if after is not None:
            after()
        return result

    setattr(thing, name, wrapped)


def _pool(manager: Any) -> dict[str, Any]:
    """Return the state of the pool as JSON has it, and what its trajectories are."""
    entries = {task: [entry.trajectory_id for entry in held] for task, held in manager._state.entries.items()}
    document = {**manager._ledger.document(), "entries": entries}
    state = orjson.loads(orjson.dumps(document, option=orjson.OPT_NON_STR_KEYS))
    held = {task: [[one.rollout_id, digest(one)] for one in all_] for task, all_ in manager.task2trajectories.items()}
    return {"pool": state, "held": held}


class _Acknowledgements:
    """Notes what was committed: rollouts on arrival, and with the record of training; the pool at the end of a step."""

    def __init__(self, session: Any, journal: Journal) -> None:
        self._journal = journal
        self._hook = session.hook
        self._path = session._block.recording_path
        self._arrived: set[int] = set()
        self._noted: set[int] = set()
        _wrap(session.hook, "rollouts_done", after=self._note_pool)

    def _note_pool(self) -> None:
        entries = self._hook.manager._state.entries
        ids = {task: [entry.trajectory_id for entry in held] for task, held in entries.items()}
        self._journal.note("pooled", entries=ids)

    def run(self) -> None:
        """Look until the process ends."""
        with TrajectoryReplayBuffer.open(self._path) as rollouts:
            self._arrived |= set(rollouts.trajectory_ids.tolist())  # of earlier drivers
            self._noted |= self._arrived
            while True:
                rollouts.refresh()
                if durable := self._durable(rollouts):
                    self._journal.note("acknowledged", rollouts=durable)
                time.sleep(_LOOK_EVERY)

    def _durable(self, rollouts: Reader) -> dict[str, list[str]]:
        """Note rollouts that arrived; return those whose training is recorded."""
        new = [number for number in rollouts.trajectory_ids.tolist() if number not in self._noted]
        found = dict(zip(new, recorded_rollouts(rollouts, new), strict=True))
        if arrived := {str(number): one.rollout_id for number, one in found.items() if number not in self._arrived}:
            self._arrived |= found.keys()
            self._journal.note("arrived", rollouts=arrived)
        trained = {number: one for number, one in found.items() if one.metadata.get("trained")}
        self._noted |= trained.keys()
        return {str(number): [one.rollout_id, digest(one)] for number, one in trained.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
