"""Whether a log ends where it ended: what other files know of later commits. Pure; no I/O.

A log that lost its end, between two records, looks like the store at an earlier moment. Pins say after which commit
they were made, and ``metadata.json`` how far ids had come when it was last renewed; both tell of durable commits only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trajstore.errors import CorruptStoreError
from trajstore.store.committed import Committed
from trajstore.store.log_records import LOG_FOLDER
from trajstore.store.saved_points import pin_name
from trajstore.store.sealed import FROM_A_COPY, METADATA_NAME, OR_WHAT_IS_WHOLE


def ids_told(metadata: Mapping[str, Any]) -> int:
    """Return up to which id trajectories were committed when ``metadata.json`` was written; 0 where it does not say."""
    counter = metadata.get("trajectory_counter")
    return counter if isinstance(counter, int) else 0


def check_pins(committed: Committed, url: str) -> None:
    """Refuse a log that ends before commits that a pin was made after: they were acknowledged, and are gone.

    Args:
        committed: what snapshot and log tell.
        url: of the store, for the message.

    Raises:
        CorruptStoreError: it does; names the pin.
    """
    for head in committed.pins.heads.values():
        if head.back_to is None and head.generation > committed.generation:
            raise CorruptStoreError(
                f"{url}/{LOG_FOLDER}: ends with generation {committed.generation}, and {pin_name(head.name)} was made "
                f"at generation {head.generation}: the log was cut or lost{FROM_A_COPY}{OR_WHAT_IS_WHOLE}"
            )


def check_ids(committed: Committed, url: str, told: int) -> None:
    """Refuse a log that ends before ids that ``metadata.json``, which was read earlier, knows to be committed.

    Args:
        committed: what snapshot and log tell.
        url: of the store, for the message.
        told: the next id by the metadata.

    Raises:
        CorruptStoreError: it does.
    """
    if told > committed.next_id:
        ends = f"ends with id {committed.next_id - 1}" if committed.next_id else "has no trajectory"
        raise CorruptStoreError(
            f"{url}/{LOG_FOLDER}: {ends}, and by {METADATA_NAME} all ids up to {told - 1} were committed: the log was "
            f"cut or lost{FROM_A_COPY}{OR_WHAT_IS_WHOLE}"
        )
