"""The workloads that the goals name, and the limit that sampling is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.bench.report import Options
from trajstore import TrajectoryReplayBuffer
from trajstore._core.columns.conversion import flatten
from trajstore._core.columns.fields import Axis
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Trajectory

PROMPT, RESPONSE, TURNS = 300, 700, 3
LIST = 16
"""Trajectories that are added with one call."""


@dataclass(frozen=True)
class Workload:
    """Trajectories ``[T, B, ...]`` and the size of the batches that are drawn from them."""

    name: str
    trajectories: list[Trajectory]
    batch: int


def state(options: Options) -> Workload:
    """Return 64 trajectories, T 80, B 32: eleven columns, 768 bytes per sample, one bootstrap row; batch 1024."""
    return Workload("state", states(options.count(64, 2), seed=1), 1024)


def state_trajectory(generator: torch.Generator, steps: int = 80, batch: int = 32) -> Trajectory:
    """Return one trajectory of the state workload."""

    def numbers(rows: int, width: int) -> Tensor:
        return torch.randn(rows, batch, width, generator=generator)

    def flags() -> Tensor:
        return torch.rand(steps + 1, batch, 4, generator=generator) < 0.01

    return Trajectory(
        max_episode_length=steps,
        model_weights_id="bench",
        actions=numbers(steps, 28),
        prev_logprobs=numbers(steps, 28),
        prev_values=numbers(steps + 1, 1),
        rewards=numbers(steps, 4),
        dones=flags(),
        terminations=flags(),
        truncations=flags(),
        versions=torch.zeros(steps, batch, 1),
        forward_inputs={"noise": numbers(steps, 1)},
        curr_obs={"states": numbers(steps, 63)},
        next_obs={"states": numbers(steps, 63)},
    )


def image(options: Options) -> Workload:
    """Return 48 trajectories, T 32, B 4: uint8 images 96 x 96 x 3 before and after each step; batch 256.

    The image after a step is the one before the next step.
    """
    generator = torch.Generator().manual_seed(2)
    trajectories = [image_trajectory(generator) for _ in range(options.count(48, 2))]
    return Workload("image", trajectories, 256)


def image_trajectory(generator: torch.Generator, steps: int = 32, batch: int = 4) -> Trajectory:
    """Return one trajectory of the image workload."""
    images = torch.randint(0, 256, (steps + 1, batch, 96, 96, 3), dtype=torch.uint8, generator=generator)
    return Trajectory(
        max_episode_length=steps,
        model_weights_id="bench",
        rewards=torch.randn(steps, batch, 1, generator=generator),
        curr_obs={"main_images": images[:-1]},
        next_obs={"main_images": images[1:]},
    )


def rollout(generator: torch.Generator, number: int, prompt: int, mask: Tensor, **more: Any) -> AgentTrajectory:
    """Return a rollout of random tokens with log-probs.

    Args:
        generator: of the numbers.
        number: names the task, unless ``more`` does.
        prompt: tokens of the prompt.
        mask: which tokens of the response the model wrote.
        more: fields besides.
    """
    tokens, response = prompt + len(mask), len(mask)
    fields = {"task_id": f"task-{number}", **more}
    return AgentTrajectory(
        input_ids=torch.randint(1, 150_000, (tokens,), generator=generator),
        attention_mask=torch.ones(tokens, dtype=torch.int64),
        loss_mask=torch.cat([torch.zeros(prompt, dtype=torch.int64), mask]),
        response_start=prompt,
        old_log_probs=-torch.rand(response, generator=generator),
        response_mask=mask,
        **fields,
    )


def turns(response: int) -> Tensor:
    """Return the mask of a response in three turns, two thirds of each written by the model."""
    turn = response // TURNS + 1
    return (torch.arange(response) % turn < turn * 2 // 3).long()


def agent_trajectory(generator: torch.Generator, number: int) -> AgentTrajectory:
    """Return a rollout of 1,000 tokens: prompt 300, response 700 in three turns; ids, masks, log-probs, messages."""
    turn = RESPONSE // TURNS + 1
    messages = [{"role": "system", "content": _text(generator, PROMPT)}]
    for _ in range(TURNS):
        messages.append({"role": "assistant", "author": "llm", "content": _text(generator, turn * 2 // 3)})
        messages.append({"role": "user", "content": _text(generator, turn // 3)})
    names = {"task_id": f"task-{number // 8}", "rollout_id": str(number % 8), "policy_version": number // 512}
    return rollout(generator, number, PROMPT, turns(RESPONSE), messages=messages, **names)


def agents(count: int = 256, seed: int = 0) -> list[AgentTrajectory]:
    """Return some rollouts of 1,000 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [agent_trajectory(generator, number) for number in range(count)]


