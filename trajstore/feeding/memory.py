"""Memory that batches are read into: fresh, used again, or pinned and copied to a device on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trajstore.columns.fields import join_name, nest, walk
from trajstore.errors import ConfigurationError

Tensors = dict[str, torch.Tensor]
Reader = Callable[[Mapping[str, torch.Tensor] | None], dict[str, Any]]
"""Reads a batch into the tensors given, by dotted name, or into fresh ones."""


@dataclass(slots=True)
class Ready:
    """A batch, and what says that it has arrived where it is to be.

    Attributes:
        values: nested dict of tensors.
        arrived: CUDA event after the copy to the device; None where there was none.
    """

    values: dict[str, Any]
    arrived: Any = None

    def take(self) -> dict[str, Any]:
        """Return the batch for use on the current stream, which waits for the copy; the host does not."""
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.arrived.device)
            stream.wait_event(self.arrived)
            for _, tensor in walk(self.values):
                tensor.record_stream(stream)
        return self.values


def nbytes_of(values: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors of a batch."""
    return sum(tensor.nbytes for _, tensor in walk(values))


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
            self._turns.append(_flat(values))
            return Ready(values)
        target = self._turns.popleft()
        filled = _read_into(reader, target, count)
        if filled is None:  # the columns have changed: the memory of the old ones goes
            self._turns.clear()
            return self.read(reader, count)
        self._turns.append(target)
        return Ready(filled)


class DeviceMemory:
    """Batches are read into pinned memory and copied to a CUDA device on a stream of their own.

    The pinned memory of a batch is used again when its copy has ended; nobody waits for that unless all of it is busy.

    Args:
        device: where batches go.
        batches: how many copies may be under way.
    """

    def __init__(self, device: torch.device, batches: int) -> None:
        self._device = device
        self._batches = batches
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._busy: deque[tuple[Any, Tensors]] = deque()

    def read(self, reader: Reader, count: int) -> Ready:
        """Return the batch that ``reader`` reads, ``count`` rows, on its way to the device."""
        pinned = self._free()
        values = None if pinned is None else _read_into(reader, pinned, count)
        if values is None:
            fresh = _flat(reader(None))
            pinned = {name: tensor.pin_memory() for name, tensor in fresh.items()}
            values = nest(pinned)
        with torch.cuda.stream(self._stream):
            moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in _flat(values).items()}
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        self._busy.append((arrived, pinned or {}))
        return Ready(nest(moved), arrived)

    def _free(self) -> Tensors | None:
        if not self._busy or (len(self._busy) < self._batches and not self._busy[0][0].query()):
            return None
        arrived, pinned = self._busy.popleft()
        arrived.synchronize()
        return pinned


def memory_for(device: torch.device | None, reuse: bool, depth: int) -> FreshMemory | ReusedMemory | DeviceMemory:
    """Return the memory for batches of a loader that keeps ``depth`` of them ready.

    Raises:
        ConfigurationError: the device is neither the CPU nor a CUDA device that is there.
    """
    if device is None or device.type == "cpu":
        return ReusedMemory(depth + 2) if reuse else FreshMemory()
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigurationError(f"device: {device}, must be the CPU or a CUDA device that is there")
    return DeviceMemory(device, depth + 1)


def _read_into(reader: Reader, target: Tensors, count: int) -> dict[str, Any] | None:
    """Read into tensors that fit; None where the batch has other columns, or more rows."""
    if not target or any(len(tensor) < count for tensor in target.values()):
        return None
    try:
        values = reader(target)
    except ConfigurationError:  # a column that the target lacks, or has in another shape
        return None
    return values if _flat(values).keys() == target.keys() else None


def _flat(values: Mapping[str, Any]) -> Tensors:
    return {join_name(path): tensor for path, tensor in walk(values)}
