"""``GuidedRollouts``: what guidance does in the trainer's process, where experience is asked for, offered and judged.

Agent loops run in other processes, of which there are many; the store of experiences has one writer. So the trainer's
process asks, once for each prompt, and each prompt takes with it what its rollouts are to be shown
(:mod:`trainer_hooks.verl.offers`).
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from torch import Tensor
from transfer_queue import KVBatchMeta

from trainer_hooks.guidance import Guidance, LocalMaker, TrajExpConfig, put_in
from trainer_hooks.guidance.hook import GuidanceHook
from trainer_hooks.plan import PlannedTask
from trainer_hooks.verl import dataplane
from trainer_hooks.verl.config import ReplayBlock, naming
from trainer_hooks.verl.offers import GUIDED_LOOP, OFFER, Offer, is_exchanged
from trainer_hooks.verl.rows import NOT_GUIDED
from trainer_hooks.verl.tasks import task_name
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

ROLLOUTS_WANTED = "__rollout_n__"
"""Column of a prompt by which verl's agent loop learns how many rollouts to make of it."""

AT_ONCE = 16
"""Questions to a service at the same time."""

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
        self._asking: ThreadPoolExecutor | None = None
        if config.base_url is not None and config.enable_context_generator:
            self._asking = ThreadPoolExecutor(AT_ONCE, "guidance-retrieve")
        self._troubles: Counter[str] = Counter()
        self._untrained: list[AgentTrajectory] = []
        self._validations: list[AgentTrajectory] = []
        self._begun = not config.init_experience_before_training
        maker = self._hook.maker
        if isinstance(maker, LocalMaker) and not len(maker) and not config.enable_summarizer:
            logger.warning(
                "guidance: nothing will be shown: there are no experiences in experience_maker.store.path, and with"
                " enable_summarizer=false there never will be"
            )

    # ---- before the rollouts ----

    def offered(self, prompts: TensorDict) -> TensorDict:
        """Return prompts that are about to be rolled out, with what their rollouts are to be shown.

        Waits for a service, if one is asked, at most twice ``retrieve_timeout``; what is not there by then is
        not shown.

        Args:
            prompts: of a step, or of validation; not changed.

        Raises:
            ConfigurationError: they have no ``raw_prompt``.
        """
        if not self._block.guidance.enable_context_generator or not len(prompts):
            return prompts
        if "raw_prompt" not in prompts:
            raise ConfigurationError("experience_maker.enable_context_generator: true, but prompts have no raw_prompt")
        validates = "validate" in prompts and bool(prompts["validate"])
        usual = self._block.n_validation if validates else self._block.n_rollout
        counts = _column(prompts, ROLLOUTS_WANTED, usual)
        sources, indices = _column(prompts, "data_source", ""), _column(prompts, "index", "")
        tasks = [task_name(*names) for names in zip(sources, indices, strict=True)]
        plan = [PlannedTask(task, int(count), ()) for task, count in zip(tasks, counts, strict=True)]
        configs = iter(self._hook.before_rollout(plan, "validate" if validates else "sample"))
        rollouts = [[next(configs) for _ in range(one.fresh_rollouts)] for one in plan]
        wanted = {place: held for place, held in enumerate(rollouts) if any(one.add_exp for one in held)}
        messages = _column(prompts, "raw_prompt", ())
        found = self._ask({place: (list(messages[place]), held[0]) for place, held in wanted.items()})
        if not found:
            return prompts
        loops = _column(prompts, "agent_name", self._block.agent_loop)
        offers = [""] * len(prompts)
        for place, one in found.items():
            sessions = tuple(number for number, asked in enumerate(rollouts[place]) if asked.add_exp)
            offer = Offer(loops[place], sessions, one.train_mode, one.insertions[0], tuple(one.names))
            offers[place], loops[place] = offer.to_text(), GUIDED_LOOP
        result = prompts.copy()
        result["agent_name"] = NonTensorStack(*loops)
        result[OFFER] = NonTensorStack(*offers)  # on each of them: the data plane drops a column that one row lacks
        return result

    def _ask(self, questions: dict[int, tuple[list[Any], TrajExpConfig]]) -> dict[int, TrajExpConfig]:
        """Return for each prompt what was found for it; prompts for which nothing was are absent."""
        asked = {
            place: (messages, TrajExpConfig(add_exp=True, train_mode=one.train_mode, task_id=one.task_id))
            for place, (messages, one) in questions.items()
        }
        done = list(asked)
        if self._asking is None:
            for messages, config in asked.values():
                self._hook.context(messages, config)
        else:
            futures = {self._asking.submit(self._hook.context, *asked[place]): place for place in asked}
            finished, late = wait(futures, 2 * self._block.guidance.retrieve_timeout)
            for one in late:
                one.cancel()
            if late:
                self._trouble("late", len(late), f"no answer in {2 * self._block.guidance.retrieve_timeout:g} s")
            done = sorted(futures[one] for one in finished)
        return {place: asked[place][1] for place in done if asked[place][1].insertions}

    # ---- when the rollouts are there ----

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
                self._trouble(str(why), 1, WHY.get(str(why), ""))
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
        return figures | {f"guidance/rollouts/{name}": float(self._troubles[name]) for name in (*WHY, "late")}

    # ---- validation ----

    @property
    def wants_validations(self) -> bool:
        """Whether rollouts of the validation become experience."""
        config = self._block.guidance
        return config.enable_summarizer and (config.val_summarizer_save or not self._begun)

    def validated(self, made: Sequence[AgentTrajectory]) -> None:
        """Take rollouts of a validation, until :meth:`validation_done`."""
        self._validations += made

    def validation_done(self, step: int) -> None:
        """Let the validation's rollouts become experience; waits for it only before the first step, where configured.

        Args:
            step: newest step that is done.
        """
        held, self._validations = self._validations, []
        begun, self._begun = self._begun, True
        config = self._block.guidance
        if begun or step > 0:  # a resumed run has begun already
            self._hook.validated(held)
            return
        limit = config.summary_timeout * math.ceil(max(len(held), 1) / config.summary_batch_size)
        if not self._hook.begin(held, limit):
            logger.warning(
                "guidance: init_experience_before_training: training begins although not all of %d validation rollouts"
                " have become experience in %.0f s; the rest follows",
                len(held),
                limit,
            )

    # ---- checkpoint and end ----

    def state(self) -> str | None:
        """Return the state of the random choices; ``None`` if there are none."""
        return json.dumps(self._hook.state_dict()) if self.is_on else None

    def load_state(self, state: str | None) -> None:
        """Go on from a state that :meth:`state` returned. What is known of experiences stays as it is."""
        if self.is_on and state is not None:
            self._hook.load_state_dict(json.loads(state))

    def close(self) -> None:
        """Wait a little for summaries under way, log what is left, give the store back. Again: nothing."""
        if self._asking is not None:
            self._asking.shutdown(wait=False, cancel_futures=True)
        self._hook.close()

    def _trouble(self, name: str, count: int, why: str) -> None:
        if not self._troubles[name]:
            logger.warning(
                "guidance: %d rollouts or prompts were not guided, training goes on without: %s"
                " (guidance/rollouts/%s counts them)",
                count,
                why,
                name,
            )
        self._troubles[name] += count


