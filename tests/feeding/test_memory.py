"""Batch memory for a simulated device: pinning, reuse, waiting."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.equality import same
from trajstore._core.feeding.blocks import ALIGNMENT, ALONE
from trajstore._core.feeding.device import Arrival, CudaDevice
from trajstore._core.feeding.memory import DeviceMemory, FreshMemory, ReusedMemory, memory_for, tensors_of, with_tensors
from trajstore.errors import ConfigurationError


class Copy:
    """A copy that finishes when waited for, or by :meth:`end`; it reads its source only then."""

    def __init__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self._pairs = list(zip(sources, targets, strict=True))
        self.waited = False
        self.used: list[int] = []
        """Bytes of each block that a stream was to wait for."""

    def end(self) -> None:
        for source, target in self._pairs:
            target.copy_(source)
        self._pairs.clear()

    def done(self) -> bool:
        return not self._pairs

    def wait(self) -> None:
        self.waited = not self.done()
        self.end()

    def use(self, blocks: Sequence[torch.Tensor]) -> None:
        self.used += [len(block) for block in blocks]
        self.end()


class Slow:
    """A device to which copies arrive only on demand."""

    def __init__(self) -> None:
        self.pinned = 0
        self.copies: list[Copy] = []
        self.memory: list[weakref.ref[Any]] = []
        """The device's blocks; dead once no tensor is in them."""

    def pin(self, nbytes: int) -> torch.Tensor:
        self.pinned += 1
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def send(self, blocks: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Arrival]:
        there = [np.full(len(block), 0xFF, np.uint8) for block in blocks]
        self.memory += map(weakref.ref, there)
        moved = [torch.from_numpy(array) for array in there]
        self.copies.append(Copy(blocks, moved))
        return moved, self.copies[-1]


def reader(value: int, rows: int = 4, extra: bool = False) -> Any:
    def read(out: Mapping[str, torch.Tensor] | None) -> dict[str, Any]:
        if out is not None and extra != ("more" in out):
            raise ConfigurationError("out has no such column")
        first = torch.empty(rows, 2) if out is None else out["obs.s"][:rows]
        first.fill_(value)
        if not extra:
            return {"obs": {"s": first}}
        return {"obs": {"s": first}, "more": torch.zeros(rows) if out is None else out["more"][:rows]}

    return read


def test_pinned_memory_is_used_again_only_when_its_copy_has_ended() -> None:
    device = Slow()
    memory = DeviceMemory(device, batches=2)
    ready = [memory.read(reader(value), 4) for value in range(5)]
    assert device.pinned == 2  # the third batch waited for the first copy and reused its memory
    assert [copy.waited for copy in device.copies] == [True, True, True, False, False]
    for value, batch in enumerate(ready):
        assert torch.equal(batch.take()["obs"]["s"], torch.full((4, 2), float(value)))
    assert all(copy.used == [ALIGNMENT] for copy in device.copies)


