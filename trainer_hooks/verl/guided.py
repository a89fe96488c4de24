"""Guidance of one training run, in the trainer's process: what prompts are offered, and what rollouts become.

Agent loops run in many other processes, but the experience store has one writer. So the trainer's process retrieves
experience once per prompt, and the prompt carries it to the workers (:mod:`trainer_hooks.verl.offers`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from trainer_hooks.guidance import LocalMaker, TrajExpConfig
from trainer_hooks.guidance.hook import GuidanceHook
from trainer_hooks.plan import PlannedTask
from trainer_hooks.verl import dataplane
from trainer_hooks.verl.config import ReplayBlock, naming
from trainer_hooks.verl.offers import GUIDED_LOOP, OFFER, Offer, is_exchanged
from trainer_hooks.verl.rows import NOT_GUIDED
from trainer_hooks.verl.tasks import ROLLOUTS_WANTED, column_of, task_name, with_texts
from trainer_hooks.wrapper import Wrapper
from trajstore.errors import ConfigurationError
from trajstore.trajectory import AgentTrajectory

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Maximum number of concurrent requests to a service."""

WHY = {
    "too_long": "with experience in it the prompt is longer than data.max_prompt_length; raise it, or lower"
    " experience_maker.retrieve_top_k",
    "not_taken_out": "the agent loop does not make its prompt's tokens by ct_build_initial_tokens of the messages that"
    " it is given, so experience could not be taken out again; the rollouts were made a second time without. Set"
    " exp_manager.train_sample_expmode=allkeep, or let the loop do so",
    "not_seen": "the agent loop makes its prompt of something else than the messages that it is given (raw_prompt)",
}