class GuidedManager:
    """Stands in for verl's manager of agent loops: prompts take offers with them. All else is the manager's.

    Args:
        manager: has ``generate_sequences(prompts)``.
        guided: makes the offers.
    """

    def __init__(self, manager: Any, guided: GuidedRollouts) -> None:
        self._manager = manager
        self._guided = guided

    def generate_sequences(self, prompts: TensorDict) -> Any:
        """Have rollouts made of prompts; see verl's ``AgentLoopManagerTQ``."""
        return self._manager.generate_sequences(self._guided.offered(prompts))

    def __getattr__(self, name: str) -> Any:
        if name == "_manager":  # asked for before __init__, as copying does
            raise AttributeError(name)
        return getattr(self._manager, name)


def _column(prompts: TensorDict, name: str, usual: Any) -> list[Any]:
    """Return a column as one value for each prompt; verl has it as a stack, as a tensor, or as one value for all."""
    if name not in prompts:
        return [usual] * len(prompts)
    held = prompts.get(name)
    if isinstance(held, Tensor):
        return list(held.tolist())
    return [held.data] * len(prompts) if isinstance(held, NonTensorData) else list(prompts[name])


def _put_back(messages: Sequence[Any], guidance: Guidance) -> list[dict[str, Any]]:
    changed = [dict(one) for one in messages]
    for one in guidance.insertions:
        if one.message < len(changed):
            changed[: one.message + 1] = put_in(changed[: one.message + 1], one.text)[0]
    return changed
