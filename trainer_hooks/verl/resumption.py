"""A run of verl that goes on: what a checkpoint says of recording and replay, and going back to it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer_hooks.hook import ReplayHook
from trainer_hooks.verl.config import SECTION, ReplayBlock
from trainer_hooks.verl.cuts import Cut, find_cut, restorable_cuts, write_cut
from trainer_hooks.verl.guided import GuidedRollouts
from trainer_hooks.verl.histories import Histories
from trainer_hooks.verl.recorder import RolloutRecorder
from trainer_hooks.verl.rows import asked_for, replayable
from trajstore.buffer.internals import internals_of
from trajstore.errors import StoreWriteError
from trajstore.experience.persistence import from_plain, to_plain
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """Checkpoints of a session, and going back to one.

    Attributes:
        block: the configuration.
        hook: of the session, as are the next three.
        histories: that wait for their prompts.
        guided: guided rollouts.
        recorder: of all rollouts; ``None`` = none are recorded.
        run: identifies this process.
        checkpoints: ``trainer.default_local_dir``.
        on_disk: calls what writes to the pool's store, as ``on_error`` says; returns None where that failed.
        judge: lets rollouts without log-probs, and how many each task was to make, say what they say of their tasks.
    """

    block: ReplayBlock
    hook: ReplayHook[str]
    histories: Histories
    guided: GuidedRollouts
    recorder: RolloutRecorder | None
    run: str
    checkpoints: Path
    on_disk: Callable[[Callable[[], Any]], Any]
    judge: Callable[[Sequence[AgentTrajectory], Mapping[str, int]], None]

    def save(self, folder: Path, step: int) -> None:
        """Write where recording and replay stand, for the checkpoint that is about to be written.

        Raises:
            StoreWriteError: it, or what it names, did not reach the disk.
        """
        rollouts, rollouts_store = -1, ""
        if self.recorder is not None:
            self.recorder.flush()
            buffer = self.recorder.buffer
            rollouts, rollouts_store = buffer.points.committed, str(internals_of(buffer).store_id)
        manager = self.hook.manager
        pool = None if manager is None else self.on_disk(manager.state_dict)
        expected = {uid: [to_plain(one) for one in held] for uid, held in self.histories.expected.items()}
        guidance, wanted = self.guided.state(), self.histories.wanted
        cut = Cut(step, self.run, rollouts, rollouts_store, pool, expected, guidance, wanted)
        self.on_disk(lambda: write_cut(folder, cut))

    def hold_checkpoints(self) -> None:
        """Keep in the pool's store what the checkpoints that verl can load now go back to, and nothing else."""
        manager = self.hook.manager
        if manager is not None:
            cuts = [cut.pool for cut in restorable_cuts(self.checkpoints) if cut.pool is not None]
            self.on_disk(lambda: manager.hold(cuts))

    def resume(self, folder: Path | None, step: int) -> None:
        """Go back to where the pool stood at a checkpoint. Rollouts recorded since then stay recorded.

        Where no checkpoint says so, the newest ``step_N`` of ``pool_path`` that is not after ``step`` is loaded;
        without one the pool is used as it lies in its store. With ``on_resume: keep``, rollouts recorded since enter
        the pool again; without a checkpoint, all that are recorded. With ``on_error: warn`` those that cannot be
        written are told of, and training goes on.

        Args:
            folder: the checkpoint; ``None`` = there is none yet.
            step: of the checkpoint.

        Raises:
            CorruptStoreError: the checkpoint's cut is damaged.
            ConfigurationError: it is of another tokenizer.
            StoreWriteError: the pool's store could not write; the message names the option.
        """
        if self.guided.is_on and folder is not None and (found := find_cut(folder, step)) is not None:
            self.guided.load_state(found.guidance)
        if self.hook.manager is None:
            return
        keeps = self.block.on_resume == "keep"
        try:
            cut = self._go_back(folder, step)
            if keeps:
                self._take_in_since(cut)
        except StoreWriteError as error:
            wanted = "and takes in the rollouts recorded since" if keeps else ", no more"
            error.add_note(
                f"{SECTION}.on_resume: {self.block.on_resume}: the pool goes back to the checkpoint {wanted}; it could"
                " not write that down. Make room where its store is and resume again: nothing recorded is lost"
            )
            raise

    def _go_back(self, folder: Path | None, step: int) -> Cut | None:
        """Put the pool to where it stood at a checkpoint; return the checkpoint's cut."""
        cut = None if folder is None else find_cut(folder, step)
        if cut is not None and cut.pool is not None:
            if cut.step != step:
                logger.warning("%s says nothing of the experience pool; it goes back to step %d", folder, cut.step)
            self.hook.load_state_dict(cut.pool)
            if cut.step == step:
                self.histories.expected = {uid: tuple(map(from_plain, held)) for uid, held in cut.expected.items()}
                self.histories.wanted = dict(cut.wanted)
        else:
            if folder is not None:
                logger.warning("%s says nothing of the experience pool", folder)
            self.hook.resume(None, step)
        return cut

    def _take_in_since(self, cut: Cut | None) -> None:
        """Let rollouts that were recorded after a checkpoint, or at all, enter the pool, step by step."""
        if self.recorder is None or (
            cut is not None and internals_of(self.recorder.buffer).store_id != cut.rollouts_store
        ):
            logger.warning("the rollouts recorded since the checkpoint are not in this run's store; none were taken in")
            return
        steps = 0
        # One process after another wrote there, each its steps in their order.
        recorded = self.recorder.recorded_after(-1 if cut is None else cut.rollouts)
        for _, made in itertools.groupby(recorded, lambda one: (one.metadata.get("run"), one.policy_version)):
            found = replayable(made)
            trained = [one for one in found if one.metadata.get("trained", True)]
            self.judge([one for one in found if not one.metadata.get("trained", True)], {})
            self.on_disk(partial(self.hook.admit, trained, asked_for(trained)))
            steps += 1
        if steps:
            logger.info("experience pool: on_resume=keep: took in %d steps recorded since", steps)
