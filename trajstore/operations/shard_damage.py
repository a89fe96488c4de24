"""Check the files of one shard. They are read whole and not changed."""

from __future__ import annotations

from trajstore._core.files.base import SEE_VERIFY, Directory
from trajstore._core.formats.base import ShardManifest
from trajstore._core.formats.checksums import check_file
from trajstore._core.formats.packed import is_packed
from trajstore._core.reading.shard_access import fetch_file, reader_of
from trajstore._core.store.sealed import FROM_A_COPY, without_advice
from trajstore.errors import CorruptStoreError, StoreError


def damage_in(directory: Directory, manifest: ShardManifest) -> list[tuple[str, str]]:
    """Return (file name, message) for each damage of a shard: sizes, checksums, columns that cannot be decoded.

    Raises:
        MissingDependencyError: the format's package is not installed; this is not damage.
    """
    damage = []
    for number, file in enumerate(manifest.files):
        try:
            data = memoryview(fetch_file(directory, manifest, file.name))
        except (StoreError, OSError) as error:
            advice = FROM_A_COPY if isinstance(error, CorruptStoreError) else ""
            damage.append((file.name, without_advice(str(error).removesuffix(SEE_VERIFY)) + advice))
            continue
        with data:
            texts = check_file(data, manifest, number)
        damage += [(file.name, text.removeprefix(f"{file.name}: ") + FROM_A_COPY) for text in texts]
    schema = manifest.schema
    if not damage and (None in manifest.places or schema.stored_once or is_packed(schema)):
        damage += _damage_in_decoded(directory, manifest)
    return damage


def _damage_in_decoded(directory: Directory, manifest: ShardManifest) -> list[tuple[str, str]]:
    """Decode the columns that are not mapped, packed, or stored once."""
    try:
        reader = reader_of(directory, manifest)
        for column, place in enumerate(manifest.places):
            if is_packed(manifest.schema):
                reader.rows(column, 0, 0)  # checks all runs
            elif place is None or column in manifest.schema.stored_once:
                reader.rows(column, 0, manifest.rows[column])
    except (StoreError, OSError) as error:
        return [(manifest.files[0].name, str(error))]
    return []
