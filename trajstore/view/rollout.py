"""The answer about one trajectory: JSON followed by raw arrays. Pure.

The body consists of the length of the JSON (uint32), the JSON, spaces up to a multiple of 8, and the arrays, all
little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import torch

from trajstore.attachments import summarized
from trajstore.operations.statistics import sampled_rows
from trajstore.operations.trajectory_report import block_texts, columns_of, first_token, path_of, token_parts
from trajstore.trajectory import AgentTrajectory, AnyTrajectory, Trajectory
from trajstore.view.session import tokens_of

Answer = dict[str, Any]
Decode = Callable[[Sequence[int]], str]
AnyArray = npt.NDArray[Any]

_ALIGNMENT = 8

_MOST_CHANNELS = 16
"""Maximum number of values per step and environment in a curve; larger columns are not curves."""

_MOST_CONTINUED = 8
"""Maximum number of tokens that form one character."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def body_of(answer: Answer, arrays: Iterable[tuple[Answer, AnyArray]]) -> bytes:
    """Return the body of an answer.

    Args:
        answer: JSON values.
        arrays: (description, array). The JSON lists the descriptions as ``arrays``, with ``type`` (``f4``, ``f8``,
            ``i4``, ``i8`` or ``u1``), ``shape`` and ``at``, the offset after the JSON.
    """
    described, parts, at = [], [], 0
    for description, array in arrays:
        plain = _plain(array)
        data = plain.tobytes()
        parts += [data, bytes(-len(data) % _ALIGNMENT)]
        described.append({**description, "type": plain.dtype.str[1:], "shape": list(plain.shape), "at": at})
        at += len(data) + len(parts[-1])
    head = orjson.dumps({**answer, "arrays": described})
    head += b" " * (-(len(head) + 4) % _ALIGNMENT)
    return b"".join([struct.pack("<I", len(head)), head, *parts])


def _plain(array: AnyArray) -> AnyArray:
    """Return an array in the narrowest dtype of answers that represents all its values exactly."""
    if array.dtype == np.uint8 or array.dtype == np.float64:
        return array
    if array.dtype.kind == "f":
        return array.astype("<f4")
    limits = np.iinfo(np.int32)
    fits = not array.size or (array.min() >= limits.min and array.max() <= limits.max)
    return array.astype("<i4" if fits else "<i8")


def answer_of(trajectory: AnyTrajectory, decode: Decode | None) -> bytes:
    """Return the body of the answer about a trajectory.

    Args:
        trajectory: the trajectory.
        decode: decodes tokens; None if no tokenizer is known.
    """
    if isinstance(trajectory, AgentTrajectory):
        return _rollout(trajectory, decode)
    return _block(trajectory)


# -- rollouts ------------------------------------------------------------------------------------------


def _rollout(trajectory: AgentTrajectory, decode: Decode | None) -> bytes:
    columns, total = columns_of(trajectory), tokens_of(trajectory)
    arrays, left_out = [], []
    for name, tensor in columns.items():
        if tensor.is_complex():
            left_out.append(f"{name}: complex numbers have no colour")
            continue
        first = first_token(len(tensor), total, trajectory.response_start)
        arrays.append(({"name": name, "first": first}, array_of(tensor)))
    arrays += _noted(trajectory, total)
    ids = trajectory.input_ids
    texts = None if ids is None or decode is None else texts_of(ids.tolist(), decode)
    session, unplaced = path_of(trajectory, total)
    answer = {
        "kind": "agent",
        "query": trajectory.query,
        "messages": trajectory.messages,
        "reward": None if trajectory.reward is None else asdict(trajectory.reward),
        "metadata": summarized(trajectory.metadata),
        "tokenizer_fingerprint": trajectory.tokenizer_fingerprint or None,
        "tokens": total or None,
        "parts": [[part["part"], part["first"], part["tokens"]] for part in token_parts(trajectory)],
        "texts": texts,
        "session": session,
        "left_out": left_out + unplaced,
    }
    return body_of(answer, arrays)


def array_of(tensor: torch.Tensor) -> AnyArray:
    """Return a tensor of numbers as an array; bfloat16, which numpy lacks, becomes float32."""
    wide = tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
    array: AnyArray = wide.numpy()
    return array.astype(np.uint8) if array.dtype == np.bool_ else array


def _noted(trajectory: AgentTrajectory, total: int) -> list[tuple[Answer, AnyArray]]:
    """Return the lists of numbers in ``metadata`` with one entry per token, or per token of the response."""
    start = trajectory.response_start
    lengths = {total} if start is None else {total, total - start}
    arrays = []
    for name, values in trajectory.metadata.items():
        if not isinstance(values, list) or not values or len(values) not in lengths:
            continue
        if all(isinstance(value, int | float) for value in values):
            first = first_token(len(values), total, start)
            arrays.append(({"name": f"metadata.{name}", "first": first}, np.array(values, np.float64)))
    return arrays


