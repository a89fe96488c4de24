"""How the writer of an object store keeps out one that held the store before and does not know that it lost it."""

from __future__ import annotations

import uuid

from trajstore.core.files.base import Directory
from trajstore.core.store.catalog import Catalog
from trajstore.core.store.log_records import decode_lines, encode_line, segment_name
from trajstore.errors import StoreWriteError, WriterFencedError

SHARDS_OF_A_WRITER = 1 << 32
"""Numbers of shards in the block of which each writer gives out its own."""

_ATTEMPTS = 20  # the earlier writer may be committing still


def fence(directory: Directory, catalog: Catalog) -> None:
    """Begin a writer's time with a commit of its own, which changes nothing.

    Its segment of the log stands where an earlier writer would put its next one, and segments are created only where
    none is: nothing of an earlier writer's can be committed any more. The record also says from which number on this
    writer names its shards, so that those that an earlier writer is still sending have other names.

    Args:
        directory: an object store, whose lock is held.
        catalog: its state, which is brought up to date.

    Raises:
        StoreWriteError: the log could not be written.
        WriterFencedError: another writer has taken the store over meanwhile.
    """
    writer = uuid.uuid4().hex  # no two of these records are the same
    for _ in range(_ATTEMPTS):
        generation = catalog.generation + 1
        next_shard = (catalog.next_shard // SHARDS_OF_A_WRITER + 1) * SHARDS_OF_A_WRITER
        told = {"writer": writer, "next_shard": next_shard}
        line = encode_line({"generation": generation, "operation": "evict", "ids": [], "fence": told})
        try:
            directory.append(segment_name(generation), line)
        except WriterFencedError:
            raise
        except FileExistsError:  # the earlier writer has committed something since
            catalog.refresh()
        except OSError as error:
            raise StoreWriteError(f"{error}: the log cannot be written") from error
        else:
            directory.confirm()  # with this fence behind theirs, whoever took over meanwhile steps over it
            catalog.fence(generation, next_shard)
            catalog.generation = generation
            catalog.log_bytes += len(line)
            return
    raise StoreWriteError(f"{directory.url}: somebody else commits all the time; find out who, and open it again")


def step_over(directory: Directory, catalog: Catalog) -> bool:
    """Take in a fence that stands where the next commit should; return whether one did.

    It is of a writer that was frozen while it opened the store and has lost the lock since: it commits nothing more. To
    be called by who has the lock.
    """
    name = segment_name(catalog.generation + 1)
    records = decode_lines(directory.read(name), f"{directory.url}/{name}").records
    if len(records) != 1 or "fence" not in records[0] or records[0].get("generation") != catalog.generation + 1:
        return False
    catalog.apply(records)
    return True
