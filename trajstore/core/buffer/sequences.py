"""Batches of more than single steps: sequences, n-step transitions, hindsight goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from trajstore.core.base.arguments import check_instance, columns_or_none, finite, one_of, text, texts, truth, whole
from trajstore.core.buffer.reader import Reader
from trajstore.core.buffer.sampling import Batch
from trajstore.core.columns.fields import nest, resolved
from trajstore.core.reading.contents import Contents
from trajstore.core.sampling.base import Drawn, Fits, Ids, IntArray, Sampler, uniform
from trajstore.core.sampling.spans import Mask, discounts, epoch_starts, last_of, rows_after, within_episode
from trajstore.errors import ConfigurationError, EmptyBufferError, SchemaMismatchError

_IN_VAIN = 1000
"""Consecutive draws without a whole sequence before an error."""

_MOST_STEPS = 1 << 24
"""Largest number of steps in a span, all of which are read at once."""

Ends = Sequence[str]


@dataclass(frozen=True, slots=True)
class _Spans:
    """Rows of spans, and a mask of the valid ones, ``[n, length]``."""

    rows: IntArray
    mask: Mask


def sample_sequences(
    buffer: Reader,
    count: int,
    length: int,
    *,
    pad: bool = False,
    sampler: Sampler | None = None,
    where: str | None = None,
    ids: Ids | None = None,
    columns: Sequence[str] | None = None,
    ends: Ends = ("dones",),
) -> Batch:
    """Draw sequences of steps of one environment, within an episode and a trajectory.

    Args:
        buffer: to draw from.
        count: number of sequences.
        length: steps of each.
        pad: also draw starts less than ``length`` steps before an end; the last step is repeated and
            masked in ``mask``. Without it, the draw is uniform over starts of whole sequences.
        sampler: chooses the starts instead of a uniform draw.
        where: draw only trajectories that match, see :meth:`Reader.sample`.
        ids: draw only these trajectories.
        columns: dotted names of the columns wanted; None = all.
        ends: columns in which a true value ends an episode with this step.

    Returns:
        A nested dict of tensors ``[count, length, ...]``, and ``"mask"`` ``[count, length]``, true for valid
        steps. Padded, it has no more sequences than the window has steps.
        An episode never continues in another trajectory, because no field identifies it, and continues in another
        rollout epoch only if the next ``curr_obs`` equals the last ``next_obs``.

    Raises:
        EmptyBufferError: there is nothing to draw from, or hardly a start with ``length`` steps after it.
        SchemaMismatchError: a column of ``ends`` is absent.
        ConfigurationError: an argument is out of range.
    """
    count, length, pad = whole("count", count, 1), whole("length", length, 1, _MOST_STEPS), truth("pad", pad)
    ends = _checked(buffer, ends)

    columns = columns_or_none(columns)

    sampler = buffer.selected(sampler, where, ids)

    def sample(contents: Contents) -> Batch:
        fits = None if pad else _has_whole(buffer, contents, count, length, ends)
        first, positions = buffer.sampling.choose(contents, count, buffer.sample_window_size, sampler, fits)
        spans = _spans(contents, positions, contents.rows_of(positions, first.samples), length, ends)
        values = _read(contents, positions, spans.rows, columns)
        return Batch({**nest(values), "mask": torch.from_numpy(spans.mask)}, first)

    return buffer.sampling.together(sampler, sample)


def sample_n_step(
    buffer: Reader,
    count: int,
    n: int,
    gamma: float,
    *,
    sampler: Sampler | None = None,
    where: str | None = None,
    ids: Ids | None = None,
    columns: Sequence[str] | None = None,
    ends: Ends = ("dones",),
    terminations: str = "terminations",
) -> Batch:
    """Draw transitions over n steps: the reward is the discounted sum, the next observation is from n steps later.

    ``R = sum_i gamma^i r_i`` over the steps up to the n-th, or to the end of the episode or the trajectory if that
    comes first; a value's target is then ``R + bootstrap * V(next)``, with values in the shape of the rewards.
    Source: Sutton and Barto, "Reinforcement Learning", second edition, equation 7.1.

    Args:
        buffer: to draw from.
        count: number of transitions; without a sampler at most as many as the window has, with a warning once.
        n: steps of each at most.
        gamma: discount of a step, in ``[0, 1]``.
        sampler: chooses the first steps instead of a uniform draw.
        where: draw only trajectories that match, see :meth:`Reader.sample`.
        ids: draw only these trajectories.
        columns: dotted names of the columns wanted, besides rewards; None = all.
        ends: columns in which a true value ends an episode with this step.
        terminations: column in which a true value is a terminal state, without bootstrapping.

    Returns:
        The batch of the first steps, in which ``rewards`` ``[count, ...]`` are the sums, and columns below ``next_obs``
        those of the last step. Also ``"bootstrap"`` float32 (``gamma^k`` after k steps, 0 if the last step
        terminated), ``[count]`` with trailing dimensions of 1 so that it broadcasts with the rewards, and
        ``"steps"`` int64 ``[count]`` (k).

    Raises:
        EmptyBufferError: there is nothing to draw from.
        SchemaMismatchError: a column is absent.
        ConfigurationError: an argument is out of range.
    """
    count, n, gamma = whole("count", count, 1), whole("n", n, 1, _MOST_STEPS), finite("gamma", gamma, 0.0, 1.0)
    ends, columns = _checked(buffer, ends), columns_or_none(columns)
    text("terminations", terminations)

    sampler = buffer.selected(sampler, where, ids)

    def sample(contents: Contents) -> Batch:
        first, positions = buffer.sampling.choose(contents, count, buffer.sample_window_size, sampler)
        starts = contents.rows_of(positions, first.samples)
        spans = _spans(contents, positions, starts, n, ends)
        last = last_of(spans.mask)
        end = spans.rows[np.arange(len(last)), last]
        values = _read(contents, positions, starts, columns)
        after = [name for name in values if name.startswith("next_obs.")]
        if after:
            values |= _read(contents, positions, end, after)
        rewards = _read(contents, positions, spans.rows, ["rewards"])["rewards"]
        rewards = rewards.float() if rewards.dtype.itemsize == 1 else rewards  # torch does not promote eight-bit floats
        factors = torch.from_numpy(discounts(n, gamma)).to(torch.promote_types(rewards.dtype, torch.float32))
        shape = (*spans.mask.shape, *[1] * (rewards.dim() - 2))
        discounted = rewards * factors.reshape(1, *shape[1:])
        # Selected, not multiplied by 0: values beyond the end may be NaN.
        values["rewards"] = torch.where(torch.from_numpy(spans.mask).reshape(shape), discounted, 0).sum(1)
        terminated = _any(contents, positions, end, [terminations])
        bootstrap = np.where(terminated, 0.0, gamma ** (last + 1.0)).astype(np.float32)
        alike = torch.from_numpy(bootstrap).reshape(-1, *shape[2:])
        more = {"bootstrap": alike, "steps": torch.from_numpy(last + 1)}
        return Batch({**nest(values), **more}, first)

    return buffer.sampling.together(sampler, sample)


def sample_hindsight(
    buffer: Reader,
    count: int,
    *,
    goal: str,
    achieved: str,
    reward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    share: float = 0.8,
    strategy: Literal["future", "final"] = "future",
    horizon: int = 1000,
    sampler: Sampler | None = None,
    where: str | None = None,
    ids: Ids | None = None,
    columns: Sequence[str] | None = None,
    ends: Ends = ("dones",),
) -> Batch:
    """Draw transitions, some relabelled with a goal that was achieved later in their episode.

    Source: Andrychowicz et al., "Hindsight Experience Replay", 2017, section 3.3.

    Args:
        buffer: to draw from.
        count: number of transitions; without a sampler at most as many as the window has, with a warning once.
        goal: dotted name of the column of goals below ``curr_obs``; the column of the same name below ``next_obs`` is
            relabelled too, if it exists.
        achieved: dotted name of the column of achieved goals, usually below ``next_obs``.
        reward: given achieved and goal, both ``[k, ...]``, returns the rewards of k relabelled transitions, in the
            shape of the column ``rewards`` ``[k, ...]``.
        share: probability that a transition is relabelled.
        strategy: take the new goal uniformly from this and later steps of the episode, or from its last step.
        horizon: limit on the steps ahead; longer episodes are an error, since goals beyond would not be drawn.
        sampler: chooses the transitions instead of a uniform draw.
        where: draw only trajectories that match, see :meth:`Reader.sample`.
        ids: draw only these trajectories.
        columns: dotted names of the columns wanted, including those above; None = all.
        ends: columns in which a true value ends an episode with this step.

    Returns:
        A nested dict of tensors ``[count, ...]``, and ``"relabelled"`` ``[count]``, true where the goal was replaced.

    Raises:
        EmptyBufferError: there is nothing to draw from.
        SchemaMismatchError: a column is absent.
        ConfigurationError: an argument is out of range, or ``reward`` returns another shape.
    """
    count, share, horizon = whole("count", count, 1), finite("share", share, 0.0, 1.0), whole("horizon", horizon, 0)
    one_of("strategy", strategy, ("future", "final"))
    ends, columns = _checked(buffer, ends), columns_or_none(columns)
    text("goal", goal), text("achieved", achieved)
    check_instance("reward", reward, Callable, "a function of achieved and goal")

    sampler = buffer.selected(sampler, where, ids)

    def sample(contents: Contents) -> tuple[Drawn, dict[str, torch.Tensor], list[str], IntArray, torch.Tensor]:
        first, positions = buffer.sampling.choose(contents, count, buffer.sample_window_size, sampler)
        starts = contents.rows_of(positions, first.samples)
        values = _read(contents, positions, starts, columns)
        names = [resolved(name, values) for name in (goal, achieved, "rewards")]
        for name in names:
            if name not in values:
                raise SchemaMismatchError(f"column {name}: absent; there are {', '.join(sorted(values))}")
        chance = uniform(2 * len(first), buffer.sampling.generator)
        chosen = np.flatnonzero(chance[: len(first)] < share)
        if not len(chosen):
            return first, values, names, chosen, torch.empty(0)
        positions, samples = positions[chosen], starts[chosen]
        steps, batch = contents.index.at("steps", positions), contents.index.at("batch", positions)
        longest = int((steps - samples // batch).max())
        if longest > horizon:
            raise ConfigurationError(f"horizon: {horizon}, but {longest} steps follow a drawn one; allow as many")
        spans = _spans(contents, positions, samples, longest, ends)
        last = last_of(spans.mask)
        later = chance[len(first) :][chosen] * (last + 1)
        pick = last if strategy == "final" else np.minimum(later.astype(np.int64), last)
        rows = spans.rows[np.arange(len(pick)), pick]
        return first, values, names, chosen, _read(contents, positions, rows, names[1:2])[names[1]]

    first, values, (goal, achieved, _), chosen, goals = buffer.sampling.together(sampler, sample)
    relabelled = torch.zeros(len(first), dtype=torch.bool)
    if len(chosen):
        rows = torch.from_numpy(chosen)
        if goals.shape[1:] != values[goal].shape[1:]:
            raise ConfigurationError(
                f"goal {goal} is {list(values[goal].shape[1:])}, achieved {achieved} {list(goals.shape[1:])}: "
                "both must have one shape"
            )
        for name in (goal, goal.replace("curr_obs.", "next_obs.", 1)):
            if name in values:
                values[name][rows] = goals.to(values[name].dtype)
        rewards = reward(values[achieved][rows], goals)
        if rewards.shape != values["rewards"][rows].shape:
            raise ConfigurationError(
                f"reward returned {list(rewards.shape)}, must be {list(values['rewards'][rows].shape)}"
            )
        values["rewards"][rows] = rewards.to(values["rewards"].dtype)
        relabelled[rows] = True
    return Batch({**nest(values), "relabelled": relabelled}, first)


def _checked(buffer: Any, ends: Any) -> Ends:
    check_instance("buffer", buffer, Reader, "a TrajectoryReplayBuffer")
    return texts("ends", ends)


# -- spans -------------------------------------------------------------------------------------------


def _spans(contents: Contents, positions: IntArray, samples: IntArray, length: int, ends: Ends) -> _Spans:
    """Return the spans from these samples of trajectories; with the lock of the contents held."""
    steps, batch = (contents.index.at(name, positions).astype(np.int64) for name in ("steps", "batch"))
    rows, inside = rows_after(samples, steps, batch, length)
    ended = _any(contents, positions, rows, ends)
    if contents.index.may_be_partial:
        valid = contents.are_valid(np.repeat(positions, length), rows.reshape(-1))
        inside &= True if valid is None else np.logical_and.accumulate(valid.reshape(rows.shape), axis=1)
    mask = within_episode(inside, ended)
    if not ends:
        contents.schemas(positions)  # notes the epochs, which RLinf's index lacks
    epochs = contents.index.at("extra", positions).astype(np.int64)
    span, step = np.nonzero(mask & epoch_starts(samples, steps, batch, epochs, length))
    if len(span):
        broken = ~_continues(contents, positions[span], rows[span, step - 1], rows[span, step])
        ended[span[broken], step[broken] - 1] = True
        mask = within_episode(inside, ended)
    last = np.take_along_axis(rows, last_of(mask)[:, None], axis=1)
    return _Spans(np.where(mask, rows, last), mask)


def _continues(contents: Contents, positions: IntArray, before: IntArray, after: IntArray) -> Mask:
    """Return, for pairs of rows, whether the next observation of one equals the observation of the other, all ``[n]``.

    All observations that both have are compared, byte by byte; without any, the answer is False.
    """
    pairs, of_each = np.unique(np.stack([positions, before, after]), axis=1, return_inverse=True)
    same: Mask = np.zeros(pairs.shape[1], np.bool_)
    schemas = contents.schemas(pairs[0])
    for schema in dict.fromkeys(schemas):
        at = np.flatnonzero([other == schema for other in schemas])
        for name in schema.observed_twice:
            if not len(at):
                break
            last, first = (
                _read(contents, pairs[0, at], rows[at], [f"{field}.{name}"])[f"{field}.{name}"].reshape(len(at), -1)
                for field, rows in (("next_obs", pairs[1]), ("curr_obs", pairs[2]))
            )
            equal = (last.view(torch.uint8) == first.view(torch.uint8)).all(dim=1).numpy()
            at = at[equal]
        same[at] = bool(schema.observed_twice)
    return same[of_each.reshape(-1)]


def _has_whole(buffer: Reader, contents: Contents, count: int, length: int, ends: Ends) -> Fits:
    """Return a function that accepts starts with ``length`` steps after them; others are drawn again."""
    in_vain = 0

    def fits(ids: IntArray, samples: IntArray) -> Mask:
        nonlocal in_vain
        positions = buffer.sampling.rows(contents, Drawn(ids, samples))
        starts = contents.rows_of(positions, samples)
        good: Mask = np.asarray(_spans(contents, positions, starts, length, ends).mask.all(axis=1), np.bool_)
        in_vain = 0 if good.any() else in_vain + len(ids)
        if in_vain >= max(_IN_VAIN, count):
            raise EmptyBufferError(
                f"of {in_vain} drawn steps, none has {length - 1} more of its episode after it; "
                "ask for shorter sequences, or pad=True"
            )
        return good

    return fits


def _any(contents: Contents, positions: IntArray, rows: IntArray, names: Sequence[str]) -> Mask:
    """Return, for rows ``[n]`` or ``[n, k]``, whether any value in these columns is true."""
    columns = _read(contents, positions, rows, names) if names else {}
    result = np.zeros(rows.shape, np.bool_)
    for tensor in columns.values():
        result |= tensor.reshape(*rows.shape, -1).bool().any(-1).numpy()
    return result


def _read(
    contents: Contents, positions: IntArray, rows: IntArray, columns: Sequence[str] | None
) -> dict[str, torch.Tensor]:
    """Return columns of rows ``[n]`` or ``[n, k]`` as tensors ``[*rows, ...]``; with the lock of the contents held."""
    of_each = np.repeat(positions, rows.size // len(positions))
    values = contents.plan(of_each, rows.reshape(-1), contents.index.first, columns).read(None)
    return {name: tensor.reshape(*rows.shape, *tensor.shape[1:]) for name, tensor in values.items()}
