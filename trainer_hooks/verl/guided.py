"""``GuidedRollouts``: guidance of one training run, in the trainer's process."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from trainer_hooks.guidance import Guidance, LocalMaker, put_in
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
    """Guidance of one training run. Not thread-safe; the trainer's process owns it.

    Args:
        block: the configuration; with guidance switched off all calls hand back what they were given.
        tokenizer: of the run.

    Raises:
        StoreLockedError: another process writes to the store of experiences.
    """

    def __init__(self, block: ReplayBlock, tokenizer: Any = None) -> None:
        config = block.guidance
        self.is_on = config.is_on
        """Whether rollouts are guided, or become experience."""
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
        """Return prompts that are about to be rolled out, with what their rollouts are to be shown; see ``Asking``."""
        return self._asking.offered(prompts)

    def exchanged(self, batch: KVBatchMeta) -> frozenset[str]:
        """Return the keys of rows whose prompt is not the one that they were sampled with: guided, and discarded."""
        if not self._block.discards_experience:
            return frozenset()
        rows = dataplane.read_rows(batch, ("extra_fields",))
        return frozenset(row.key for row in rows if is_exchanged(row.columns["extra_fields"]))

    def finished(self, made: Sequence[AgentTrajectory], *, trained: bool = True) -> None:
        """Take a step's rollouts, whose messages are whole; put back into these what training keeps.

        Args:
            made: changed: messages as the model read them, where the experience was kept.
            trained: whether they are trained on; others only become experience.
        """
        for one in made:
            guidance = Guidance.of(one)
            if guidance is not None and not guidance.taken_out:
                one.messages = _put_back(one.messages, guidance)
            if why := one.metadata.get(NOT_GUIDED):
                self._troubles.add(str(why), 1, WHY.get(str(why), ""))
        if self.is_on and not trained:
            self._untrained += made

    def step_done(self, made: Sequence[AgentTrajectory], step: int) -> dict[str, float]:
        """Hand rollouts over to become experience, those of dropped groups too; return figures.

        Does not wait for the summaries.
        """
        if not self.is_on:
            return {}
        held, self._untrained = [*made, *self._untrained], []
        figures = self._hook.step_done(held, step)
        return figures | {f"guidance/rollouts/{name}": float(self._troubles.counts[name]) for name in (*WHY, "late")}

    def state(self) -> str | None:
        """Return the state of the random choices; ``None`` if there are none."""
        return json.dumps(self._hook.state_dict()) if self.is_on else None

    def load_state(self, state: str | None) -> None:
        """Go on from a state that :meth:`state` returned. What is known of experiences stays as it is."""
        if self.is_on and state is not None:
            self._hook.load_state_dict(json.loads(state))

    def close(self) -> None:
        """Wait a little for summaries under way, log what is left, give the store back. Again: nothing."""
        self._asking.close()
        self._hook.close()


def _put_back(messages: Sequence[Any], guidance: Guidance) -> list[dict[str, Any]]:
    changed = [dict(one) for one in messages]
    for one in guidance.insertions:
        if one.message < len(changed):
            changed[: one.message + 1] = put_in(changed[: one.message + 1], one.text)[0]
    return changed
