"""Batch memory for a simulated device: pinning, reuse, waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from trajstore._core.feeding.device import Arrival
from trajstore._core.feeding.memory import DeviceMemory, FreshMemory, ReusedMemory, memory_for
from trajstore.errors import ConfigurationError


class Copy:
    """A copy that finishes when waited for, or by :meth:`end`; it reads its source only then."""

    def __init__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._pairs = list(zip(sources, targets, strict=True))
        self.waited = False
        self.used: list[torch.Tensor] = []

    def end(self) -> None:
        for source, target in self._pairs:
            target.copy_(source)
        self._pairs.clear()

    def done(self) -> bool:
        return not self._pairs

    def wait(self) -> None:
        self.waited = not self.done()
        self.end()

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        self.used += tensors
        self.end()


class Slow:
    """A device to which copies arrive only on demand."""

    def __init__(self) -> None:
        self.pinned = 0
        self.copies: list[Copy] = []

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned += 1
        return tensor.clone()

    def send(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Arrival]:
        moved = [torch.full_like(tensor, -1) for tensor in tensors]
        self.copies.append(Copy(tensors, moved))
        return moved, self.copies[-1]


def reader(value: int, rows: int = 4, extra: bool = False) -> Any:
    def read(out: Mapping[str, torch.Tensor] | None) -> dict[str, Any]:
        if out is not None and extra != ("more" in out):
            raise ConfigurationError("out has no such column")
        first = torch.empty(rows, 2) if out is None else out["obs.s"][:rows]
        first.fill_(value)
        return {"obs": {"s": first}} | ({"more": torch.zeros(rows)} if extra else {})

    return read


def test_pinned_memory_is_used_again_only_when_its_copy_has_ended() -> None:
    device = Slow()
    memory = DeviceMemory(device, batches=2)
    ready = [memory.read(reader(value), 4) for value in range(5)]
    assert device.pinned == 2  # the third batch waited for the first copy and reused its memory
    assert [copy.waited for copy in device.copies] == [True, True, True, False, False]
    for value, batch in enumerate(ready):
        assert torch.equal(batch.take()["obs"]["s"], torch.full((4, 2), float(value)))
    assert all(len(copy.used) == 1 for copy in device.copies)


def test_other_columns_and_more_rows_get_pinned_memory_of_their_own() -> None:
    device = Slow()
    memory = DeviceMemory(device, batches=1)
    for value, (rows, extra) in enumerate([(4, False), (4, True), (9, True), (9, True)]):
        batch = memory.read(reader(value, rows, extra), rows)
        assert torch.equal(batch.take()["obs"]["s"], torch.full((rows, 2), float(value)))
    assert device.pinned == 1 + 2 + 2


def test_uneven_batches_keep_what_is_no_tensor_and_are_pinned_each_time() -> None:
    device = Slow()
    memory = DeviceMemory(device, batches=1, reuse=False)
    for rows in (3, 5):
        batch = memory.read(lambda out, rows=rows: [{"ids": torch.arange(rows), "tasks": ["a"] * rows, "k": rows}], 1)  # type: ignore[misc]
        [pack] = batch.take()
        assert pack["ids"].tolist() == list(range(rows))
        assert (pack["tasks"], pack["k"]) == (["a"] * rows, rows)
    assert device.pinned == 2


def test_what_memory_a_loader_gets() -> None:
    assert isinstance(memory_for(None, 2, reuse=False, even=True), FreshMemory)
    assert isinstance(memory_for(torch.device("cpu"), 2, reuse=True, even=True), ReusedMemory)
    for name in ("meta", *(() if torch.cuda.is_available() else ("cuda",))):
        with pytest.raises(ConfigurationError, match="must be the CPU or an available CUDA device"):
            memory_for(torch.device(name), 2, reuse=True, even=True)
