"""What threads read, one call after the other, and how they see whether it is what was written.

Every trajectory says which one it is: its key is a number of its store and its own id. So a row that belongs to another
trajectory than the one drawn is seen, and so is one of a trajectory that the store had let go of before the call began.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, suppress
from random import Random
from typing import Any

import torch

from tests.support.witness import WitnessError, check_batch, check_trajectory, difference, witness
from trajstore import AgentTrajectory, Reward, TrajectoryReplayBuffer
from trajstore._core.buffer.sequences import sample_n_step, sample_sequences
from trajstore.errors import ConfigurationError, TrajectoryUnavailableError
from trajstore.loader import ReplayLoader, TokenLoader
from trajstore.samplers import EpochSampler, Priorities, Recency, Sampler, WeightedSampler
from trajstore.trajectory import AnyTrajectory

ID_BITS = 20
"""A key is the number of a store, and this many bits for the id that its trajectory has there."""

_TOKEN_BITS = 8
_PLAIN = ["curr_obs.tag", "actions", "curr_obs.image", "dones"]
_BATCHES_OF_LOADER = 6

Reading = Callable[[TrajectoryReplayBuffer, Random], Iterator[Collection[int]]]
"""Reads once or a few times and yields the keys that each call brought, checked."""


def rollout(key: int) -> AgentTrajectory:
    """Return the agent trajectory with this key; every token and every log-prob tells it."""
    prompt, response = 2 + key % 3, 3 + key % 11
    length = prompt + response
    return AgentTrajectory(
        messages=[{"role": "user", "content": str(key)}],
        input_ids=(key << _TOKEN_BITS) + torch.arange(length),
        loss_mask=(torch.arange(length) >= prompt).long(),
        response_start=prompt,
        old_log_probs=-(key % 1000 + 1.0) - torch.arange(response) / 1000,
        response_mask=torch.ones(response, dtype=torch.bool),
        reward=Reward(outcome=float(key % 2)),
        task_id=f"task {key % 5}",
        policy_version=key & ((1 << ID_BITS) - 1),
    )


def made(kind: str, key: int) -> AnyTrajectory:
    """Return the trajectory of a kind, ``"steps"`` or ``"agents"``, with this key."""
    return witness(key) if kind == "steps" else rollout(key)


def check(kind: str, trajectory: AnyTrajectory) -> int:
    """Compare a whole trajectory with the one of its key, which is returned.

    Raises:
        WitnessError: they differ.
    """
    if kind == "steps":
        return check_trajectory(trajectory)
    if not isinstance(trajectory, AgentTrajectory) or trajectory.input_ids is None:
        raise WitnessError("not a rollout")
    key = int(trajectory.input_ids[0]) >> _TOKEN_BITS
    differing = difference(trajectory, rollout(key))
    if differing is not None:
        raise WitnessError(f"rollout with key {key}: {differing} is not what was written")
    return key


def _same_ids(keys: Any, ids: Any) -> list[int]:
    found = [int(key) for key in keys]
    wrong = [(key, int(number)) for key, number in zip(found, ids, strict=True) if key % (1 << ID_BITS) != number]
    if wrong:
        raise WitnessError(f"the rows of trajectory {wrong[0][1]} are those with key {wrong[0][0]}")
    return found


def _sample(buffer: TrajectoryReplayBuffer, random: Random) -> Iterator[Collection[int]]:
    for _ in range(5):
        columns = random.choice([None, None, _PLAIN])
        yield set(check_batch(buffer.sample(random.choice([1, 32, 512]), columns=columns)).tolist())


def _sampler(random: Random) -> Sampler:
    return random.choice([EpochSampler, lambda: WeightedSampler([Recency(8)], Priorities(alpha=0.6, beta=0.4))])()


def _samplers(buffer: TrajectoryReplayBuffer, random: Random) -> Iterator[Collection[int]]:
    sampler = _sampler(random)
    for _ in range(4):
        batch = buffer.sample(48, sampler=sampler)
        yield _same_ids(check_batch(batch), batch.drawn.ids)  # type: ignore[attr-defined]
        if isinstance(sampler, WeightedSampler):
            with suppress(ConfigurationError):  # of a shorter trajectory of another store, which was loaded since
                buffer.update_priorities(sampler, batch.drawn, torch.rand(len(batch.drawn.ids)))  # type: ignore[attr-defined]


def _loader(buffer: TrajectoryReplayBuffer, random: Random) -> Iterator[Collection[int]]:
    sampler = random.choice([None, _sampler(random)])
    with closing(ReplayLoader(buffer, 40, sampler=sampler, prefetch=2, timeout=120)) as loader:
        for _ in range(_BATCHES_OF_LOADER):
            batch = next(loader)
            _same_ids(check_batch(batch), batch.drawn.ids)
            yield ()  # drawn ahead: it may be of what was let go of since


def _sequences(buffer: TrajectoryReplayBuffer, random: Random) -> Iterator[Collection[int]]:
    try:
        batch = dict(sample_sequences(buffer, 8, 2, pad=True, columns=_PLAIN))
        batch.pop("mask")
        yield set(check_batch(_rows(batch)).tolist())
        batch = dict(sample_n_step(buffer, 8, 2, 0.9, columns=_PLAIN, terminations="dones"))
        for name in ("rewards", "bootstrap", "steps"):
            batch.pop(name)
        yield set(check_batch(batch).tolist())
    except TrajectoryUnavailableError:  # rows are found before they are read; of one evicted in between nothing is read
        return


def _rows(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _rows(value) if isinstance(value, dict) else value.flatten(0, 1) for name, value in values.items()}


def _whole(kind: str) -> Reading:
    def read(buffer: TrajectoryReplayBuffer, random: Random) -> Iterator[Collection[int]]:
        yield {check(kind, one) for one in buffer.sample_trajectories(3)}
        yield {check(kind, one) for one in buffer.sample_trajectories(2, sampler=EpochSampler(unit="trajectory"))}
        ids = buffer.trajectory_ids.tolist()
        if len(ids) != len(set(ids)):
            raise WitnessError(f"an id is shown twice: {sorted(ids)}")
        for number in random.sample(ids, min(4, len(ids))):
            try:
                one = buffer.get(number)
            except TrajectoryUnavailableError:  # let go of since it was listed
                continue
            yield _same_ids([check(kind, one)], [number])
        buffer.get_stats()

    return read


def _check_tokens(ids: Any, starts: Any, columns: dict[str, torch.Tensor]) -> list[int]:
    keys = [int(columns["input_ids"][start]) >> _TOKEN_BITS for start in starts[:-1]]
    for key, start, stop in zip(keys, starts[:-1], starts[1:], strict=True):
        one = rollout(key)
        assert one.input_ids is not None
        assert one.old_log_probs is not None
        if not torch.equal(columns["input_ids"][start:stop].long(), one.input_ids):
            raise WitnessError(f"rollout with key {key}: its tokens are not what was written")
        if not torch.equal(columns["old_log_probs"][start:stop][one.response_start :], one.old_log_probs):
            raise WitnessError(f"rollout with key {key}: its log-probs are not what was written")
    return _same_ids(keys, ids)


def _tokens(buffer: TrajectoryReplayBuffer, random: Random) -> Iterator[Collection[int]]:
    ids = buffer.trajectory_ids
    try:
        rows = buffer._sampling.token_rows(ids[: random.randrange(1, 12)], ["input_ids", "old_log_probs"])
    except TrajectoryUnavailableError:  # let go of since it was listed
        return
    with ExitStack() as ending:
        ending.callback(rows.end)
        starts = [0, *rows.lengths.cumsum().tolist()]
        for _ in range(3):
            keys = _check_tokens(rows.ids, starts, rows.copy(rows.lengths.cumsum() - rows.lengths, starts[-1]))
            said = [document["messages"][0]["content"] for document in rows.documents()]
            if said != [str(key) for key in keys]:
                raise WitnessError(f"rollouts with keys {keys} say that they are {said}")
    yield ()  # held while they were read: they may be of what was let go of since


def _token_loader(buffer: TrajectoryReplayBuffer, random: Random) -> Iterator[Collection[int]]:
    with closing(TokenLoader(buffer, 60, prefetch=2, timeout=120)) as loader:
        for _ in range(_BATCHES_OF_LOADER):
            for pack in next(loader):
                _check_tokens(pack["trajectory_ids"].tolist(), pack["cu_seqlens"].tolist(), pack)
            yield ()


READERS: dict[str, dict[str, Reading]] = {
    "steps": {
        "sample": _sample,
        "samplers": _samplers,
        "loader": _loader,
        "sequences": _sequences,
        "whole": _whole("steps"),
    },
    "agents": {"tokens": _tokens, "token loader": _token_loader, "whole": _whole("agents")},
}
