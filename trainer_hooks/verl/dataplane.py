"""Reads and writes rows of verl's data plane (TransferQueue). The only module here that calls it.

The data plane has one value per row and column. It silently drops a requested column if one row lacks it;
:func:`read_rows` raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from trainer_hooks.transfer_queue.rows import Row, column_values
from trajstore.errors import ConfigurationError


def read_rows(batch: KVBatchMeta, needed: Sequence[str], welcome: Sequence[str] = ()) -> list[Row]:
    """Return rows with these columns, in the order of the batch; token columns share one buffer.

    Args:
        batch: keys of the rows.
        needed: required columns.
        welcome: optional columns, read if every row has them.

    Raises:
        ConfigurationError: a row lacks a required column; the message names it.
    """
    if not batch.keys:
        return []
    names = [*needed, *welcome]
    data = tq.kv_batch_get(keys=list(batch.keys), partition_id=batch.partition_id, select_fields=names)
    present = set(data.keys())
    lacking = [name for name in needed if name not in present]
    if lacking:
        raise ConfigurationError(
            f"the data plane has no column {', '.join(lacking)} for these {len(batch.keys)} rows: one of them was"
            " written without, and the plane then drops it for all. Every writer of rows must write it"
        )
    columns = {name: column_values(data, name) for name in names if name in present}
    return [
        Row(key, tag, {name: values[number] for name, values in columns.items()})
        for number, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True))
    ]


def prompts_under_way(partition_id: str) -> set[str]:
    """Return the ``uid`` of every prompt whose rollouts are neither sampled nor dropped."""
    rows = (tq.kv_list(partition_id) or {}).get(partition_id, {})
    return {key for key, tag in rows.items() if tag.get("is_prompt", False)}


def read_whole_row(key: str, tag: dict[str, Any], partition_id: str) -> Row:
    """Return one row with all its columns."""
    data = tq.kv_batch_get(keys=[key], partition_id=partition_id)[0]
    return Row(key, tag, {name: data[name] for name in data.keys()})  # noqa: SIM118 - no dict


def add_rows(rows: Sequence[Row], partition_id: str) -> None:
    """Add rows with their tags to the data plane. All rows must have the same columns."""
    if rows:
        tq.kv_batch_put(
            keys=[row.key for row in rows],
            partition_id=partition_id,
            fields=list_of_dict_to_tensordict([dict(row.columns) for row in rows]),
            tags=[dict(row.tag) for row in rows],
        )


def write_column(keys: Sequence[str], partition_id: str, name: str, values: Sequence[Tensor]) -> None:
    """Write a token column of rows, one tensor per row."""
    if keys:
        jagged = torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
        tq.kv_batch_put(
            keys=list(keys), partition_id=partition_id, fields=TensorDict({name: jagged}, batch_size=len(keys))
        )


def part_of(batch: KVBatchMeta, places: Sequence[int]) -> KVBatchMeta:
    """Return the rows of a batch at ``places``."""
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[batch.keys[place] for place in places],
        tags=[batch.tags[place] for place in places],
        extra_info=batch.extra_info,
    )


def without_padding(batch: KVBatchMeta) -> KVBatchMeta:
    """Return the batch without verl's padding rows."""
    real = [place for place, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    return batch if len(real) == len(batch.keys) else part_of(batch, real)