def of_every_kind() -> dict[str, Any]:
    """Return small tensors of all dtypes and ranks, among them empty ones, and two large ones."""
    generator = torch.Generator().manual_seed(3)
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.complex128, torch.uint16, torch.int64, torch.bool)
    shapes = {"scalar": (), "none": (0, 5), "row": (1,), "rows": (7, 3)}

    def random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
        return raw.to(torch.uint8).view(dtype).reshape(shape)

    small = {str(dtype): {name: random(dtype, shape) for name, shape in shapes.items()} for dtype in dtypes}
    images = {name: random(torch.uint8, (7, ALONE // 7 + 1)) for name in ("before", "after")}
    turned = random(torch.float32, (4, 9)).T
    return {
        "images": images,
        **small,
        "least": [random(torch.uint8, (ALONE,)), random(torch.uint8, (ALONE - 1,)), turned],
    }


def test_small_tensors_arrive_in_one_aligned_block_and_large_ones_alone() -> None:
    device, given = Slow(), of_every_kind()
    ready = DeviceMemory(device, batches=1).read(lambda out: given, 7)
    batch = ready.take()
    assert same(batch, given)
    blocks: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors_of(batch):
        assert tensor.is_contiguous()
        blocks.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    *alone, shared = sorted(blocks.values(), key=len)
    assert [len(tensors) for tensors in alone] == [1, 1, 1]
    assert all(tensor.nbytes < ALONE for tensor in shared)
    starts = [tensor.storage_offset() * tensor.itemsize for tensor in shared]
    assert all(start % ALIGNMENT == 0 for start in starts)
    ends = [start + tensor.nbytes for start, tensor in zip(starts, shared, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    [copy] = device.copies
    assert device.pinned == len(copy.used) == 4
    assert copy.used[-1] == shared[0].untyped_storage().nbytes()  # launched while the large ones are copied


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_kind_arrives_on_the_device_with_the_alignment_of_its_own_memory() -> None:
    given = [of_every_kind()]
    memory = DeviceMemory(CudaDevice(torch.device("cuda")), batches=2)
    for batch in [memory.read(lambda out: given, 7).take() for _ in range(6)]:
        assert all(tensor.is_cuda and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors_of(batch))
        assert same(with_tensors(batch, (tensor.cpu() for tensor in tensors_of(batch))), given)


def test_a_tensor_keeps_its_block_on_the_device_and_no_other() -> None:
    device, given = Slow(), of_every_kind()
    batch = DeviceMemory(device, batches=1).read(lambda out: given, 7).take()
    kept = batch["torch.bool"]["rows"]
    del batch
    gc.collect()
    assert [memory() is not None for memory in device.memory] == [False] * 3 + [True]
    assert torch.equal(kept, given["torch.bool"]["rows"])
    del kept
    gc.collect()
    assert device.memory[-1]() is None


def test_columns_of_a_block_change_in_place_without_each_other() -> None:
    """Autograd has saved one of them; slices of one tensor would count as changed together."""
    given = {"obs": torch.arange(6.0).reshape(3, 2), "rewards": torch.zeros(3)}
    batch = DeviceMemory(Slow(), batches=1).read(lambda out: given, 3).take()
    weight = torch.ones(2, requires_grad=True)
    values = batch["obs"] @ weight
    batch["rewards"].add_(1)
    values.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0, 9.0]
    assert batch["obs"].tolist() == given["obs"].tolist()


def test_rows_that_were_read_elsewhere_are_pinned() -> None:
    """As those of several buffers with ``common_columns``, whose columns are known only after reading."""
    device = Slow()
    memory = DeviceMemory(device, batches=1)
    for value in range(3):
        ready = memory.read(lambda out, value=value: {"s": torch.full((4, 2), value)}, 4)  # type: ignore[misc]
        assert torch.equal(ready.take()["s"], torch.full((4, 2), value))
    assert device.pinned == 3


@pytest.mark.parametrize(
    ("batches", "pinned"),
    [([(4, False), (1, False), (3, False)], 1), ([(4, False), (4, True), (9, True), (9, True)], 3)],
    ids=["fewer rows", "other columns and more rows"],
)
def test_only_other_columns_and_more_rows_get_pinned_memory_of_their_own(
    batches: list[tuple[int, bool]], pinned: int
) -> None:
    device = Slow()
    memory = DeviceMemory(device, batches=1)
    for value, (rows, extra) in enumerate(batches):
        batch = memory.read(reader(value, rows, extra), rows).take()
        assert torch.equal(batch["obs"]["s"], torch.full((rows, 2), float(value)))
    assert device.pinned == pinned


def test_uneven_batches_keep_what_is_no_tensor_and_are_pinned_each_time() -> None:
    device = Slow()
    memory = DeviceMemory(device, batches=1)
    for rows in (3, 5):
        batch = memory.read(lambda out, rows=rows: [{"ids": torch.arange(rows), "tasks": ["a"] * rows, "k": rows}], 1)  # type: ignore[misc]
        [pack] = batch.take()
        assert pack["ids"].tolist() == list(range(rows))
        assert (pack["tasks"], pack["k"]) == (["a"] * rows, rows)
    assert device.pinned == 2


def test_what_memory_a_loader_gets() -> None:
    assert isinstance(memory_for(None, 2, reuse=False), FreshMemory)
    assert isinstance(memory_for(torch.device("cpu"), 2, reuse=True), ReusedMemory)
    for name in ("meta", *(() if torch.cuda.is_available() else ("cuda",))):
        with pytest.raises(ConfigurationError, match="must be the CPU or an available CUDA device"):
            memory_for(torch.device(name), 2, reuse=True)
