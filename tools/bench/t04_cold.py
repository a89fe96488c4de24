"""T4: what ``sample`` reads from the disk when nothing of the files is in the page cache.

The kernel's count of bytes read for this process, over the bytes of the whole pages in which the batch's rows lie.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from tools.bench.report import Figure, Options, SkippedError
from tools.bench.workloads import Workload, filled, image, opened, state
from trajstore._core.files.opening import open_directory
from trajstore._core.store.catalog import Catalog

TARGET = 1.1
SEED = 3


def figures(options: Options) -> Iterator[Figure]:
    """Yield one figure per workload.

    Raises:
        SkippedError: the kernel does not count reads, or read from no disk.
    """
    for workload in (state(options), image(options)):
        folder = options.folder / workload.name
        with filled(folder, workload.trajectories) as buffer:
            buffer.sample(2)  # loads everything else that sampling needs
        files = [path for path in folder.rglob("*") if path.is_file()]
        with opened(folder, seed=SEED) as buffer:
            for path in files:
                _drop(path)
            before = _bytes_read()
            buffer.sample(workload.batch)
            read = _bytes_read() - before
        pages, row_bytes = _pages(folder, workload)
        stored = sum(path.stat().st_size for path in files)
        if not read:
            raise SkippedError(f"{options.folder} is not on a disk: nothing was read from one")
        yield Figure(
            "T4",
            f"sample, cold, bytes read, {workload.name}",
            read / (pages * mmap.PAGESIZE),
            TARGET,
            details={"read_mb": read / 1e6, "rows_mb": row_bytes / 1e6, "stored_mb": stored / 1e6},
        )


def _drop(path: Path) -> None:
    """Put a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _bytes_read() -> int:
    """Return the bytes that this process made the kernel read from a disk."""
    return 512 * resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def _pages(folder: Path, workload: Workload) -> tuple[int, int]:
    """Return how many pages hold rows of the first batch that SEED draws, and the bytes of these rows."""
    catalog = Catalog.open(open_directory(folder))
    total = catalog.index.total_samples
    drawn = torch.randint(0, total, (min(workload.batch, total),), generator=torch.Generator().manual_seed(SEED))
    positions, within = catalog.index.find_rows(drawn.numpy(), 0, catalog.index.end)
    shards, places = catalog.index.at("shard", positions), catalog.index.place_rows(positions, within)
    pages: set[tuple[int, int]] = set()
    row_bytes = 0
    for number in np.unique(shards).tolist():
        manifest = catalog.shards.manifest(number)
        rows = places[:, shards == number]
        for column, place, width in zip(
            manifest.schema.columns, manifest.places, manifest.schema.row_nbytes, strict=True
        ):
            if place is None:
                raise SkippedError(f"column {column.name} is not mapped")
            for row in rows[column.axis].tolist():
                start = place.offset + row * width
                pages.update(
                    (number, page) for page in range(start // mmap.PAGESIZE, (start + width - 1) // mmap.PAGESIZE + 1)
                )
                row_bytes += width
    return len(pages), row_bytes
