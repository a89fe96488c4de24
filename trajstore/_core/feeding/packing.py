"""Selection of trajectories for a pack of tokens, and their layout in it. Arithmetic only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trajstore._core.base.types import IntArray
from trajstore._core.columns.limits import UNKNOWN_VERSION
from trajstore._core.feeding.options import Layout
from trajstore._core.reading.late import COLUMNS
from trajstore._core.reading.tokens import TokenRows
from trajstore._core.sampling.base import Drawn


class Room:
    """The filling of a pack. The first trajectory always fits, so that none waits forever.

    Args:
        tokens: maximum tokens of the pack; for padded ones, the trajectory count times the longest.
        layout: layout of the pack.
    """

    def __init__(self, tokens: int, layout: Layout) -> None:
        self._tokens = tokens
        self._layout = layout
        self._count = self._total = self._longest = 0

    def _size(self, length: int) -> int:
        if self._layout == "packed":
            return self._total + length
        return (self._count + 1) * max(self._longest, length)

    def take(self, length: int) -> bool:
        """Add a trajectory if it fits; return whether it did."""
        if self._count and self._size(length) > self._tokens:
            return False
        self._count += 1
        self._total += length
        self._longest = max(self._longest, length)
        return True

    @property
    def full(self) -> bool:
        """True if not even a one-token trajectory fits."""
        return self._count > 0 and self._size(1) > self._tokens


def lay_out(rows: TokenRows, layout: Layout, pad_id: int, drawn: Drawn) -> dict[str, Any]:
    """Return a pack of n trajectories with N tokens in total and at most K each.

    Token columns are ``[N]`` packed, ``[n, K]`` right-padded. Response columns (``old_log_probs``, ...) are aligned
    with the response tokens. Prompt and padding positions without values are 0 (``input_ids``: ``pad_id``).

    ========================== ============================ ==================================================
    key                        packed, padded               meaning
    ========================== ============================ ==================================================
    each column                [N], [n, K]                  as stored; of several dtypes the widest
    ``position_ids``           int64 [N], [n, K]            place within its trajectory; 0 at the right
    ``response``               bool [N], [n, K]             token of the response
    ``cu_seqlens``             int32 [n + 1], absent        start of each trajectory, and N
    ``sequence_ids``           int64 [N], absent            index of the trajectory, below n
    ``max_seqlen``             int, absent                  K
    ``mask``                   absent, bool [n, K]          token rather than padding
    ``lengths``                int64 [n]                    tokens of each
    ``trajectory_ids``         int64 [n]                    id of each in the store
    ``outcomes``               float64 [n]                  ``Reward.outcome``, or a late one; NaN = unknown
    ``notes``                  dict of float64 [n]          late values of columns ``notes.NAME``;
                                                            per-row ones [N], [n, K] as given; NaN if none
    ``policy_versions``        int64 [n]                    -1 = unknown
    ``weights``                float32 [n], or absent       the sampler's, relative to one draw
    ``probabilities``          float64 [n], or absent       chance of each in its draw
    ``uses``                   int64 [n], or absent         draws that each was in, with ``UseLimit``
    ``task_ids``               list of n strings            task of each
    ========================== ============================ ==================================================

    Raises:
        CorruptStoreError: a trajectory's document is damaged.
    """
    count, lengths = len(rows.ids), rows.lengths
    longest = int(lengths.max()) if count else 0
    documents = rows.documents()
    width = longest if layout == "padded" else 0
    starts = np.arange(count) * longest if layout == "padded" else np.cumsum(lengths) - lengths
    total = count * longest if layout == "padded" else int(lengths.sum())
    place = np.full(total, -1, np.int64)
    inside = np.repeat(starts, lengths) + _counted(lengths)
    place[inside] = _counted(lengths)
    known = place >= 0
    begins = np.array([_response_start(*of) for of in zip(lengths, rows.responses, documents, strict=True)], np.int64)
    response = np.zeros(total, np.bool_)
    response[inside] = _counted(lengths) >= np.repeat(begins, lengths)
    values: dict[str, torch.Tensor] = rows.copy(starts, total)
    if "input_ids" in values and pad_id:
        values["input_ids"][torch.from_numpy(~known)] = pad_id
    values |= {"position_ids": torch.from_numpy(np.where(known, place, 0)), "response": torch.from_numpy(response)}
    if layout == "padded":
        values["mask"] = torch.from_numpy(known)
    shape = (count, width) if layout == "padded" else (total,)
    pack: dict[str, Any] = {
        name: value.reshape(shape) for name, value in values.items() if not name.startswith(COLUMNS)
    }
    notes = {
        name.removeprefix(COLUMNS): value.reshape(shape) for name, value in values.items() if name.startswith(COLUMNS)
    }
    if layout == "packed":
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        pack["cu_seqlens"] = torch.from_numpy(ends.astype(np.int32))
        pack["sequence_ids"] = torch.from_numpy(np.repeat(np.arange(count), lengths))
        pack["max_seqlen"] = longest
    rewards = [document.get("reward") or {} for document in documents]
    rewards_or_outcomes = [reward.get("outcome") if isinstance(reward, dict) else reward for reward in rewards]
    outcomes = np.array([np.nan if outcome is None else float(outcome) for outcome in rewards_or_outcomes], np.float64)
    pack |= {
        "lengths": torch.from_numpy(lengths.copy()),
        "trajectory_ids": torch.from_numpy(rows.ids.copy()),
        "outcomes": torch.from_numpy(np.where(np.isnan(rows.corrected), outcomes, rows.corrected)),
        "policy_versions": torch.from_numpy(np.where(rows.versions == UNKNOWN_VERSION, -1, rows.versions)),
        "task_ids": [str(document.get("task_id") or "") for document in documents],
    }
    notes |= {name: torch.from_numpy(values) for name, values in rows.late.items()}
    if notes:
        pack["notes"] = notes
    for name in ("weights", "probabilities", "uses"):
        if (numbers := getattr(drawn, name)) is not None:
            pack[name] = torch.from_numpy(numbers.copy())
    return pack


def _counted(lengths: IntArray) -> IntArray:
    """Return 0, 1, ... up to each length, concatenated."""
    ends = np.cumsum(lengths)
    counted: IntArray = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return counted


def _response_start(length: int, response: int, document: dict[str, Any]) -> int:
    """Return the start of the response: from its columns, else as recorded in the trajectory, else none."""
    if response:
        return int(length - response)
    recorded_start = document.get("response_start")
    return int(length if recorded_start is None else recorded_start)
