"""The edge to a CUDA device: pinned memory, a stream of its own, events. All that cannot be tested without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Arrival(Protocol):
    """A copy to a device that is under way."""

    def done(self) -> bool:
        """Return whether it has ended; does not wait."""

    def wait(self) -> None:
        """Wait until it has ended."""

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let what comes next on the current stream wait for the copy; the host does not."""


class Device(Protocol):
    """Where batches are copied to."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in memory that the device can read by itself."""

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Arrival]:
        """Begin to copy pinned tensors; they must stay as they are until the copy has ended."""


class CudaArrival:
    """An event after copies on a CUDA stream."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)


class CudaDevice:
    """A CUDA device, to which a stream of its own copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Arrival]:
        with torch.cuda.stream(self._stream):
            moved = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return moved, CudaArrival(event, self._device)
