"""Tensors of a batch in few blocks of memory, which a device gets in as many copies. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ALONE = 1 << 20
"""Bytes from which a tensor has a block of its own.

On an H200 so many are copied in 20 us, while a thread launches the next copy in 12; smaller tensors are copied faster
than their copies can be launched. A consumer that keeps one tensor keeps its whole block, so rewards are in no block
with images.
"""

ALIGNMENT = 256
"""Alignment in bytes of tensors that share a block; CUDA guarantees as much for memory of its own."""


def packed(
    tensors: Sequence[torch.Tensor], allocate: Callable[[int], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy tensors into blocks: each large one into its own, small ones together into the last.

    Args:
        tensors: CPU tensors of any dtypes and shapes.
        allocate: returns uint8 of a number of bytes, which must be the whole of its memory.

    Returns:
        The blocks, and the copies in them, contiguous, in the order of ``tensors``.
    """
    sizes: dict[int, int] = {}
    places = []
    for number, tensor in enumerate(tensors):
        block = number if tensor.nbytes >= ALONE else len(tensors)
        start = sizes.get(block, 0)
        places.append((block, start))
        sizes[block] = start + -(-max(1, tensor.nbytes) // ALIGNMENT) * ALIGNMENT
    blocks = {block: allocate(sizes[block]) for block in sorted(sizes)}
    rows = [tensor.contiguous() for tensor in tensors]
    copies = [_at(blocks[block], start, like).copy_(like) for (block, start), like in zip(places, rows, strict=True)]
    return list(blocks.values()), copies


def located(block: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is in ``block`` where ``tensor`` is in its own block, of which ``block`` is a copy."""
    return _at(block, int(tensor.storage_offset()) * tensor.itemsize, tensor)


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's whole memory; equal for the tensors of a block."""
    return tensor.untyped_storage().data_ptr()


def _at(block: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the dtype, shape and strides of ``like`` in the memory of a block, from byte ``start`` on.

    Not a slice of the block: autograd counts in-place changes of a tensor and all its slices together, so changing one
    column in place would spoil the derivatives that were to be computed with another.
    """
    empty = torch.empty(0, dtype=like.dtype, device=block.device)
    return empty.set_(block.untyped_storage(), start // like.itemsize, like.shape, like.stride())
