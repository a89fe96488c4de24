"""Batches of more than single steps: sequences, n-step transitions, hindsight goals."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch

from trajstore._core.base.arguments import check_instance, columns_or_none, finite, one_of, text, texts, truth, whole
from trajstore._core.base.types import IntArray
from trajstore._core.buffer.reader import Reader
from trajstore._core.buffer.sampling import Batch
from trajstore._core.columns.fields import nest, resolved
from trajstore._core.reading.contents import Contents
from trajstore._core.sampling.base import Drawn, Fits, Ids, Sampler, uniform
from trajstore._core.sampling.spans import Mask, discounts, epoch_starts, last_of, rows_around, within_episode
from trajstore.errors import ConfigurationError, EmptyBufferError, SchemaMismatchError

logger = logging.getLogger(__name__)

_IN_VAIN = 1000
"""Consecutive draws without a whole sequence before an error."""

_MOST_STEPS = 1 << 24
"""Largest number of steps in a span, all of which are read at once."""

_ENDS = "ends (the columns of episode ends; ends=() if every trajectory is one episode)"

_TERMINATIONS = "terminations (the column of terminal states; terminations='dones' if every end is one)"

Ends = Sequence[str]

Tensors = dict[str, torch.Tensor]

Reward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Rows(ABC):
    """The kind of a batch's rows, one for each drawn step; an option of :class:`~trajstore.loader.ReplayLoader`.

    Drawing and reading are separate, so that a loader draws the same batches as a direct call and reads them later.
    """

    @property
    def steps(self) -> int:
        """Maximum number of steps from the drawn one on."""
        return 1

    @property
    def settings(self) -> dict[str, Any]:
        """Kind and arguments, for the state of a loader; functions are left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {"kind": type(self).__name__} | {name: value for name, value in values.items() if not callable(value)}

    def choose(self, buffer: Reader, contents: Contents, count: int, sampler: Sampler | None) -> tuple[Drawn, IntArray]:
        """Draw steps within :meth:`Sampling.together`; return also the positions of their trajectories."""
        return buffer._sampling.choose(contents, count, buffer.sample_window_size, sampler)

    @abstractmethod
    def read(
        self, contents: Contents, drawn: Drawn, positions: IntArray, columns: Sequence[str] | None
    ) -> Callable[[], Tensors]:
        """Read the rows of drawn steps, with the lock held; the returned function completes them without it."""


@dataclass(frozen=True, slots=True)
class Sequences(Rows):
    """Sequences of steps of one environment, within an episode and a trajectory.

    With ``burn_in``, each sequence has the steps before it too, from which a recurrent policy computes its state.
    Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", 2019, section 3.

    Attributes:
        length: steps of each.
        pad: also draw starts less than ``length`` steps before an end; the last step is repeated and masked in
            ``mask``. Without it, the draw is uniform over starts of whole sequences.
        ends: columns in which a true value ends an episode with this step.
        burn_in: steps before the drawn one, whether ``pad`` is set or not. Where the episode or the trajectory has
            fewer, its first step is repeated and masked.
    """

    length: int
    pad: bool = False
    ends: Ends = ("dones",)
    burn_in: int = 0

    def __post_init__(self) -> None:
        _set(self, length=whole("length", self.length, 1, _MOST_STEPS), pad=truth("pad", self.pad))
        _set(self, burn_in=whole("burn_in", self.burn_in, 0, _MOST_STEPS), ends=texts("ends", self.ends))

    @property
    def steps(self) -> int:
        return self.length

    def choose(self, buffer: Reader, contents: Contents, count: int, sampler: Sampler | None) -> tuple[Drawn, IntArray]:
        fits = None if self.pad else _has_whole(buffer, contents, count, self.length, self.ends)
        return buffer._sampling.choose(contents, count, buffer.sample_window_size, sampler, fits)

    def read(
        self, contents: Contents, drawn: Drawn, positions: IntArray, columns: Sequence[str] | None
    ) -> Callable[[], Tensors]:
        samples = contents.rows_of(positions, drawn.samples)
        spans = _spans(contents, positions, samples, self.length, self.ends, self.burn_in)
        values = _read(contents, positions, spans.rows, columns)
        return lambda: {**values, "mask": torch.from_numpy(spans.mask)}


