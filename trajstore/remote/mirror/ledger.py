"""A mirror's ledger: the store it mirrors, and the copied shards that its index does not name yet.

Used by the mirror's thread only, like its replica.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable

import orjson

from trajstore._core.files.base import Directory, EncodedFile
from trajstore._core.files.holder import holder_document
from trajstore._core.formats.base import ShardManifest
from trajstore._core.store.log_records import manifest_to_json
from trajstore._core.store.sealed import LEDGER_NAME
from trajstore.errors import CorruptStoreError

logger = logging.getLogger(__name__)


class Ledger:
    """Written before the first copy to an empty place, and periodically during long copying.

    Args:
        target: the mirror's directory.
        source: URL of the store.
    """

    def __init__(self, target: Directory, source: str) -> None:
        self.lists_shards = False
        """Whether it lists shards, and must be rewritten once the index names them."""
        self.of_another = ""
        """The other store that it belongs to, in words; empty if none."""
        self._target = target
        self._source = source
        self._store_id = ""

    def read(self, store_id: str) -> dict[int, int] | None:
        """Return the checksums of listed shards (:func:`crc_of`), by number.

        Args:
            store_id: of the mirrored store.

        Returns:
            None if the ledger is absent, or another store's.
        """
        self._store_id = store_id
        try:
            value = orjson.loads(self._target.read(LEDGER_NAME))
            copied = {int(number): int(crc) for number, crc in value["copied"]}
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, CorruptStoreError):
            logger.warning("%s/%s: cannot be read; the shards in it are copied again", self._target.url, LEDGER_NAME)
            return {}
        self.lists_shards = bool(copied)
        if value.get("store_id") == store_id:
            return copied
        self.of_another = f"the store {value.get('store_id')} at {value.get('source')} on {value.get('host')}"
        return None

    def write(self, shards: Iterable[tuple[int, ShardManifest]]) -> None:
        """List the copied shards, by number; none if the index names them all."""
        copied = [(number, crc_of(manifest)) for number, manifest in shards]
        document = {"store_id": self._store_id, "source": as_text(self._source), **holder_document(), "copied": copied}
        self._target.publish([EncodedFile(LEDGER_NAME, [orjson.dumps(document)])])
        self.lists_shards = bool(copied)


def as_text(text: str) -> str:
    """Return a text that JSON can hold: a path may contain bytes that are not text."""
    return text.encode("utf-8", "backslashreplace").decode()


def crc_of(manifest: ShardManifest) -> int:
    """Return a checksum of a shard's manifest."""
    return zlib.crc32(orjson.dumps([manifest_to_json(manifest, 0), manifest.schema.to_json()]))
