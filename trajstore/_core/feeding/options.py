"""Options of loaders, each defined once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypedDict, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from trajstore._core.base.arguments import (
    check_kind,
    columns_or_none,
    one_of,
    rank_of_ranks,
    seconds_or_none,
    text,
    truth,
    whole,
)
from trajstore._core.buffer.sequences import Rows
from trajstore._core.columns.limits import shown
from trajstore._core.sampling.base import Drawn, Ids, Sampler, Unit
from trajstore.errors import ConfigurationError

Layout = Literal["packed", "padded"]
LongTrajectories = Literal["refuse", "skip", "alone"]


Stores = Literal["shared", "per_rank"]
"""Stores of W ranks: one for all, or one per rank."""


class ByIds(Protocol):
    """Facts of trajectories by id arrays, see :class:`trajstore._core.buffer.sampling.Sampling`."""

    def continue_draws(self) -> None: ...
    def names_of(self, trajectory_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...
    def readable(self, trajectory_ids: npt.NDArray[np.int64] | Drawn) -> npt.NDArray[np.bool_]: ...


class Replay(Protocol):
    """Source of transition batches.

    A :class:`~trajstore.TrajectoryReplayBuffer` or a :class:`~trajstore.distributed.DistributedReplayBuffer`. It must
    be thread-safe, because a loader's thread uses it too.
    """

    @property
    def _sampling(self) -> ByIds: ...
    @property
    def _closed(self) -> bool: ...
    @property
    def _grows(self) -> bool: ...
    @property
    def _share(self) -> tuple[int, int] | None: ...
    @property
    def _store_ids(self) -> list[str]: ...
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
    def _update(self, sampler: Sampler, where: str | None, ids: Ids | None) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class RowLedger(Protocol):
    """Records the rows of batches; a :class:`trajstore.ledger.Ledger`."""

    def record_batch(
        self, number: int, columns: Mapping[str, npt.NDArray[Any]], policy_version: int | None = None
    ) -> None: ...


class LoaderOptions(TypedDict, total=False):
    """Options of every loader.

    Attributes:
        sampler: sampler to use instead of the buffer's uniform draws.
        where: draw only trajectories of the buffer that match this condition on facts, as for ``query().where``. It is
            evaluated before each draw, so that new trajectories that match join.
        ids: draw only these trajectories of the buffer.
        min_size: minimum trajectories in the buffer before the first batch (1).
        columns: names of the columns to read; None = all.
        rank: (r, W): rank r of W, which gets its part of every global batch. All ranks draw the same batches; their
            parts add up to the whole batch for any W ((0, 1)).
        stores: ``"shared"``: all ranks read one store, or copies of it, and draw the same batches; ``"per_rank"``: each
            rank draws its part of ``batch_size`` from its own store (``"shared"``).
        ledger: a :class:`trajstore.ledger.Ledger` that records the rows of each batch before ``next`` returns it; one
            for each rank. See ``Loader.policy_version``.
        prefetch: number of batches kept ready (4).
        device: target device of batches; CUDA uses pinned memory and a separate stream (CPU).
        timeout: seconds until ``next`` raises TimeoutError; None = wait forever.
    """

    sampler: Sampler | None
    where: str | None
    ids: Ids | None
    min_size: int
    columns: Sequence[str] | None
    rank: tuple[int, int]
    stores: Stores
    ledger: RowLedger | None
    prefetch: int
    device: torch.device | str | None
    timeout: float | None


class BatchOptions(LoaderOptions, total=False):
    """Options of :class:`~trajstore.loader.ReplayLoader`, beside those of every loader.

    Attributes:
        rows: what each row is: ``Sequences(length)``, ``NStep(n, gamma)`` or ``Hindsight(...)`` of
            ``trajstore._core.buffer.sequences``, as for ``sample_sequences`` and so on; None = single transitions.
        common_columns: batches of several buffers have only the columns that all have, in the wider dtype; a warning
            names the others. If False, all must have the same columns (False).
        reuse: CPU batches share rotating memory; each is valid until the next is requested (False).
    """

    rows: Rows | None
    common_columns: bool
    reuse: bool


class TokenOptions(LoaderOptions, total=False):
    """Options of :class:`~trajstore.loader.TokenLoader`, beside those of every loader.

    Attributes:
        layout: ``"packed"``: trajectories are concatenated; ``"padded"``: one per row, padded to the longest
            ("packed").
        batch_size: packs per global batch, divided among ranks (1).
        long: treatment of trajectories that exceed the budget or have no tokens: ``"refuse"`` raises, ``"skip"`` drops
            and counts them, ``"alone"`` puts a long one in a pack of its own beyond the budget ("refuse").
        pad_id: padding token (0).
    """

    layout: Layout
    batch_size: int
    long: LongTrajectories
    pad_id: int


def check_options(who: str, options: Mapping[str, Any], known: type[Any]) -> None:
    """Reject unknown options.

    Args:
        who: receiver of the options.
        options: by name.
        known: TypedDict of the known options.

    Raises:
        ConfigurationError: an option is unknown; names it and the known ones.
    """
    check_values(options)
    unknown = sorted(options.keys() - known.__annotations__.keys() - LoaderOptions.__annotations__.keys())
    if unknown:
        raise ConfigurationError(f"{who} has no option {unknown[0]!r}; there are {', '.join(known.__annotations__)}")


def check_replay(name: str, value: Any) -> None:
    """Reject objects that cannot be sampled.

    Raises:
        ConfigurationError: it is neither a buffer nor a handle of stores.
    """
    if isinstance(value, type) or not all(hasattr(value, part) for part in ("draw", "read", "_sampling")):
        raise ConfigurationError(
            f"{name}: {shown(value)} is a {type(value).__name__}, must be a TrajectoryReplayBuffer or a handle"
        )


def check_recorded(buffer: Any) -> None:
    """Reject buffers whose rows a ledger cannot name.

    Raises:
        ConfigurationError: it is a handle, or shows several stores.
    """
    if not hasattr(buffer._sampling, "origins") or len(buffer._store_ids) > 1:
        raise ConfigurationError(
            "ledger: has the ids of one store, and the buffer is a handle or shows several; open one store, or use "
            "stores='per_rank' with a ledger for each rank"
        )


def check_values(options: Mapping[str, Any]) -> None:
    """Reject invalid values of options shared by all loaders.

    Raises:
        ConfigurationError: a value is invalid; names the option.
    """
    for name, value in options.items():
        if name in _CHECKS:
            _CHECKS[name](name, value)


_SAMPLER = partial(
    check_kind, kind=Sampler, wanted="a sampler of trajstore._core.sampling (sampler_of makes one of a dict)"
)
_AT_LEAST_0, _AT_LEAST_1 = partial(whole, least=0), partial(whole, least=1)

_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "sampler": _SAMPLER,
    "ledger": partial(check_kind, kind=RowLedger, wanted="a trajstore.ledger.Ledger"),
    "min_size": _AT_LEAST_0,
    **dict.fromkeys(("prefetch", "batch_size"), _AT_LEAST_1),
    "pad_id": partial(whole, least=-(1 << 63)),
    "columns": lambda _, value: columns_or_none(value),
    "timeout": seconds_or_none,
    **dict.fromkeys(("reuse", "common_columns"), truth),
    "rows": partial(check_kind, kind=Rows, wanted="Sequences, NStep or Hindsight of trajstore._core.buffer.sequences"),
    "stores": partial(one_of, known=get_args(Stores)),
    "layout": partial(one_of, known=get_args(Layout)),
    "long": partial(one_of, known=get_args(LongTrajectories)),
}
"""Check for each option's value, by name."""


