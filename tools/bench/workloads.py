"""The workloads that the goals name, and the limit that sampling is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.bench.report import Options
from trajstore.columns.conversion import flatten
from trajstore.columns.fields import Axis
from trajstore.trajectory import AgentTrajectory, Trajectory

PROMPT, RESPONSE, TURNS = 300, 700, 3


@dataclass(frozen=True)
class Workload:
    """Trajectories ``[T, B, ...]`` and the size of the batches that are drawn from them."""

    name: str
    trajectories: list[Trajectory]
    batch: int


def state(options: Options) -> Workload:
    """Return 64 trajectories, T 80, B 32: eleven columns, 768 bytes per sample, one bootstrap row; batch 1024."""
    generator = torch.Generator().manual_seed(1)
    trajectories = [state_trajectory(generator) for _ in range(options.count(64, 2))]
    return Workload("state", trajectories, 1024)


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
    """Return 48 trajectories, T 32, B 4: uint8 images 96 x 96 x 3 before and after each step; batch 256."""
    generator = torch.Generator().manual_seed(2)
    trajectories = [image_trajectory(generator) for _ in range(options.count(48, 2))]
    return Workload("image", trajectories, 256)


def image_trajectory(generator: torch.Generator, steps: int = 32, batch: int = 4) -> Trajectory:
    """Return one trajectory of the image workload."""

    def images() -> dict[str, Tensor]:
        shape = (steps, batch, 96, 96, 3)
        return {"main_images": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)}

    return Trajectory(
        max_episode_length=steps,
        model_weights_id="bench",
        rewards=torch.randn(steps, batch, 1, generator=generator),
        curr_obs=images(),
        next_obs=images(),
    )


def agent_trajectory(generator: torch.Generator, number: int) -> AgentTrajectory:
    """Return a rollout of 1,000 tokens: prompt 300, response 700 in three turns; ids, masks, log-probs, messages."""
    tokens = PROMPT + RESPONSE
    turn = RESPONSE // TURNS + 1
    wrote = (torch.arange(RESPONSE) % turn < turn * 2 // 3).long()
    messages = [{"role": "system", "content": _text(generator, PROMPT)}]
    for _ in range(TURNS):
        messages.append({"role": "assistant", "author": "llm", "content": _text(generator, turn * 2 // 3)})
        messages.append({"role": "user", "content": _text(generator, turn // 3)})
    return AgentTrajectory(
        messages=messages,
        input_ids=torch.randint(1, 150_000, (tokens,), generator=generator),
        attention_mask=torch.ones(tokens, dtype=torch.int64),
        loss_mask=torch.cat([torch.zeros(PROMPT, dtype=torch.int64), wrote]),
        response_start=PROMPT,
        old_log_probs=-torch.rand(RESPONSE, generator=generator),
        response_mask=wrote,
        task_id=f"task-{number // 8}",
        rollout_id=str(number % 8),
        policy_version=number // 512,
    )


def small_trajectory(generator: torch.Generator, number: int) -> AgentTrajectory:
    """Return a rollout of 1 KB, all in all."""
    return AgentTrajectory(
        input_ids=torch.randint(1, 150_000, (32,), generator=generator),
        attention_mask=torch.ones(32, dtype=torch.int64),
        loss_mask=torch.ones(32, dtype=torch.int64),
        response_start=16,
        old_log_probs=-torch.rand(16, generator=generator),
        response_mask=torch.ones(16, dtype=torch.int64),
        task_id=f"task-{number}",
    )


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
