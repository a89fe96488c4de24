"""``GuidedRollouts``: guidance of one training run, in the trainer's process."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from trainer_hooks.guidance import LocalMaker
from trainer_hooks.guidance.hook import GuidanceHook
from trainer_hooks.verl import dataplane
from trainer_hooks.verl.asking import Asking, Troubles
from trainer_hooks.verl.config import ReplayBlock, naming
from trainer_hooks.verl.offers import is_exchanged
from trainer_hooks.verl.rows import NOT_GUIDED
from trainer_hooks.verl.validations import ValidationRollouts
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

WHY = {
    "too_long": "with experience in it the prompt is longer than data.max_prompt_length; raise it, or lower"
    " experience_maker.retrieve_top_k",
    "not_taken_out": "the agent loop does not make its prompt's tokens by ct_build_initial_tokens of the messages that"
    " it is given, so experience could not be taken out again; the rollouts were made a second time without. Set"
    " exp_manager.train_sample_expmode=allkeep, or let the loop do so",
    "not_seen": "the agent loop makes its prompt of something else than the messages that it is given (raw_prompt)",
}


class GuidedRollouts:
    """Guidance of one training run, in the trainer's process. Not thread-safe.

    Args:
        block: the configuration; without guidance all methods return their input.
        tokenizer: tokenizer of the run.

    Raises:
        StoreLockedError: another process writes to the experience store.
    """

    def __init__(self, block: ReplayBlock, tokenizer: Any = None) -> None:
        config = block.guidance
        self.is_on = config.is_on
        """True if rollouts are guided or become experience."""
        self._block = block
        with naming("experience_maker.store.path", (config.store or {}).get("path")):
            self._hook = GuidanceHook(config, tokenizer=tokenizer)
        self._troubles = Troubles()
        self._asking = Asking(block, self._hook, self._troubles)
        self.validations = ValidationRollouts(config, self._hook)
        self._untrained: list[AgentTrajectory] = []
        maker = self._hook.maker
        if isinstance(maker, LocalMaker) and not len(maker) and not config.enable_summarizer:
            logger.warning(
                "guidance: nothing will be shown: there are no experiences in experience_maker.store.path, and with"
                " enable_summarizer=false there never will be"
            )

    def offered(self, prompts: TensorDict) -> TensorDict:
        """Return prompts with the experience for their rollouts attached; see ``Asking.offered``."""
        return self._asking.offered(prompts)

    def exchanged(self, batch: KVBatchMeta) -> frozenset[str]:
        """Return the keys of guided rows whose experience was removed from the prompt after sampling."""
        if not self._block.discards_experience:
            return frozenset()
        rows = dataplane.read_rows(batch, ("extra_fields",))
        return frozenset(row.key for row in rows if is_exchanged(row.columns["extra_fields"]))

    def finished(self, made: Sequence[AgentTrajectory], *, trained: bool = True) -> None:
        """Count why rollouts were not guided.

        Args:
            made: rollouts with complete messages.
            trained: False for rollouts that only become experience.
        """
        for rollout in made:
            if why := rollout.metadata.get(NOT_GUIDED):
                self._troubles.add(str(why), 1, WHY.get(str(why), ""))
        if self.is_on and not trained:
            self._untrained += made

    def step_done(self, made: Sequence[AgentTrajectory], step: int) -> dict[str, float]:
        """Submit rollouts, including those of dropped groups, as experience; return metrics. Does not block."""
        if not self.is_on:
            return {}
        held, self._untrained = [*made, *self._untrained], []
        figures = self._hook.step_done(held, step)
        return figures | {f"guidance/rollouts/{name}": float(self._troubles.counts[name]) for name in (*WHY, "late")}

    def state(self) -> str | None:
        """Return the state of the random choices; ``None`` without guidance."""
        return json.dumps(self._hook.state_dict()) if self.is_on else None

    def load_state(self, state: str | None) -> None:
        """Restore a state of :meth:`state`. The experiences are not changed."""
        if self.is_on and state is not None:
            self._hook.load_state_dict(json.loads(state))

    def close(self) -> None:
        """Wait briefly for running summaries, log the unfinished ones, close the store. Idempotent."""
        self._asking.close()
        self._hook.close()
