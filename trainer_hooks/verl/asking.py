"""What a prompt's rollouts are to be shown: asked for in the trainer's process, offered to verl's workers.

Agent loops run in other processes, of which there are many; the store of experiences has one writer. So the trainer's
process asks, once for each prompt, and each prompt takes with it what its rollouts are to be shown
(:mod:`trainer_hooks.verl.offers`).
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
"""Column of a prompt by which verl's agent loop learns how many rollouts to make of it."""

AT_ONCE = 16
"""Questions to a service at the same time."""


class Troubles:
    """Counts rollouts and prompts that were not guided, by reason; the first of each is logged."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, name: str, count: int, why: str) -> None:
        """Count some more; ``why`` is for the log."""
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
    """Asks for the experience of prompts. Not thread-safe.

    Args:
        block: the configuration.
        hook: decides which rollouts are guided, and finds experience.
        troubles: counts what was not answered in time.
    """

    def __init__(self, block: ReplayBlock, hook: GuidanceHook, troubles: Troubles) -> None:
        self._block = block
        self._hook = hook
        self._troubles = troubles
        self._asking: ThreadPoolExecutor | None = None
        if block.guidance.base_url is not None and block.guidance.enable_context_generator:
            self._asking = ThreadPoolExecutor(AT_ONCE, "guidance-retrieve")

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
                self._troubles.add("late", len(late), f"no answer in {2 * self._block.guidance.retrieve_timeout:g} s")
            done = sorted(futures[one] for one in finished)
        return {place: asked[place][1] for place in done if asked[place][1].insertions}

    def close(self) -> None:
        """Give up questions that are not asked yet."""
        if self._asking is not None:
            self._asking.shutdown(wait=False, cancel_futures=True)


class Offers(Protocol):
    """Makes the offers of prompts."""

    def offered(self, prompts: TensorDict, /) -> TensorDict:
        """Return the prompts, with what their rollouts are to be shown."""


class GuidedManager:
    """Stands in for verl's manager of agent loops: prompts take offers with them. All else is the manager's.

    Args:
        manager: has ``generate_sequences(prompts)``.
        guided: makes the offers.
    """

    def __init__(self, manager: Any, guided: Offers) -> None:
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
