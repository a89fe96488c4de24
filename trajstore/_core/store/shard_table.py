"""The shard table: column locations of all shards, stored as arrays. Pure; no I/O.

Shards of one format and schema differ only in numbers (file sizes, offsets, checksums). These are stored as arrays per
*family*, and a manifest is built only when a shard is opened. A hundred thousand shards take a few megabytes this way.
It also has the generations in which shards are visible, and so which readers need their files. Guarded like the
catalog it belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore._core.columns.fields import Axis
from trajstore._core.columns.schema import Schema
from trajstore._core.files.base import Reader, check_name
from trajstore._core.formats.base import SHARDS_FOLDER, ColumnPlace, ShardManifest, StoredFile
from trajstore._core.store.json_arrays import array_from_json, array_to_json, declared_rows
from trajstore.errors import CorruptStoreError

ABSENT = -1

NEEDED = np.iinfo(np.int64).max
"""Value for shards that are still needed."""

_NAME = "{name}"
_SHARD_NAME = "shard_{0:08d}"
_SHARD_FILE = re.compile(rf"{SHARDS_FOLDER}/shard_(\d{{8,}})[./]")


def shard_name(number: int) -> str:
    """Return the name of the shard with this number."""
    return _SHARD_NAME.format(number)


def shard_number(file: str) -> int | None:
    """Return the number of the shard that a file name belongs to; None if it is not a shard's."""
    match = _SHARD_FILE.match(file)
    return None if match is None else int(match[1])


@dataclass
class _Family:
    """Shards that differ only in numbers. Arrays have a row per shard, columns per file or per column."""

    format: str
    schema: int
    file_names: tuple[str, ...]
    column_files: tuple[int, ...]
    arrays: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    count: int = 0

    def add(self, row: dict[str, Sequence[int]]) -> int:
        for name, values in row.items():
            array = self.arrays.get(name)
            if array is None or self.count == len(array):
                grown = np.zeros((max(8, 2 * self.count), len(values)), np.int64)
                if array is not None:
                    grown[: self.count] = array[: self.count]
                self.arrays[name] = array = grown
            array[self.count] = values
        self.count += 1
        return self.count - 1


