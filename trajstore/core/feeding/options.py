"""What loaders can be told, each option in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypedDict, get_args

import numpy as np
import numpy.typing as npt
import torch

from trajstore.core.base.arguments import (
    check_kind,
    columns_or_none,
    finite,
    one_of,
    rank_of_ranks,
    seconds_or_none,
    text,
    truth,
    whole,
)
from trajstore.core.columns.limits import shown
from trajstore.core.sampling.base import Drawn, Sampler, Unit
from trajstore.errors import ConfigurationError

Layout = Literal["packed", "padded"]
LongTrajectories = Literal["refuse", "skip", "alone"]


Stores = Literal["shared", "per_rank"]
"""What W ranks draw from: one store, or each from its own."""


class ByIds(Protocol):
    """Facts of trajectories by arrays of ids: see :class:`trajstore.core.buffer.sampling.Sampling`."""

    def names_of(self, trajectory_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...
    def readable(self, trajectory_ids: npt.NDArray[np.int64] | Drawn) -> npt.NDArray[np.bool_]: ...


class Replay(Protocol):
    """What batches of transitions are drawn from.

    A :class:`~trajstore.TrajectoryReplayBuffer`, or a :class:`~trajstore.distributed.DistributedReplayBuffer`. A
    loader's thread calls it while others do, so it guards itself.
    """

    @property
    def sampling(self) -> ByIds: ...
    @property
    def closed(self) -> bool: ...
    @property
    def grows(self) -> bool: ...
    @property
    def share(self) -> tuple[int, int] | None: ...
    @property
    def store_ids(self) -> list[str]: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def sample_window_size(self) -> int: ...
    @property
    def trajectory_ids(self) -> npt.NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def is_ready(self, min_size: int) -> bool: ...
    def draw(self, num_chunks: int, *, sampler: Sampler | None = None) -> Drawn: ...
    def read(
        self, drawn: Drawn, *, columns: Sequence[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Any]: ...
    def follow(self, sampler: Sampler) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class LoaderOptions(TypedDict, total=False):
    """Options of every loader.

    Attributes:
        sampler: chooses instead of the buffer's uniform draws.
        min_size: trajectories that the buffer must hold before the first batch (1).
        columns: names of the columns to read; None = all.
        rank: (r, W): this is rank r of W, and gets its part of every global batch; all ranks draw the same batches,
            and their parts together are that batch, whatever W is ((0, 1)).
        stores: ``"shared"``: all ranks read one store, or copies of it, and so draw the same batches; ``"per_rank"``:
            each rank has a store of its own, and draws its part of ``batch_size`` from that (``"shared"``).
        prefetch: batches that are kept ready (4).
        prefetch_bytes: bytes of batches that are kept ready; None = no bound.
        device: where batches go; a CUDA device gets them through pinned memory, on a stream of its own (CPU).
        timeout: seconds after which ``next`` raises TimeoutError; None waits for as long as it takes.
    """

    sampler: Sampler | None
    min_size: int
    columns: Sequence[str] | None
    rank: tuple[int, int]
    stores: Stores
    prefetch: int
    prefetch_bytes: int | None
    device: torch.device | str | None
    timeout: float | None


class BatchOptions(LoaderOptions, total=False):
    """Options of :class:`~trajstore.core.feeding.ReplayLoader`, beside those of every loader.

    Attributes:
        demos: buffer of demonstrations that are mixed into each batch.
        demo_share: which part of a batch they are, rounded down to whole transitions (0.5).
        min_demo_size: trajectories that ``demos`` must hold before the first batch (1).
        demo_sampler: chooses from ``demos`` instead of its uniform draws.
        common_columns: batches have the columns that rollouts and demonstrations both have, in the wider dtype, and a
            warning names the others; else both must have the same (False).
        reuse: batches on the CPU take turns in the same memory; each is valid until the next one is asked for (False).
    """

    demos: Replay | None
    demo_share: float
    min_demo_size: int
    demo_sampler: Sampler | None
    common_columns: bool
    reuse: bool


class TokenOptions(LoaderOptions, total=False):
    """Options of :class:`~trajstore.core.feeding.TokenLoader`, beside those of every loader.

    Attributes:
        layout: ``"packed"``: trajectories stand one after the other; ``"padded"``: below each other, each filled up to
            the longest ("packed").
        batch_size: packs of a global batch; ranks share them out (1).
        lookahead: trajectories that are drawn ahead, among which a pack finds those that still fit (32).
        long: what becomes of a trajectory that is longer than the budget, or has no tokens: ``"refuse"`` is an error,
            ``"skip"`` leaves it out and counts it, ``"alone"`` gives a long one a pack of its own beyond the budget
            ("refuse").
        pad_id: token with which padded rows are filled up (0).
    """

    layout: Layout
    batch_size: int
    lookahead: int
    long: LongTrajectories
    pad_id: int


def check_options(who: str, options: Mapping[str, Any], known: type[Any]) -> None:
    """Refuse options that there are not.

    Args:
        who: takes them.
        options: by name.
        known: the TypedDict that names them.

    Raises:
        ConfigurationError: names the unknown one, and those that there are.
    """
    check_values(options)
    unknown = sorted(options.keys() - known.__annotations__.keys() - LoaderOptions.__annotations__.keys())
    if unknown:
        raise ConfigurationError(f"{who} has no option {unknown[0]!r}; there are {', '.join(known.__annotations__)}")


def check_replay(name: str, value: Any) -> None:
    """Refuse what batches cannot be drawn from.

    Raises:
        ConfigurationError: it is no buffer, and no handle of stores.
    """
    if isinstance(value, type) or not all(hasattr(value, part) for part in ("draw", "read", "sampling")):
        raise ConfigurationError(
            f"{name}: {shown(value)} is a {type(value).__name__}, must be a TrajectoryReplayBuffer or a handle"
        )


def check_values(options: Mapping[str, Any]) -> None:
    """Refuse values of options that are of no use, whichever loader takes them.

    Raises:
        ConfigurationError: names the option.
    """
    for name, value in options.items():
        if name in _CHECKS and not (value is None and name in _OR_NONE):
            _CHECKS[name](name, value)


_SAMPLER = partial(
    check_kind, kind=Sampler, wanted="a sampler of trajstore.core.sampling (sampler_of makes one of a dict)"
)
_AT_LEAST_0, _AT_LEAST_1 = partial(whole, least=0), partial(whole, least=1)

_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(("sampler", "demo_sampler"), _SAMPLER),
    "demos": check_replay,
    **dict.fromkeys(("min_size", "min_demo_size"), _AT_LEAST_0),
    **dict.fromkeys(("prefetch", "prefetch_bytes", "lookahead", "batch_size"), _AT_LEAST_1),
    "pad_id": partial(whole, least=-(1 << 63)),
    "columns": lambda _, value: columns_or_none(value),
    "timeout": seconds_or_none,
    **dict.fromkeys(("reuse", "common_columns"), truth),
    "demo_share": partial(finite, least=0.0, most=1.0),
    "stores": partial(one_of, known=get_args(Stores)),
    "layout": partial(one_of, known=get_args(Layout)),
    "long": partial(one_of, known=get_args(LongTrajectories)),
}
"""What looks at the value of each option, by its name."""

_OR_NONE = ("prefetch_bytes", "min_demo_size", "demos", "demo_share")


def device_of(value: Any) -> torch.device | None:
    """Return the device that an option names; None for the CPU.

    Raises:
        ConfigurationError: it names none.
    """
    if value is None or isinstance(value, torch.device):
        return value
    try:
        return torch.device(text("device", value))
    except RuntimeError as error:
        raise ConfigurationError(f"device: {shown(value)}, must be 'cpu', 'cuda' or 'cuda:0' and the like") from error


def check_rank(rank: tuple[int, int], batch_size: int) -> None:
    """Refuse a rank that is none of its world, and more ranks than a batch has parts.

    Raises:
        ConfigurationError: says which.
    """
    whole("batch_size", batch_size, 1)
    rank_of_ranks("rank", rank)
    if batch_size < rank[1]:
        raise ConfigurationError(f"batch_size: {batch_size}, must be at least the number of ranks, {rank[1]}")


def share_of_batch(options: LoaderOptions, batch_size: int, buffer: Replay) -> tuple[tuple[int, int], int]:
    """Return which part of each batch that it draws a loader reads, and how large that batch is.

    Args:
        options: the loader's.
        batch_size: of the global batch.
        buffer: from which it draws.

    Raises:
        ConfigurationError: rank or stores are none, or the buffer shows one rank's share of a store that ranks are to
            read as a whole, or has no seed.
    """
    rank, stores = options.get("rank", (0, 1)), options.get("stores", "shared")
    check_rank(rank, batch_size)
    if stores == "per_rank":
        low, high = (batch_size * number // rank[1] for number in (rank[0], rank[0] + 1))
        return (0, 1), high - low
    share = buffer.share
    if rank[1] > 1 and share is not None:
        raise ConfigurationError(
            f"rank: {rank} of a shared store, but the buffer shows the share {share} alone, so ranks would draw "
            "different batches; load it whole, or say stores='per_rank'"
        )
    if rank[1] > 1 and buffer.seed is None:
        raise ConfigurationError(
            f"rank: {rank} of a shared store, but the buffer has no seed, so ranks would draw different batches; give "
            "all ranks the same seed and sample_window_size, or say stores='per_rank'"
        )
    return rank, batch_size


def check_sampler(name: str, sampler: Sampler | None, unit: Unit) -> None:
    """Refuse a sampler that draws something else.

    Raises:
        ConfigurationError: says what it draws.
    """
    if sampler is not None and sampler.unit != unit:
        drawn = {"sample": "transitions", "trajectory": "whole trajectories"}
        raise ConfigurationError(
            f"{name}: draws {drawn[sampler.unit]}, and these batches are made of {drawn[unit]}; give it unit={unit!r}"
        )
