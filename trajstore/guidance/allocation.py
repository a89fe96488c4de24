"""Which rollouts are guided, and which tasks keep what was put into their prompts. Pure; the generator is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trajstore.arguments import share, whole
from trajstore.checked import checked

TrainMode = Literal["keep", "discard"]
"""Whether training keeps the experience in the prompt, or discards it."""

RolloutExpMode = Literal["woexp", "all", "mixed"]
SampleExpMode = Literal["allkeep", "alldiscard", "hybrid"]


@checked
@dataclass(frozen=True, slots=True)
class TaskExpConfig:
    """What guidance has decided for one task of a step.

    Attributes:
        add_exp: for each rollout that the task makes, whether it is to be guided.
        train_mode: whether training keeps what is put into their prompts.
    """

    add_exp: tuple[bool, ...]
    train_mode: TrainMode


@checked
def allocate_train_mode(
    tasks: int, mode: SampleExpMode, keep_ratio: float, generator: np.random.Generator
) -> list[TrainMode]:
    """Return the train mode of each task.

    Args:
        tasks: how many.
        mode: ``allkeep``, ``alldiscard``, or ``hybrid``: ``int(tasks * keep_ratio)`` of them keep, drawn at random.
        keep_ratio: in [0, 1]; counts with ``hybrid`` only.
        generator: used by ``hybrid`` only.

    Raises:
        ConfigurationError: no such mode, a ratio outside [0, 1], or a negative number.
    """
    whole("tasks", tasks, 0)
    share("keep_ratio", keep_ratio)
    if mode != "hybrid":
        return ["keep" if mode == "allkeep" else "discard"] * tasks
    keeping = set(generator.permutation(tasks)[: int(tasks * keep_ratio)].tolist())
    return ["keep" if task in keeping else "discard" for task in range(tasks)]


@checked
def allocate_add_exp(
    rollouts: Sequence[int], mode: RolloutExpMode, ratio: float, generator: np.random.Generator
) -> list[tuple[bool, ...]]:
    """Return, for each task, which of its rollouts are to be guided.

    Args:
        rollouts: number of rollouts that each task makes.
        mode: ``woexp`` none, ``all`` all, or ``mixed``: ``round(n * ratio)`` of a task's n (halves to the even
            number, as Python rounds), drawn at random for each task.
        ratio: in [0, 1]; counts with ``mixed`` only.
        generator: used by ``mixed`` only.

    Raises:
        ConfigurationError: no such mode, a ratio outside [0, 1], or a negative number.
    """
    share("ratio", ratio)
    for place, count in enumerate(rollouts):
        whole(f"rollouts[{place}]", count, 0)
    if mode != "mixed":
        return [(mode == "all",) * count for count in rollouts]
    result = []
    for count in rollouts:
        guided = set(generator.permutation(count)[: round(count * ratio)].tolist())
        result.append(tuple(rollout in guided for rollout in range(count)))
    return result
