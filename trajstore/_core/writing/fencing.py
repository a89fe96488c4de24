"""Fences off an earlier writer of an object store that lost its lock without noticing."""

from __future__ import annotations

import uuid

from trajstore._core.files.base import Directory
from trajstore._core.store.catalog import Catalog
from trajstore._core.store.log_records import decode_lines, encode_line, segment_name
from trajstore.errors import StoreWriteError, WriterFencedError

SHARDS_OF_A_WRITER = 1 << 32
"""Size of the block of shard numbers that each writer uses."""

_ATTEMPTS = 20  # the earlier writer may still be committing


def fence(directory: Directory, catalog: Catalog) -> None:
    """Start a writer's session with an empty commit of its own.

    Its log segment takes the place of an earlier writer's next one. Segments are only created where none exists, so an
    earlier writer can commit nothing more. The record also has the first shard number of this writer, so that shards
    still being uploaded by an earlier writer have other names.

    Args:
        directory: an object store, whose lock is held.
        catalog: its state; updated.

    Raises:
        StoreWriteError: the log could not be written.
        WriterFencedError: another writer has taken over the store meanwhile.
    """
    writer = uuid.uuid4().hex  # makes each fence record unique
    for _ in range(_ATTEMPTS):
        generation = catalog.generation + 1
        next_shard = (catalog.next_shard // SHARDS_OF_A_WRITER + 1) * SHARDS_OF_A_WRITER
        content = {"writer": writer, "next_shard": next_shard}
        record = {"generation": generation, "operation": "evict", "ids": [], "fence": content}
        line = encode_line(record)
        try:
            directory.append(segment_name(generation), line)
        except WriterFencedError:
            raise
        except FileExistsError:  # the earlier writer has committed since
            catalog.refresh()
        except OSError as error:
            raise StoreWriteError(f"{error}: the log cannot be written") from error
        else:
            directory.confirm()  # a writer that took over meanwhile skips this fence, which is behind its own
            catalog.apply([record])
            catalog.log_bytes += len(line)
            return
    raise StoreWriteError(
        f"{directory.url}: another writer keeps committing; find and stop it, then open the store again"
    )


def step_over(directory: Directory, catalog: Catalog) -> bool:
    """Apply a fence found in place of the next commit; return whether there was one.

    It belongs to a writer that stalled while opening the store and lost the lock; it commits nothing more. The caller
    must hold the lock.
    """
    name = segment_name(catalog.generation + 1)
    records = decode_lines(directory.read(name), f"{directory.url}/{name}").records
    if len(records) != 1 or "fence" not in records[0] or records[0].get("generation") != catalog.generation + 1:
        return False
    catalog.apply(records)
    return True