class ShardTable:
    """All shards of one directory, by row. Rows are assigned in order and never change.

    A shard lives from the generation that added it to the first that does not need it. Those in a snapshot count as
    always present; those unneeded when a writer opens, as unneeded from the next generation on.
    """

    def __init__(self) -> None:
        self.schemas: list[Schema] = []
        self._schema_numbers: dict[Schema, int] = {}
        self._families: list[_Family] = []
        self._family_numbers: dict[tuple[Any, ...], int] = {}
        self._numbers = np.zeros(0, np.int64)
        self._family = np.zeros(0, np.int32)
        self._row = np.zeros(0, np.int32)
        self._born = np.zeros(0, np.int64)
        self._unneeded = np.zeros(0, np.int64)
        self._removed = np.zeros(0, np.bool_)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def next_number_of(self, schema: Schema, new: dict[Schema, int]) -> int:
        """Return the number of a schema in the next record.

        Args:
            schema: of a shard that the record adds.
            new: schemas of the record and those before it that are not in the table yet; may receive this one.
        """
        number = self._schema_numbers.get(schema)
        return new.setdefault(schema, len(self.schemas) + len(new)) if number is None else number

    def number_of_schema(self, schema: Schema) -> int:
        """Return a schema's number, assigning one if it is new."""
        number = self._schema_numbers.get(schema)
        if number is None:
            number = self._schema_numbers[schema] = len(self.schemas)
            self.schemas.append(schema)
        return number

    def add(self, number: int, manifest: ShardManifest, generation: int = 0) -> int:
        """Add the shard with this number, by a commit of this generation, and return its row."""
        name = shard_name(number)
        schema = self.number_of_schema(manifest.schema)
        names = tuple(file.name.replace(name, _NAME) for file in manifest.files)
        places = manifest.places
        column_files = tuple(ABSENT if place is None else place.file for place in places)
        key = (manifest.format, schema, names, column_files)
        family = self._family_numbers.get(key)
        if family is None:
            family = self._family_numbers[key] = len(self._families)
            self._families.append(_Family(*key))
        row = self._families[family].add(
            {
                "sizes": [file.size for file in manifest.files],
                "crc32": [file.crc32 for file in manifest.files],
                "offsets": [ABSENT if place is None else place.offset for place in places],
                "column_crc32": [ABSENT if crc is None else crc for crc in manifest.column_crc32],
                "rows": manifest.rows,
                "nbytes": manifest.nbytes,
            }
        )
        if self._count == len(self._numbers):
            self._grow(max(2 * self._count, 16))
        self._numbers[self._count], self._family[self._count], self._row[self._count] = number, family, row
        self._born[self._count] = generation
        self._count += 1
        return self._count - 1

    def _grow(self, capacity: int) -> None:
        """Grow the arrays to hold this many shards."""
        for name in ("_numbers", "_family", "_row", "_born", "_removed"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(capacity - len(array), array.dtype)]))
        self._unneeded = np.concatenate([self._unneeded, np.full(capacity - len(self._unneeded), NEEDED)])

    # -- lifetimes --------------------------------------------------------------------------------

    def need(self, needed: npt.NDArray[np.bool_], generation: int) -> None:
        """Set which shards are needed; the others count as unneeded from this generation on."""
        unneeded = self._unneeded[: self._count]
        unneeded[~needed & (unneeded == NEEDED)] = generation

    def unneeded(self) -> npt.NDArray[np.intp]:
        """Return the rows of unneeded shards whose files were not deleted."""
        return np.flatnonzero((self._unneeded != NEEDED) & ~self._removed)

    def held(self, rows: npt.NDArray[np.intp], reader: Reader) -> npt.NDArray[np.bool_]:
        """Return, per shard, whether a reader may see it.

        At generation g it sees the shards added at or before g and still needed at g.
        """
        after = self._unneeded[rows] > reader.generation
        return after & (self._born[rows] <= reader.generation) if reader.settled else after

    def remove(self, rows: npt.NDArray[np.intp]) -> None:
        """Mark the files of shards as deleted."""
        self._removed[rows] = True

    # -- shards -----------------------------------------------------------------------------------

    def number(self, row: int) -> int:
        """Return the number of the shard in a row of the table."""
        return int(self._numbers[row])

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return, per row, the number of the shard."""
        return self._numbers[: self._count]

    def schema(self, row: int) -> Schema:
        """Return the schema of the shard in a row."""
        return self.schemas[self._families[int(self._family[row])].schema]

    def schema_numbers(self) -> npt.NDArray[np.int32]:
        """Return, per row, the number of the shard's schema."""
        by_family = np.array([family.schema for family in self._families], np.int32)
        return by_family[self._family[: self._count]] if self._count else np.zeros(0, np.int32)

    def of_steps(self) -> npt.NDArray[np.bool_]:
        """Return, per row, whether the shard holds step trajectories."""
        return self._by_schema([schema.kind == "step" for schema in self.schemas])

    def with_valid(self) -> npt.NDArray[np.bool_]:
        """Return, per row, whether the shard's trajectories have a field ``valid``."""
        return self._by_schema([schema.has_valid for schema in self.schemas])

    def with_axis(self, axis: Axis) -> npt.NDArray[np.bool_]:
        """Return, per row, whether the shard has columns along an axis; without one the index counts no rows of it."""
        return self._by_schema([any(c.axis is axis for c in schema.columns) for schema in self.schemas])

    def _by_schema(self, true: Sequence[bool]) -> npt.NDArray[np.bool_]:
        """Return, per row, the value for the shard's schema."""
        return np.array(true, np.bool_)[self.schema_numbers()] if self._count else np.zeros(0, np.bool_)

    def nbytes(self) -> npt.NDArray[np.int64]:
        """Return, per row, the bytes of the shard's files."""
        return self._by_family(0, lambda family: family.arrays["sizes"][: family.count].sum(axis=1))

    def row_bytes(self) -> npt.NDArray[np.int64]:
        """Return, per row, the bytes of all rows of the shard's trajectories, dead ones included, as in the index."""

        def of(family: _Family) -> npt.NDArray[np.int64]:
            schema = self.schemas[family.schema]
            if not family.count:
                return np.zeros(0, np.int64)
            return family.arrays["rows"][: family.count] @ np.array(schema.row_nbytes, np.int64)

        return self._by_family(0, of)

    def compressed(self) -> npt.NDArray[np.bool_]:
        """Return, per row, whether the shard is compressed: in the format ``zarr``, with columns that are not raw."""
        of_family = [family.format == "zarr" and ABSENT in family.column_files for family in self._families]
        return np.array(of_family, np.bool_)[self._family[: self._count]] if self._count else np.zeros(0, np.bool_)

    def stored_bytes(self) -> npt.NDArray[np.int64]:
        """Return, per row, the bytes of the shard's columns."""
        return self._by_family(0, lambda family: family.arrays["nbytes"][: family.count].sum(axis=1))

    def _by_family(
        self, otherwise: int, of: Callable[[_Family], npt.NDArray[np.int64] | None]
    ) -> npt.NDArray[np.int64]:
        """Return, per row, the value of ``of`` for each shard of a family; ``otherwise`` if it returns None."""
        total = np.full(self._count, otherwise)
        for number, family in enumerate(self._families):
            of_family = self._family[: self._count] == number
            values = of(family) if of_family.any() else None
            if values is not None:
                total[of_family] = values[self._row[: self._count][of_family]]
        return total

    def manifest(self, row: int) -> ShardManifest:
        """Return the manifest of the shard in a row."""
        family = self._families[self._family[row]]
        at = {name: array[self._row[row]].tolist() for name, array in family.arrays.items()}
        name = shard_name(self.number(row))
        return ShardManifest(
            name=name,
            format=family.format,
            schema=self.schemas[family.schema],
            files=tuple(
                StoredFile(template.replace(_NAME, name), size, crc)
                for template, size, crc in zip(family.file_names, at["sizes"], at["crc32"], strict=True)
            ),
            places=tuple(
                None if offset == ABSENT else ColumnPlace(file, offset)
                for file, offset in zip(family.column_files, at["offsets"], strict=True)
            ),
            column_crc32=tuple(None if crc == ABSENT else crc for crc in at["column_crc32"]),
            rows=tuple(at["rows"]),
            nbytes=tuple(at["nbytes"]),
        )

    def manifests(self) -> Iterator[tuple[int, ShardManifest]]:
        """Yield every row with its manifest."""
        for row in range(self._count):
            yield row, self.manifest(row)

    def rows_on(self, axes: Sequence[Axis]) -> npt.NDArray[np.int64]:
        """Return, per shard, the rows of its columns on one of these axes; the largest integer without such columns."""

        def fewest(family: _Family) -> npt.NDArray[np.int64] | None:
            columns = [at for at, column in enumerate(self.schemas[family.schema].columns) if column.axis in axes]
            return family.arrays["rows"][:, columns].min(axis=1) if columns else None

        return self._by_family(np.iinfo(np.int64).max, fewest)

    def file_sizes(
        self, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[npt.NDArray[np.int64], list[str], npt.NDArray[np.int64]]]:
        """Yield all files of some shards without building manifests: rows, and name and size of one file for each."""
        for number, family in enumerate(self._families):
            chosen = rows[self._family[rows] == number]
            numbers = self._numbers[chosen].tolist()
            for file, template in enumerate(family.file_names):
                parts = [part.replace("{", "{{").replace("}", "}}") for part in template.split(_NAME)]
                named = _SHARD_NAME.join(parts).format
                yield chosen, list(map(named, numbers)), family.arrays["sizes"][self._row[chosen], file]

    def files(self, rows: Sequence[int]) -> list[str]:
        """Return the names of all files of some shards."""
        return [file.name for row in rows for file in self.manifest(row).files]

    def compacted(self, needed: npt.NDArray[np.bool_]) -> tuple[ShardTable, npt.NDArray[np.int32]]:
        """Return a table of only the needed shards (schemas keep their numbers), and the new row of each."""
        rows = np.arange(self._count, dtype=np.int32)
        if needed.all():
            return self, rows
        table = ShardTable()
        for schema in self.schemas:
            table.number_of_schema(schema)
        for row in np.flatnonzero(needed).tolist():
            rows[row] = table.add(self.number(row), self.manifest(row))
        return table, rows

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "schemas": [schema.to_json() for schema in self.schemas],
            "families": [
                {
                    "format": family.format,
                    "schema": family.schema,
                    "file_names": list(family.file_names),
                    "column_files": list(family.column_files),
                    **{name: array_to_json(array[: family.count]) for name, array in family.arrays.items()},
                }
                for family in self._families
            ],
            "numbers": array_to_json(self._numbers[: self._count]),
            "family": array_to_json(self._family[: self._count]),
            "row": array_to_json(self._row[: self._count]),
        }

    @staticmethod
    def from_json(value: Any) -> ShardTable:
        """Return the table described by :meth:`to_json`.

        Raises:
            CorruptStoreError: it does not describe a table.
            UnsafeContentError: a file name leaves the directory.
        """
        table = ShardTable()
        try:
            for item in value["schemas"]:
                table.number_of_schema(Schema.from_json(item))
            count = declared_rows(value["numbers"])
            for item in (value["family"], value["row"]):
                if declared_rows(item) != count:
                    raise CorruptStoreError("shard table: arrays of different lengths")
            for item in value["families"]:
                table._add_family(item, count)
            table._numbers = array_from_json(value["numbers"], np.int64)
            table._family = array_from_json(value["family"], np.int32)
            table._row = array_from_json(value["row"], np.int32)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise CorruptStoreError(f"not a shard table: {error}") from error
        table._count = len(table._numbers)
        table._check_rows()
        table._born, table._removed = np.zeros(table._count, np.int64), np.zeros(table._count, np.bool_)
        table._unneeded = np.full(table._count, NEEDED)
        return table

    def _add_family(self, item: Any, most: int) -> None:
        if not (names := tuple(item["file_names"])):
            raise CorruptStoreError("shard table: shards without files")
        for name in names:
            check_name(name.replace(_NAME, shard_name(0)))
        columns = len(self.schemas[item["schema"]].columns)
        family = _Family(item["format"], item["schema"], names, tuple(item["column_files"]))
        widths = {"sizes": len(names), "crc32": len(names)}
        for name in ("sizes", "crc32", "offsets", "column_crc32", "rows", "nbytes"):
            if declared_rows(item[name]) > most:
                raise CorruptStoreError(f"shard table: {name} claims more rows than there are shards")
            array = array_from_json(item[name], np.int64, 2)
            if array.shape[1] != widths.get(name, columns) or (array.size and array.min() < ABSENT):
                raise CorruptStoreError(f"shard table: {name} does not fit its schema")
            family.arrays[name] = array
            family.count = len(array)
        if any(len(array) != family.count for array in family.arrays.values()):
            raise CorruptStoreError("shard table: arrays of different lengths")
        if len(family.column_files) != columns or any(not ABSENT <= n < len(names) for n in family.column_files):
            raise CorruptStoreError("shard table: column_files does not fit its schema")
        self._check_places(family)
        key = (family.format, family.schema, family.file_names, family.column_files)
        self._family_numbers[key] = len(self._families)
        self._families.append(family)

    def _check_places(self, family: _Family) -> None:
        """Refuse columns that begin before or end after their file, which would be read out of bounds."""
        schema = self.schemas[family.schema]
        for column, file in enumerate(family.column_files):
            if not family.count:
                continue
            rows, nbytes = (family.arrays[name][:, column] for name in ("rows", "nbytes"))
            if np.any(rows < 0) or np.any(nbytes < 0):
                raise CorruptStoreError("shard table: a column of fewer than 0 rows or bytes")
            if schema.kind == "step" and column not in schema.stored_once:
                width = schema.row_nbytes[column]
                if np.any(nbytes % width if width else nbytes) or np.any(nbytes // max(width, 1) != rows * bool(width)):
                    raise CorruptStoreError("shard table: the bytes of a column are not those of its rows")
            if file == ABSENT:
                if np.any(family.arrays["offsets"][:, column] != ABSENT):
                    raise CorruptStoreError("shard table: a column that lies in no file begins at a byte")
                continue
            room = family.arrays["sizes"][:, file] - family.arrays["offsets"][:, column]
            if np.any(family.arrays["offsets"][:, column] < 0) or np.any(room < 0):
                raise CorruptStoreError("shard table: a column begins outside its file")
            if np.any(nbytes > room):
                raise CorruptStoreError("shard table: a column ends after its file")

    def _check_rows(self) -> None:
        if len(self._family) != self._count or len(self._row) != self._count:
            raise CorruptStoreError("shard table: arrays of different lengths")
        if not self._count:
            return
        counts = np.array([family.count for family in self._families], np.int64)
        if self._family.min() < 0 or self._family.max() >= len(counts) or self._row.min() < 0:
            raise CorruptStoreError("shard table: a family that is not there")
        if np.any(self._row >= counts[self._family]) or self._numbers.min() < 0:
            raise CorruptStoreError("shard table: a row that is not there")