def device_of(value: Any) -> torch.device | None:
    """Return the device named by an option; None for the CPU.

    Raises:
        ConfigurationError: the device is invalid.
    """
    if value is None or isinstance(value, torch.device):
        return value
    try:
        return torch.device(text("device", value))
    except RuntimeError as error:
        raise ConfigurationError(f"device: {shown(value)}, must be 'cpu', 'cuda' or 'cuda:0' and the like") from error


def share_of_batch(options: LoaderOptions, batch_size: int, buffer: Replay) -> tuple[tuple[int, int], int]:
    """Return the part of each drawn batch that a loader reads, and the drawn batch's size.

    Args:
        options: options of the loader.
        batch_size: size of the global batch.
        buffer: buffer to draw from.

    Raises:
        ConfigurationError: rank or batch_size are invalid; the buffer shows one rank's share of a store that ranks must
            read whole; or it has no seed.
    """
    batch_size, rank = whole("batch_size", batch_size, 1), rank_of_ranks("rank", options.get("rank", (0, 1)))
    if batch_size < rank[1]:
        raise ConfigurationError(f"batch_size: {batch_size}, must be at least the number of ranks, {rank[1]}")
    if options.get("stores", "shared") == "per_rank":
        low, high = (batch_size * number // rank[1] for number in (rank[0], rank[0] + 1))
        return (0, 1), high - low
    share = buffer._share
    if rank[1] > 1 and share is not None:
        raise ConfigurationError(
            f"rank: {rank} of a shared store, but the buffer shows the share {share} only, so ranks would draw "
            "different batches; load it whole, or pass stores='per_rank'"
        )
    if rank[1] > 1 and buffer.seed is None:
        raise ConfigurationError(
            f"rank: {rank} of a shared store, but the buffer has no seed, so ranks would draw different batches; give "
            "all ranks the same seed and sample_window_size, or pass stores='per_rank'"
        )
    return rank, batch_size


def check_sampler(name: str, sampler: Sampler | None, unit: Unit) -> None:
    """Reject a sampler with another unit.

    Raises:
        ConfigurationError: the unit differs; names it.
    """
    if sampler is not None and sampler.unit != unit:
        drawn = {"sample": "transitions", "trajectory": "whole trajectories"}
        raise ConfigurationError(
            f"{name}: draws {drawn[sampler.unit]}, and these batches are made of {drawn[unit]}; give it unit={unit!r}"
        )