@dataclass(frozen=True, slots=True)
class NStep(Rows):
    """Transitions over n steps: the reward is the discounted sum, the next observation is from n steps later.

    Source: Sutton and Barto, "Reinforcement Learning", second edition, equation 7.1.

    Attributes:
        n: steps of each at most.
        gamma: discount of a step, in ``[0, 1]``.
        ends: columns in which a true value ends an episode with this step.
        terminations: column in which a true value is a terminal state, without bootstrapping.
    """

    n: int
    gamma: float
    ends: Ends = ("dones",)
    terminations: str = "terminations"

    def __post_init__(self) -> None:
        _set(self, n=whole("n", self.n, 1, _MOST_STEPS), gamma=finite("gamma", self.gamma, 0.0, 1.0))
        _set(self, ends=texts("ends", self.ends), terminations=text("terminations", self.terminations))

    @property
    def steps(self) -> int:
        return self.n

    def read(
        self, contents: Contents, drawn: Drawn, positions: IntArray, columns: Sequence[str] | None
    ) -> Callable[[], Tensors]:
        starts = contents.rows_of(positions, drawn.samples)
        spans = _spans(contents, positions, starts, self.n, self.ends)
        last = last_of(spans.mask)
        end = spans.rows[np.arange(len(last)), last]
        values = _read(contents, positions, starts, columns)
        after = [name for name in values if name.startswith("next_obs.")]
        if after:
            values |= _read(contents, positions, end, after)
        elif columns is None:
            _warn_of_no_next()
        rewards = _read(contents, positions, spans.rows, ["rewards"])["rewards"]
        rewards = rewards.float() if rewards.dtype.itemsize == 1 else rewards  # torch does not promote eight-bit floats
        factors = torch.from_numpy(discounts(self.n, self.gamma)).to(torch.promote_types(rewards.dtype, torch.float32))
        shape = (*spans.mask.shape, *[1] * (rewards.dim() - 2))
        discounted = rewards * factors.reshape(1, *shape[1:])
        # Selected, not multiplied by 0: values beyond the end may be NaN.
        values["rewards"] = torch.where(torch.from_numpy(spans.mask).reshape(shape), discounted, 0).sum(1)
        terminated = _any(contents, positions, end, [self.terminations], _TERMINATIONS)
        bootstrap = np.where(terminated, 0.0, self.gamma ** (last + 1.0)).astype(np.float32)
        alike = torch.from_numpy(bootstrap).reshape(-1, *shape[2:])
        return lambda: {**values, "bootstrap": alike, "steps": torch.from_numpy(last + 1)}


