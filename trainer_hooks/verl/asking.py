"""Retrieves experience for prompts in the trainer's process and attaches it for verl's workers.

Agent loops run in many other processes, but the experience store has one writer. So the trainer's process retrieves
experience once per prompt, and the prompt carries it to the workers (:mod:`trainer_hooks.verl.offers`).
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol

from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from torch import Tensor

from trainer_hooks.guidance import TrajExpConfig
from trainer_hooks.guidance.hook import GuidanceHook
from trainer_hooks.plan import PlannedTask
from trainer_hooks.verl.config import ReplayBlock
from trainer_hooks.verl.offers import GUIDED_LOOP, OFFER, Offer
from trainer_hooks.verl.tasks import task_name
from trajstore.errors import ConfigurationError

logger = logging.getLogger(__name__)

ROLLOUTS_WANTED = "__rollout_n__"
"""Column of a prompt with the number of rollouts that verl's agent loop makes."""

AT_ONCE = 16
"""Maximum number of concurrent requests to a service."""


class Troubles:
    """Counts unguided rollouts and prompts by reason; the first of each reason is logged."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, name: str, count: int, why: str) -> None:
        """Add to the count of a reason; ``why`` is logged."""
        if not self.counts[name]:
            logger.warning(
                "guidance: %d rollouts or prompts were not guided, training goes on without: %s"
                " (guidance/rollouts/%s counts them)",
                count,
                why,
                name,
            )
        self.counts[name] += count


class Asking:
    """Retrieves experience for prompts. Not thread-safe.

    Args:
        block: the configuration.
        hook: chooses the guided rollouts and retrieves experience.
        troubles: counts late answers.
    """

    def __init__(self, block: ReplayBlock, hook: GuidanceHook, troubles: Troubles) -> None:
        self._block = block
        self._hook = hook
        self._troubles = troubles
        self._asking: ThreadPoolExecutor | None = None
        if block.guidance.base_url is not None and block.guidance.enable_context_generator:
            self._asking = ThreadPoolExecutor(AT_ONCE, "guidance-retrieve")

    def offered(self, prompts: TensorDict) -> TensorDict:
        """Return prompts with the experience for their rollouts attached.

        Waits for a service at most twice ``retrieve_timeout``; later answers are not used.

        Args:
            prompts: prompts of a step or of validation, before their rollouts; not changed.

        Raises:
            ConfigurationError: the prompts have no ``raw_prompt``.
        """
        if not self._block.guidance.enable_context_generator or not len(prompts):
            return prompts
        if "raw_prompt" not in prompts:
            raise ConfigurationError("experience_maker.enable_context_generator: true, but prompts have no raw_prompt")
        validates = "validate" in prompts and bool(prompts["validate"])
        usual = self._block.n_validation if validates else self._block.n_rollout
        counts = column_of(prompts, ROLLOUTS_WANTED, usual)
        sources, indices = column_of(prompts, "data_source", ""), column_of(prompts, "index", "")
        tasks = [task_name(*names) for names in zip(sources, indices, strict=True)]
        plan = [PlannedTask(task, int(count), ()) for task, count in zip(tasks, counts, strict=True)]
        configs = iter(self._hook.before_rollout(plan, "validate" if validates else "sample"))
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
        result = prompts.copy()
        result["agent_name"] = NonTensorStack(*loops)
        result[OFFER] = NonTensorStack(*offers)  # for all prompts: the data plane drops a column that one row lacks
        return result

    def _ask(self, questions: dict[int, tuple[list[Any], TrajExpConfig]]) -> dict[int, TrajExpConfig]:
        """Retrieve experience per prompt; prompts without any are absent from the result."""
        asked = {
            place: (messages, TrajExpConfig(add_exp=True, train_mode=future.train_mode, task_id=future.task_id))
            for place, (messages, future) in questions.items()
        }
        done = list(asked)
        if self._asking is None:
            for messages, config in asked.values():
                self._hook.context(messages, config)
        else:
            futures = {self._asking.submit(self._hook.context, *asked[place]): place for place in asked}
            finished, late = wait(futures, 2 * self._block.guidance.retrieve_timeout)
            for future in late:
                future.cancel()
            if late:
                self._troubles.add("late", len(late), f"no answer in {2 * self._block.guidance.retrieve_timeout:g} s")
            done = sorted(futures[future] for future in finished)
        return {place: asked[place][1] for place in done if asked[place][1].insertions}

    def close(self) -> None:
        """Cancel requests that have not started."""
        if self._asking is not None:
            self._asking.shutdown(wait=False, cancel_futures=True)


class Offers(Protocol):
    """Attaches experience to prompts."""

    def offered(self, prompts: TensorDict, /) -> TensorDict:
        """Return the prompts with experience attached."""


class GuidedManager:
    """Wraps verl's agent-loop manager and attaches experience to its prompts.

    Args:
        manager: has ``generate_sequences(prompts)``.
        guided: attaches the experience.
    """

    def __init__(self, manager: Any, guided: Offers) -> None:
        self._manager = manager
        self._guided = guided

    def generate_sequences(self, prompts: TensorDict) -> Any:
        """Generate rollouts of prompts; see verl's ``AgentLoopManagerTQ``."""
        return self._manager.generate_sequences(self._guided.offered(prompts))

    def __getattr__(self, name: str) -> Any:
        if name == "_manager":  # accessed before __init__, for example by copy
            raise AttributeError(name)
        return getattr(self._manager, name)


def column_of(prompts: TensorDict, name: str, usual: Any) -> list[Any]:
    """Return a column as a list of one value per prompt; verl uses a stack, a tensor, or one value for all."""
    if name not in prompts:
        return [usual] * len(prompts)
    held = prompts.get(name)
    if isinstance(held, Tensor):
        return list(held.tolist())
    return [held.data] * len(prompts) if isinstance(held, NonTensorData) else list(prompts[name])