class GuidedRollouts:
    """Guidance of one training run. Not thread-safe.

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
        self._block, self._config = block, config
        with naming("experience_maker.store.path", (config.store or {}).get("path")):
            self.hook = GuidanceHook(config, tokenizer=tokenizer)
        self._unguided: Counter[str] = Counter()
        """Unguided rollouts and prompts by reason; the first of each reason is logged."""
        self._untrained: list[AgentTrajectory] = []
        self._validated: list[AgentTrajectory] = []
        """Rollouts of the validation under way."""
        self._has_begun = not config.init_experience_before_training
        self._asking: ThreadPoolExecutor | None = None
        if config.base_url is not None and config.enable_context_generator:
            self._asking = ThreadPoolExecutor(AT_ONCE, "guidance-retrieve")
        maker = self.hook.maker
        if isinstance(maker, LocalMaker) and not len(maker) and not config.enable_summarizer:
            logger.warning(
                "guidance: nothing will be shown: there are no experiences in experience_maker.store.path, and with"
                " enable_summarizer=false there never will be"
            )

    # ---- before the rollouts ----

    def offered(self, prompts: TensorDict) -> TensorDict:
        """Return prompts with the experience for their rollouts attached.

        Waits for a service at most twice ``retrieve_timeout``; later answers are not used.

        Args:
            prompts: prompts of a step or of validation, before their rollouts; not changed.

        Raises:
            ConfigurationError: the prompts have no ``raw_prompt``.
        """
        if not self._config.enable_context_generator or not len(prompts):
            return prompts
        if "raw_prompt" not in prompts:
            raise ConfigurationError("experience_maker.enable_context_generator: true, but prompts have no raw_prompt")
        validates = "validate" in prompts and bool(prompts["validate"])
        usual = self._block.n_validation if validates else self._block.n_rollout
        counts = column_of(prompts, ROLLOUTS_WANTED, usual)
        sources, indices = column_of(prompts, "data_source", ""), column_of(prompts, "index", "")
        tasks = [task_name(*names) for names in zip(sources, indices, strict=True)]
        plan = [PlannedTask(task, int(count), ()) for task, count in zip(tasks, counts, strict=True)]
        configs = iter(self.hook.before_rollout(plan, "validate" if validates else "sample"))
        rollouts = [[next(configs) for _ in range(planned.fresh_rollouts)] for planned in plan]
        wanted = {place: held for place, held in enumerate(rollouts) if any(config.add_exp for config in held)}
        messages = column_of(prompts, "raw_prompt", ())
        found = self._ask({place: (list(messages[place]), held[0]) for place, held in wanted.items()})
        if not found:
            return prompts
        loops = column_of(prompts, "agent_name", self._block.agent_loop)
        offers = [""] * len(prompts)
        for place, config in found.items():
            sessions = tuple(number for number, asked in enumerate(rollouts[place]) if asked.add_exp)
            offer = Offer(loops[place], sessions, config.train_mode, config.insertions[0], tuple(config.names))
            offers[place], loops[place] = offer.to_text(), GUIDED_LOOP
        # For all prompts: the data plane drops a column that one row lacks.
        return with_texts(prompts, agent_name=loops, **{OFFER: offers})

    def _ask(self, questions: dict[int, tuple[list[Any], TrajExpConfig]]) -> dict[int, TrajExpConfig]:
        """Retrieve experience per prompt; prompts without any are absent from the result."""
        asked = {
            place: (messages, TrajExpConfig(add_exp=True, train_mode=future.train_mode, task_id=future.task_id))
            for place, (messages, future) in questions.items()
        }
        done = list(asked)
        if self._asking is None:
            for messages, config in asked.values():
                self.hook.context(messages, config)
        else:
            limit = 2 * self._config.retrieve_timeout
            futures = {self._asking.submit(self.hook.context, *asked[place]): place for place in asked}
            finished, late = wait(futures, limit)
            for future in late:
                future.cancel()
            if late:
                self._count_unguided("late", len(late), f"no answer in {limit:g} s")
            done = sorted(futures[future] for future in finished)
        return {place: asked[place][1] for place in done if asked[place][1].insertions}

    # ---- after the rollouts ----

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
                self._count_unguided(str(why), 1, WHY.get(str(why), ""))
        if self.is_on and not trained:
            self._untrained += made

    def _count_unguided(self, name: str, count: int, why: str) -> None:
        if not self._unguided[name]:
            logger.warning(
                "guidance: %d rollouts or prompts were not guided, training goes on without: %s"
                " (guidance/rollouts/%s counts them)",
                count,
                why,
                name,
            )
        self._unguided[name] += count

    def step_done(self, made: Sequence[AgentTrajectory], step: int) -> dict[str, float]:
        """Submit rollouts, including those of dropped groups, as experience; return metrics. Does not block."""
        if not self.is_on:
            return {}
        held, self._untrained = [*made, *self._untrained], []
        figures = self.hook.step_done(held, step)
        return figures | {f"guidance/rollouts/{name}": float(self._unguided[name]) for name in (*WHY, "late")}

    @property
    def wants_validation(self) -> bool:
        """True if rollouts of the validation become experience."""
        return self._config.enable_summarizer and (self._config.val_summarizer_save or not self._has_begun)

    def validated(self, made: Sequence[AgentTrajectory]) -> None:
        """Collect rollouts of a validation, until :meth:`validation_done`."""
        self.finished(made)
        self._validated += made

    def validation_done(self, step: int) -> None:
        """Submit the validation's rollouts as experience; blocks only before the first step, if configured.

        Args:
            step: last finished step.
        """
        held, self._validated = self._validated, []
        begun, self._has_begun = self._has_begun, True
        if begun or step > 0:  # a resumed run has begun already
            self.hook.validated(held)
            return
        limit = self._config.summary_timeout * math.ceil(max(len(held), 1) / self._config.summary_batch_size)
        if not self.hook.begin(held, limit):
            logger.warning(
                "guidance: init_experience_before_training: training begins although not all of %d validation rollouts"
                " have become experience in %.0f s; the rest follows",
                len(held),
                limit,
            )

    # ---- end ----

    def close(self) -> None:
        """Cancel requests, wait briefly for running summaries, log the unfinished ones, close the store. Idempotent."""
        if self._asking is not None:
            self._asking.shutdown(wait=False, cancel_futures=True)
        self.hook.close()


class GuidedManager(Wrapper, wraps="_manager"):
    """Wraps verl's agent-loop manager and attaches experience to its prompts.

    Args:
        manager: has ``generate_sequences(prompts)``.
        offered: returns prompts with experience attached.
    """

    def __init__(self, manager: Any, offered: Callable[[TensorDict], TensorDict]) -> None:
        self._manager = manager
        self._offered = offered

    def generate_sequences(self, prompts: TensorDict) -> Any:
        """Generate rollouts of prompts; see verl's ``AgentLoopManagerTQ``."""
        return self._manager.generate_sequences(self._offered(prompts))