@dataclass(frozen=True, slots=True)
class Hindsight(Rows):
    """Transitions, some relabelled with a goal that was achieved later in their episode.

    Source: Andrychowicz et al., "Hindsight Experience Replay", 2017, section 3.3.

    Attributes:
        goal: dotted name of the column of goals below ``curr_obs``; the column of the same name below ``next_obs`` is
            relabelled too, if it exists.
        achieved: dotted name of the column of achieved goals, usually below ``next_obs``.
        reward: given achieved and goal, both ``[k, ...]``, returns the rewards of k relabelled transitions, in the
            shape of the column ``rewards`` ``[k, ...]``. A loader calls it in its thread.
        share: probability that a transition is relabelled.
        strategy: take the new goal uniformly from this and later steps of the episode, or from its last step.
        horizon: limit on the steps ahead; longer episodes are an error, since goals beyond would not be drawn.
        ends: columns in which a true value ends an episode with this step.
    """

    goal: str
    achieved: str
    reward: Reward
    share: float = 0.8
    strategy: Literal["future", "final"] = "future"
    horizon: int = 1000
    ends: Ends = ("dones",)

    def __post_init__(self) -> None:
        _set(self, share=finite("share", self.share, 0.0, 1.0), horizon=whole("horizon", self.horizon, 0))
        _set(self, ends=texts("ends", self.ends))
        one_of("strategy", self.strategy, ("future", "final"))
        text("goal", self.goal), text("achieved", self.achieved)
        check_instance("reward", self.reward, Callable, "a function of achieved and goal")

    def choose(self, buffer: Reader, contents: Contents, count: int, sampler: Sampler | None) -> tuple[Drawn, IntArray]:
        drawn, positions = buffer._sampling.choose(contents, count, buffer.sample_window_size, sampler)
        chances = uniform(2 * len(drawn), buffer._sampling.generator).reshape(2, -1).T
        return replace(drawn, chances=chances), positions

    def read(
        self, contents: Contents, drawn: Drawn, positions: IntArray, columns: Sequence[str] | None
    ) -> Callable[[], Tensors]:
        starts = contents.rows_of(positions, drawn.samples)
        values = _read(contents, positions, starts, columns)
        goal, achieved, rewards = (resolved(name, values) for name in (self.goal, self.achieved, "rewards"))
        for name in (goal, achieved, rewards):
            if name not in values:
                raise SchemaMismatchError(f"column {name}: absent; there are {', '.join(sorted(values))}")
        if drawn.chances is None:
            raise ConfigurationError("drawn: lacks the chances that draws for hindsight have")
        chosen = np.flatnonzero(drawn.chances[:, 0] < self.share)
        values["relabelled"] = torch.zeros(len(drawn), dtype=torch.bool)
        if not len(chosen):
            return lambda: values
        positions, samples = positions[chosen], starts[chosen]
        steps, batch = contents.index.at("steps", positions), contents.index.at("batch", positions)
        longest = int((steps - samples // batch).max())
        if longest > self.horizon:
            raise ConfigurationError(f"horizon: {self.horizon}, but {longest} steps follow a drawn one; allow as many")
        spans = _spans(contents, positions, samples, longest, self.ends)
        last = last_of(spans.mask)
        later = drawn.chances[chosen, 1] * (last + 1)
        pick = last if self.strategy == "final" else np.minimum(later.astype(np.int64), last)
        rows = spans.rows[np.arange(len(pick)), pick]
        goals = _read(contents, positions, rows, [achieved])[achieved]
        return lambda: self._relabelled(values, (goal, achieved), torch.from_numpy(chosen), goals)

    def _relabelled(self, values: Tensors, names: tuple[str, str], rows: torch.Tensor, goals: torch.Tensor) -> Tensors:
        goal, achieved = names
        if goals.shape[1:] != values[goal].shape[1:]:
            raise ConfigurationError(
                f"goal {goal} is {list(values[goal].shape[1:])}, achieved {achieved} {list(goals.shape[1:])}: "
                "both must have one shape"
            )
        for name in (goal, goal.replace("curr_obs.", "next_obs.", 1)):
            if name in values:
                values[name][rows] = goals.to(values[name].dtype)
        rewards = self.reward(values[achieved][rows], goals)
        if rewards.shape != values["rewards"][rows].shape:
            raise ConfigurationError(
                f"reward returned {list(rewards.shape)}, must be {list(values['rewards'][rows].shape)}"
            )
        values["rewards"][rows] = rewards.to(values["rewards"].dtype)
        values["relabelled"][rows] = True
        return values


def _set(rows: Rows, **values: object) -> None:
    """Set attributes of a frozen dataclass to their checked values."""
    for name, value in values.items():
        object.__setattr__(rows, name, value)


def sample_sequences(
    buffer: Reader,
    count: int,
    length: int,
    *,
    pad: bool = False,
    burn_in: int = 0,
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
        length: as in :class:`Sequences`, like ``pad``, ``burn_in`` and ``ends``.
        pad: also draw starts less than ``length`` steps before an end.
        burn_in: steps before the drawn one.
        sampler: chooses the starts instead of a uniform draw.
        where: draw only trajectories that match, see :meth:`Reader.sample`.
        ids: draw only these trajectories.
        columns: dotted names of the columns wanted; None = all.
        ends: columns in which a true value ends an episode with this step.

    Returns:
        A nested dict of tensors ``[count, burn_in + length, ...]``, and ``"mask"`` ``[count, burn_in + length]``, true
        for valid steps. Padded, it has no more sequences than the window has steps.
        An episode never continues in another trajectory, because no field identifies it, and continues in another
        rollout epoch only if the next ``curr_obs`` equals the last ``next_obs``.

    Raises:
        EmptyBufferError: there is nothing to draw from, or hardly a start with ``length`` steps after it.
        SchemaMismatchError: a column of ``ends`` is absent.
        ConfigurationError: an argument is out of range.
    """
    return _sample(buffer, count, Sequences(length, pad, ends, burn_in), sampler, where, ids, columns)


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

    Args:
        buffer: to draw from.
        count: number of transitions; without a sampler at most as many as the window has, with a warning once.
        n: as in :class:`NStep`, like ``gamma``, ``ends`` and ``terminations``.
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
    return _sample(buffer, count, NStep(n, gamma, ends, terminations), sampler, where, ids, columns)


def sample_hindsight(
    buffer: Reader,
    count: int,
    *,
    goal: str,
    achieved: str,
    reward: Reward,
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

    Args:
        buffer: to draw from.
        count: number of transitions; without a sampler at most as many as the window has, with a warning once.
        goal: as in :class:`Hindsight`, like ``achieved``, ``reward``, ``share``, ``strategy``, ``horizon``, ``ends``.
        achieved: dotted name of the column of achieved goals.
        reward: function of achieved and goal.
        share: probability that a transition is relabelled.
        strategy: take the new goal uniformly from this and later steps of the episode, or from its last step.
        horizon: limit on the steps ahead.
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
    rows = Hindsight(goal, achieved, reward, share, strategy, horizon, ends)
    return _sample(buffer, count, rows, sampler, where, ids, columns)


def _sample(
    buffer: Reader,
    count: int,
    rows: Rows,
    sampler: Sampler | None,
    where: str | None,
    ids: Ids | None,
    columns: Sequence[str] | None,
) -> Batch:
    """Draw and read under one lock, so that retention removes nothing in between."""
    count, columns = whole("count", count, 1), columns_or_none(columns)
    check_instance("buffer", buffer, Reader, "a TrajectoryReplayBuffer")
    sampler = buffer._selected(sampler, where, ids)

    def sample(contents: Contents) -> tuple[Drawn, Callable[[], Tensors]]:
        drawn, positions = rows.choose(buffer, contents, count, sampler)
        return drawn, rows.read(contents, drawn, positions, columns)

    drawn, complete = buffer._sampling.together(sampler, sample)
    return Batch(nest(complete()), drawn)


def draw_rows(buffer: Reader, rows: Rows, count: int, sampler: Sampler | None) -> Drawn:
    """Draw as a direct call does, without reading.

    Raises:
        EmptyBufferError: there is nothing to draw from.
    """
    return buffer._sampling.together(sampler, lambda contents: rows.choose(buffer, contents, count, sampler)[0])


def read_rows(buffer: Reader, rows: Rows, drawn: Drawn, columns: Sequence[str] | None) -> Tensors:
    """Read what :func:`draw_rows` drew, by dotted name.

    Raises:
        TrajectoryUnavailableError: a trajectory was evicted since.
    """

    def read(contents: Contents) -> Callable[[], Tensors]:
        return rows.read(contents, drawn, buffer._sampling.present(contents, drawn), columns)

    return buffer._sampling.together(None, read)()


@cache
def _warn_of_no_next() -> None:
    """Log a warning, once in a process."""
    logger.warning(
        "sample_n_step: the trajectories have no next_obs, so a batch has nothing whose value `bootstrap` discounts; "
        "record next_obs, or name the columns wanted in `columns`"
    )


@dataclass(frozen=True, slots=True)
class _Spans:
    """Rows of spans, and a mask of the valid ones, ``[n, burn_in + length]``."""

    rows: IntArray
    mask: Mask


# -- spans -------------------------------------------------------------------------------------------


def _spans(
    contents: Contents, positions: IntArray, samples: IntArray, length: int, ends: Ends, burn_in: int = 0
) -> _Spans:
    """Return the spans around these samples of trajectories; with the lock of the contents held."""
    steps, batch = (contents.index.at(name, positions).astype(np.int64) for name in ("steps", "batch"))
    offsets = np.arange(-burn_in, length)
    rows, inside = rows_around(samples, steps, batch, offsets)
    ended = _any(contents, positions, rows, ends, _ENDS)
    if contents.index.may_be_partial:
        valid = contents.are_valid(np.repeat(positions, len(offsets)), rows.reshape(-1))
        inside &= True if valid is None else valid.reshape(rows.shape)
    mask = within_episode(inside, ended, burn_in)
    if not ends:
        contents.schemas(positions)  # notes the epochs, which RLinf's index lacks
    epochs = contents.index.at("extra", positions).astype(np.int64)
    begins = epoch_starts(samples, steps, batch, epochs, offsets)
    span, step = np.nonzero(mask[:, :-1] & mask[:, 1:] & begins[:, 1:])
    if len(span):
        broken = ~_continues(contents, positions[span], rows[span, step], rows[span, step + 1])
        ended[span[broken], step[broken]] = True
        mask = within_episode(inside, ended, burn_in)
    first = burn_in - mask[:, :burn_in].sum(axis=1)
    last = burn_in + last_of(mask[:, burn_in:])
    nearest = np.clip(np.arange(len(offsets)), first[:, None], last[:, None])
    return _Spans(np.take_along_axis(rows, nearest, axis=1), mask)


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
        positions = buffer._sampling.positions_of_rows(contents, Drawn(ids, samples))
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


def _any(contents: Contents, positions: IntArray, rows: IntArray, names: Sequence[str], argument: str) -> Mask:
    """Return, for rows ``[n]`` or ``[n, k]``, whether any value in the columns of this argument is true."""
    try:
        columns = _read(contents, positions, rows, names) if names else {}
    except SchemaMismatchError as error:
        raise SchemaMismatchError(f"{argument}: {error}") from error
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
