"""Rows of a Lance dataset as a batch of torch tensors. Measured beside ours where ``pylance`` is installed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_FILE_BYTES = 16 << 20
"""As large as our shards: what moto's server has to do for a range depends on the size of the object."""

Columns = Mapping[str, torch.Tensor]


def installed() -> bool:
    """Return whether the package ``pylance`` can be imported."""
    try:
        import lance  # noqa: F401
    except ImportError:
        return False
    return True


def write(columns: Columns, place: str | Path, options: Mapping[str, str]) -> None:
    """Write one row for each sample; each column's row is a list of fixed size of its numbers.

    Args:
        columns: tensors ``[samples, ...]`` by name.
        place: path or URL of the dataset.
        options: storage options as Lance names them.
    """
    import lance
    import pyarrow as arrow

    arrays = []
    for column in columns.values():
        flat = column.contiguous().reshape(len(column), -1)
        numbers = arrow.array(flat.reshape(-1).numpy())
        arrays.append(arrow.FixedSizeListArray.from_arrays(numbers, flat.shape[1]))
    table = arrow.table(arrays, names=[_name(name) for name in columns])
    row_bytes = sum(column[0].nbytes for column in columns.values())
    lance.write_dataset(
        table, str(place), max_rows_per_file=max(1, _FILE_BYTES // row_bytes), storage_options=dict(options)
    )


class LanceRows:
    """An opened dataset, of which no row but the first has been read: what Lance has to know of its files, it knows.

    Args:
        place: path or URL of the dataset.
        options: storage options as Lance names them.
        columns: of these shapes and names.
    """

    def __init__(self, place: str | Path, options: Mapping[str, str], columns: Columns) -> None:
        import lance

        self._dataset: Any = lance.dataset(str(place), storage_options=dict(options))
        self._shapes = {name: column.shape[1:] for name, column in columns.items()}
        with warnings.catch_warnings():  # torch says once that what pyarrow lends must not be written to
            warnings.simplefilter("ignore", UserWarning)
            self.take(np.zeros(1, np.int64))

    def take(self, rows: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Return these rows, ``[n, ...]`` by column."""
        found = self._dataset.take(rows)
        batch = {}
        for name, shape in self._shapes.items():
            numbers = found.column(_name(name)).combine_chunks().flatten().to_numpy()
            batch[name] = torch.from_numpy(numbers).reshape(len(rows), *shape)
        return batch


def _name(column: str) -> str:
    """Return what a column is called in a dataset: a dot would mean a struct there."""
    return column.replace(".", "/")