def texts_of(ids: Sequence[int], decode: Decode) -> Answer:
    """Return the texts of tokens: ``{"ids", "words", "joined"}``.

    ``words`` has the text of each of the distinct ``ids``. A character formed by several tokens is in ``joined`` as
    ``[position of the first token, number of tokens, text]``.
    """
    before = decode(ids[:1])  # some tokenizers drop a leading space, so each token is decoded after the same one
    words: dict[int, str] = {}
    for number in dict.fromkeys(ids):
        both = decode([ids[0], number])
        words[number] = both[len(before) :] if both.startswith(before) else decode([number])
    joined, place = [], 0
    while place < len(ids):
        count = 1
        if words[ids[place]].endswith(_UNFINISHED):
            for more in range(2, min(_MOST_CONTINUED, len(ids) - place) + 1):
                text = decode(ids[place : place + more])
                if not text.endswith(_UNFINISHED):
                    joined.append([place, more, text])
                    count = more
                    break
        place += count
    return {"ids": list(words), "words": list(words.values()), "joined": joined}


# -- blocks of steps -----------------------------------------------------------------------------------


def _columns(trajectory: Trajectory) -> tuple[dict[str, torch.Tensor], int, int]:
    """Return the columns of a block by name, and its numbers of steps and environments."""
    columns = columns_of(trajectory)
    whole = next((columns[name] for name in ("prev_logprobs", "rewards") if name in columns), None)
    steps, batch = (0, 0) if whole is None else whole.shape[:2]
    return columns, steps, batch


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures of a block's column.

    Attributes:
        rows: ``[T, B, height, width, channels]``, channels 1, 3 or 4.
        scale: values that are drawn black and white; None: they are bytes.
    """

    rows: torch.Tensor
    scale: tuple[float, float] | None

    def frames(self, environment: int, steps: Sequence[int]) -> bytes:
        """Return pictures of an environment as bytes ``[n, height, width, channels]``; NaN is black."""
        rows = self.rows[list(steps), environment]
        if self.scale is not None:
            black, white = self.scale
            shares = (rows.double() - black) / ((white - black) or 1.0)
            rows = (shares.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
        return rows.contiguous().numpy().tobytes()


def pictures_of(trajectory: Trajectory) -> dict[str, Pictures]:
    """Return a block's pictures by column name."""
    columns, steps, _ = _columns(trajectory)
    found = {}
    for name, tensor in columns.items():
        if (rows := _as_pictures(name, tensor)) is not None:
            rows = sampled_rows(rows, steps, name)
            found[name] = Pictures(rows, None if tensor.dtype == torch.uint8 else _scale_of(rows))
    return found


def _as_pictures(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a column as pictures with channels last; None if it is none.

    Channels are first where the last axis cannot be they, as in ``[T, B, 3, height, width]``; of four grey pictures
    (stacked frames) the last is taken. Without an axis of channels, bytes are pictures, and observations of other
    numbers from 16 x 16 on.
    """
    sides = tensor.shape[2:]
    if not tensor.numel() or tensor.is_complex() or tensor.dtype == torch.bool or len(sides) not in (2, 3):
        return None
    if len(sides) == 2:
        is_image = tensor.dtype == torch.uint8 or (name.startswith(("curr_obs", "next_obs")) and min(sides) >= 16)
        tensor = tensor.unsqueeze(-1) if is_image else tensor
    elif sides[2] not in (1, 3, 4) and sides[0] in (1, 3, 4):
        tensor = (tensor if sides[0] < 4 else tensor[:, :, 3:]).movedim(2, -1)
    is_picture = tensor.dim() == 5 and tensor.shape[4] in (1, 3, 4) and min(tensor.shape[2:4]) > 1
    return tensor if is_picture else None


def _scale_of(rows: torch.Tensor) -> tuple[float, float]:
    """Return the values of black and white: 0 and 1 if all are within these, else the lowest and the highest."""
    finite = rows[torch.isfinite(rows)] if rows.is_floating_point() else rows.long()  # torch compares no uint16
    if not finite.numel():
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _block(trajectory: Trajectory) -> bytes:
    columns, steps, batch = _columns(trajectory)
    arrays: list[tuple[Answer, AnyArray]] = []
    others: list[Answer] = []
    pictures = pictures_of(trajectory)
    for name, tensor in columns.items():
        channels = tensor[0, 0].numel() if tensor.dim() >= 2 and tensor.numel() else 0
        if 0 < channels <= _MOST_CHANNELS and tensor.shape[1] == batch and not tensor.is_complex():
            rows = sampled_rows(tensor, steps, name)
            arrays.append(({"name": name}, array_of(rows).reshape(steps, batch, channels)))
            continue
        description = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        drawn = pictures.get(name)
        size = None if drawn is None else list(drawn.rows.shape[2:])
        scale = None if drawn is None or drawn.scale is None else [f"{value:.4g}" for value in drawn.scale]
        others.append({**description, "pictures": size, "scale": scale})
    answer = {"kind": "step", "steps": steps, "batch": batch, "columns": others}
    return body_of({**answer, "texts": {name: str(text) for name, text in block_texts(trajectory).items()}}, arrays)