def smalls(count: int = 256) -> list[AgentTrajectory]:
    """Return some rollouts of 1 KB, all in all."""
    generator, mask = torch.Generator().manual_seed(0), torch.ones(16, dtype=torch.int64)
    return [rollout(generator, number, 16, mask) for number in range(count)]


def states(count: int, seed: int = 0) -> list[Trajectory]:
    """Return some trajectories of the state workload."""
    generator = torch.Generator().manual_seed(seed)
    return [state_trajectory(generator) for _ in range(count)]


def opened(path: Path | str, **options: Any) -> TrajectoryReplayBuffer:
    """Return a buffer that writes to a path, caches nothing, and draws from everything; ``options`` are its own."""
    return TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=path, **{"enable_cache": False, "sample_window_size": 0, **options}
    )


def filled(path: Path | str, trajectories: Sequence[AnyTrajectory], **options: Any) -> TrajectoryReplayBuffer:
    """Write trajectories one by one, and return a buffer that has opened their store anew."""
    with opened(path, **options) as buffer:
        add_all(buffer, trajectories, len(trajectories), 1)
    return opened(path, **options)


def add_all(buffer: Any, pool: Sequence[AnyTrajectory], total: int, size: int = LIST) -> None:
    """Add a number of trajectories from a pool, in lists of a given size, and flush."""
    for start in range(0, total, size):
        at = start % len(pool)
        buffer.add_trajectories(pool[at : at + min(size, total - start)])
    buffer.flush()


def _text(generator: torch.Generator, tokens: int) -> str:
    """Return words of about four characters per token."""
    letters = torch.randint(97, 123, (tokens * 4,), generator=generator, dtype=torch.uint8)
    letters[::6] = 32
    return bytes(letters.tolist()).decode()


def nbytes(trajectories: Sequence[Trajectory | AgentTrajectory]) -> int:
    """Return the bytes of all columns."""
    return sum(flatten(trajectory).nbytes for trajectory in trajectories)


def raw_columns(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return one contiguous tensor ``[samples, ...]`` per column, by dotted name, without bootstrap rows (E = 1)."""
    pieces: dict[str, list[Tensor]] = {}
    for trajectory in trajectories:
        flat = flatten(trajectory)
        for column, tensor in zip(flat.schema.columns, flat.tensors, strict=True):
            if column.axis is Axis.FIRST_EXTRA:
                tensor = tensor[1:]
            elif column.axis is Axis.LAST_EXTRA:
                tensor = tensor[:-1]
            pieces.setdefault(column.name, []).append(tensor.reshape(-1, *column.row_shape))
    return {name: torch.cat(parts) for name, parts in pieces.items()}


class RawGather:
    """The limit: ``index_select`` of drawn rows from one contiguous tensor per column, into fresh memory.

    The rows of many batches are drawn beforehand; drawing is no part of the limit.
    """

    def __init__(self, columns: dict[str, Tensor], batch: int, seed: int, batches: int = 256) -> None:
        self.columns = columns
        samples = len(next(iter(columns.values())))
        generator = torch.Generator().manual_seed(seed)
        self._rows = [torch.randint(0, samples, (min(batch, samples),), generator=generator) for _ in range(batches)]
        self._next = 0

    def __call__(self) -> dict[str, Tensor]:
        rows = self._rows[self._next % len(self._rows)]
        self._next += 1
        return {name: column.index_select(0, rows) for name, column in self.columns.items()}
