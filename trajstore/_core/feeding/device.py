"""CUDA transfers: pinned memory, a separate stream, events. Everything that needs a GPU to test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Arrival(Protocol):
    """A running copy to a device."""

    def done(self) -> bool:
        """Return whether it has finished, without waiting."""

    def wait(self) -> None:
        """Wait until it has finished."""

    def use(self, blocks: Sequence[torch.Tensor]) -> None:
        """Make the current stream, not the host, wait for the copy; ``blocks`` are what was copied."""


class Device(Protocol):
    """Target device of batches."""

    def pin(self, nbytes: int) -> torch.Tensor:
        """Return uint8 ``[nbytes]``, uninitialized, in memory that the device can read directly."""

    def send(self, blocks: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Arrival]:
        """Start copying pinned memory, each block at once; it must not change until the copy has finished."""


class CudaArrival:
    """A CUDA event after copies on a stream."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def use(self, blocks: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for block in blocks:  # holds for every tensor in its memory
            block.record_stream(stream)


class CudaDevice:
    """A CUDA device with a separate copy stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, blocks: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Arrival]:
        with torch.cuda.stream(self._stream):
            moved = [block.to(self._device, non_blocking=True) for block in blocks]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return moved, CudaArrival(event, self._device)
