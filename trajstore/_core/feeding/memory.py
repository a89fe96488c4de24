"""Batch memory: fresh, reused, or pinned and copied to a device on a separate stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from trajstore._core.columns.fields import unnest
from trajstore._core.feeding.blocks import address, located, packed
from trajstore._core.feeding.device import Arrival, CudaDevice, Device
from trajstore.errors import ConfigurationError

Tensors = dict[str, torch.Tensor]
Reader = Callable[[Mapping[str, torch.Tensor] | None], Any]
"""Reads a batch into given tensors by dotted name, or into fresh ones."""


@dataclass(slots=True)
class Ready:
    """A batch, and the completion of its copy.

    Attributes:
        values: the batch: nested dicts and lists of tensors and other values.
        arrival: the copy to the device; None if there was none.
        blocks: the device memory that the batch's tensors are in.
        columns: the batch's rows for the ledger of each buffer; None for a buffer without one.
    """

    values: Any
    arrival: Arrival | None = None
    blocks: Sequence[torch.Tensor] = ()
    columns: Sequence[Mapping[str, npt.NDArray[Any]] | None] = ()

    def take(self) -> Any:
        """Return the batch for the current stream, which waits for the copy; the host does not."""
        if self.arrival is not None:
            self.arrival.use(self.blocks)
        return self.values


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of nested dicts and lists, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensors_of(item)


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Replace the tensors in nested dicts and lists, in the order of :func:`tensors_of`."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    return [with_tensors(item, tensors) for item in value] if isinstance(value, list) else value


class FreshMemory:
    """Allocates fresh memory for each batch, which the consumer may keep."""

    def read(self, reader: Reader, count: int) -> Ready:
        """Return the batch read by ``reader``, ``count`` rows."""
        return Ready(reader(None))


class ReusedMemory:
    """Batches rotate through the same memory; each is valid until the next is requested.

    Args:
        batches: maximum number at a time: finished ones, the one being read, and the one in use.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._turns: deque[Tensors] = deque()

    def read(self, reader: Reader, count: int) -> Ready:
        """Return the batch read by ``reader``, ``count`` rows, in the memory next in rotation."""
        if len(self._turns) < self._batches:
            values = reader(None)
            self._turns.append(unnest(values))
            return Ready(values)
        target = self._turns.popleft()
        filled = _read_into(reader, target, count)
        if filled is None:  # columns changed: free the old memory
            self._turns.clear()
            return self.read(reader, count)
        self._turns.append(target)
        return Ready(filled)


class DeviceMemory:
    """Reads batches into pinned memory and copies them to a device, small tensors together (:mod:`.blocks`).

    Pinned memory is reused once its copy has finished; waits only if all of it is busy. It is copied as a whole, also
    for a batch with fewer rows than it has room for.

    Args:
        device: target device of the batches.
        batches: maximum number of running copies.
    """

    def __init__(self, device: Device, batches: int) -> None:
        self._device = device
        self._batches = batches
        self._busy: deque[tuple[Arrival, list[torch.Tensor], Tensors]] = deque()
        """Running copies, with their pinned blocks and the columns in these; none for a list of packs of any size."""

    def read(self, reader: Reader, count: int) -> Ready:
        """Return the batch read by ``reader``, ``count`` rows, with its copy started."""
        pinned, columns = self._free()
        values = _read_into(reader, columns, count)
        if values is None:
            values = reader(None)
        if not {*map(address, tensors_of(values))} <= {*map(address, pinned)}:
            pinned, tensors = packed(list(tensors_of(values)), self._device.pin)
            values = with_tensors(values, iter(tensors))
            columns = unnest(values) if isinstance(values, Mapping) else {}
        blocks, arrival = self._device.send(pinned)
        self._busy.append((arrival, pinned, columns))
        copies = dict(zip(map(address, pinned), blocks, strict=True))
        moved = (located(copies[address(tensor)], tensor) for tensor in tensors_of(values))
        return Ready(with_tensors(values, moved), arrival, blocks)

    def _free(self) -> tuple[list[torch.Tensor], Tensors]:
        """Return pinned memory with a finished copy, and its columns; none if more may be allocated."""
        if not self._busy or (len(self._busy) < self._batches and not self._busy[0][0].done()):
            return [], {}
        arrival, pinned, columns = self._busy.popleft()
        arrival.wait()
        return pinned, columns


Memory = FreshMemory | ReusedMemory | DeviceMemory


def memory_for(device: torch.device | None, depth: int, *, reuse: bool) -> Memory:
    """Return the memory of a loader that keeps ``depth`` batches ready.

    Args:
        device: target device; None = the CPU.
        depth: number of batches kept ready.
        reuse: whether CPU batches share rotating memory.

    Raises:
        ConfigurationError: the device is neither the CPU nor an available CUDA device.
    """
    if device is None or device.type == "cpu":
        return ReusedMemory(depth + 2) if reuse else FreshMemory()
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigurationError(f"device: {device}, must be the CPU or an available CUDA device")
    return DeviceMemory(CudaDevice(device), depth + 1)


def _read_into(reader: Reader, target: Tensors, count: int) -> dict[str, Any] | None:
    """Read into tensors that fit; None if the batch has other columns or more rows."""
    if not target or any(len(tensor) < count for tensor in target.values()):
        return None
    try:
        values: dict[str, Any] = reader(target)
    except ConfigurationError:  # a column is absent in the target, or has another shape
        return None
    return values if unnest(values).keys() == target.keys() else None
