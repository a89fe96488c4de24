"""Memory that batches are read into: fresh, used again, or pinned and copied to a device on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trajstore.core.columns.fields import unnest
from trajstore.core.feeding.device import Arrival, CudaDevice, Device
from trajstore.errors import ConfigurationError

Tensors = dict[str, torch.Tensor]
Reader = Callable[[Mapping[str, torch.Tensor] | None], Any]
"""Reads a batch into the tensors given, by dotted name, or into fresh ones."""


@dataclass(slots=True)
class Ready:
    """A batch, and what says that it has arrived where it is to be.

    Attributes:
        values: the batch: dicts and lists of tensors and of other values.
        arrival: of the copy to the device; None where there was none.
    """

    values: Any
    arrival: Arrival | None = None

    def take(self) -> Any:
        """Return the batch for use on the current stream, which waits for the copy; the host does not."""
        if self.arrival is not None:
            self.arrival.use(list(tensors_of(self.values)))
        return self.values


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of nested dicts and lists, always in the same order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensors_of(item)


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return nested dicts and lists with other tensors, given in the order of :func:`tensors_of`."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    return [with_tensors(item, tensors) for item in value] if isinstance(value, list) else value


def nbytes_of(values: Any) -> int:
    """Return the bytes of all tensors of a batch."""
    return sum(tensor.nbytes for tensor in tensors_of(values))


class FreshMemory:
    """Each batch has memory of its own, which the consumer may keep."""

    def read(self, reader: Reader, count: int) -> Ready:
        """Return the batch that ``reader`` reads, ``count`` rows."""
        return Ready(reader(None))


class ReusedMemory:
    """Batches take turns in the same memory: one is valid until the next one is asked for.

    Args:
        batches: how many may exist at a time: those finished, the one being read, the one in use.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._turns: deque[Tensors] = deque()

    def read(self, reader: Reader, count: int) -> Ready:
        """Return the batch that ``reader`` reads, ``count`` rows, in the memory whose turn it is."""
        if len(self._turns) < self._batches:
            values = reader(None)
            self._turns.append(unnest(values))
            return Ready(values)
        target = self._turns.popleft()
        filled = _read_into(reader, target, count)
        if filled is None:  # the columns have changed: the memory of the old ones goes
            self._turns.clear()
            return self.read(reader, count)
        self._turns.append(target)
        return Ready(filled)


class DeviceMemory:
    """Batches are read into pinned memory, and copied from there to a device.

    The pinned memory of a batch is used again when its copy has ended; nobody waits for that unless all of it is busy.

    Args:
        device: where batches go.
        batches: how many copies may be under way.
        reuse: batches have the same columns and at most as many rows, so that one's memory fits another.
    """

    def __init__(self, device: Device, batches: int, *, reuse: bool = True) -> None:
        self._device = device
        self._batches = batches
        self._reuse = reuse
        self._busy: deque[tuple[Arrival, Any]] = deque()

    def read(self, reader: Reader, count: int) -> Ready:
        """Return the batch that ``reader`` reads, ``count`` rows, on its way to the device."""
        free = self._free()
        values = None if free is None or not self._reuse else _read_into(reader, free, count)
        pinned = free
        if values is None:
            fresh = reader(None)
            values = with_tensors(fresh, (self._device.pin(tensor) for tensor in tensors_of(fresh)))
            pinned = unnest(values) if self._reuse else values
        moved, arrival = self._device.send(list(tensors_of(values)))
        self._busy.append((arrival, pinned))
        return Ready(with_tensors(values, iter(moved)), arrival)

    def _free(self) -> Any:
        """Return pinned memory whose copy has ended; None while there is none and more may be made."""
        if not self._busy or (len(self._busy) < self._batches and not self._busy[0][0].done()):
            return None
        arrival, pinned = self._busy.popleft()
        arrival.wait()
        return pinned


Memory = FreshMemory | ReusedMemory | DeviceMemory


def memory_for(device: torch.device | None, depth: int, *, reuse: bool, even: bool) -> Memory:
    """Return the memory for batches of a loader that keeps ``depth`` of them ready.

    Args:
        device: where batches go; None = the CPU.
        depth: how many are kept ready.
        reuse: batches on the CPU take turns.
        even: batches have the same columns and at most as many rows as the first.

    Raises:
        ConfigurationError: the device is neither the CPU nor a CUDA device that is there.
    """
    if device is None or device.type == "cpu":
        return ReusedMemory(depth + 2) if reuse else FreshMemory()
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigurationError(f"device: {device}, must be the CPU or a CUDA device that is there")
    return DeviceMemory(CudaDevice(device), depth + 1, reuse=even)


def _read_into(reader: Reader, target: Tensors, count: int) -> dict[str, Any] | None:
    """Read into tensors that fit; None where the batch has other columns, or more rows."""
    if not target or any(len(tensor) < count for tensor in target.values()):
        return None
    try:
        values: dict[str, Any] = reader(target)
    except ConfigurationError:  # a column that the target lacks, or has in another shape
        return None
    return values if unnest(values).keys() == target.keys() else None
