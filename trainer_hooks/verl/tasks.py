"""Names of tasks, their rows in the training data, and columns of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensordict import NonTensorData, TensorDict
from tensordict.tensorclass import NonTensorStack
from torch import Tensor

from trajstore.errors import ConfigurationError, listed

ROLLOUTS_WANTED = "__rollout_n__"
"""Column of a prompt with the number of rollouts that verl's agent loop makes."""

_MEDIA_KEYS = ("image_key", "video_key", "audio_key")


def task_name(data_source: Any, index: Any) -> str:
    """Return the name of a task, unique across data sources."""
    return f"{data_source}:{index}"


def rollout_counts(said: Sequence[Any]) -> list[int]:
    """Return the number of rollouts per prompt, from the column ``__rollout_n__`` of the training data.

    Raises:
        ConfigurationError: a value is not a whole number of at least 1.
    """
    try:
        counts = [int(value) for value in said]
    except (TypeError, ValueError, OverflowError):
        counts = []
    if len(counts) != len(said) or any(count < 1 or count != value for count, value in zip(counts, said, strict=True)):
        raise ConfigurationError(
            f"training data: column __rollout_n__: {listed(map(repr, said), 5)}, must be a whole number of at least 1"
            " in every row"
        )
    return counts


def column_of(prompts: TensorDict, name: str, usual: Any) -> list[Any]:
    """Return a column as a list of one value per prompt; verl uses a stack, a tensor, or one value for all."""
    if name not in prompts:
        return [usual] * len(prompts)
    held = prompts.get(name)
    if isinstance(held, Tensor):
        return list(held.tolist())
    return [held.data] * len(prompts) if isinstance(held, NonTensorData) else list(prompts[name])


def with_texts(prompts: TensorDict, **columns: Sequence[str]) -> TensorDict:
    """Return a copy of prompts with columns of texts, one for each prompt."""
    result = prompts.copy()
    for name, texts in columns.items():
        result[name] = NonTensorStack(*texts)
    return result


class TaskTable:
    """Finds rows of a dataset by task: ``data_source`` and ``extra_info.index``.

    Args:
        dataset: verl's ``RLHFDataset``, or another with ``__len__`` and similar rows, which are all read once.

    Raises:
        ConfigurationError: rows of one task have different prompts, or rows have images, sound or video.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        _refuse_media(dataset)
        self._positions: dict[str, int] = {}
        for position, task in enumerate(_tasks(dataset)):
            first = self._positions.setdefault(task, position)
            if first != position and dataset[first]["raw_prompt"] != dataset[position]["raw_prompt"]:
                raise ConfigurationError(
                    f"training data: rows {first} and {position} are both task {task!r} but ask different things;"
                    " give every row an extra_info.index of its own within its data_source"
                )

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._positions

    def row(self, task_id: str) -> dict[str, Any]:
        """Return the dataset's row of a task in the table."""
        row: dict[str, Any] = self._dataset[self._positions[task_id]]
        return row

    def text(self, task_id: str) -> str:
        """Return the text of a task's prompt, without system messages."""
        prompt = self.row(task_id)["raw_prompt"]
        contents = [message.get("content") for message in prompt if message.get("role") != "system"]
        return " ".join(content for content in contents if isinstance(content, str))


def _tasks(dataset: Any) -> Iterator[str]:
    frame = getattr(dataset, "dataframe", None)
    names = getattr(frame, "column_names", ())
    if frame is None or "data_source" not in names or "extra_info" not in names:
        for position in range(len(dataset)):
            row = dataset[position]
            yield task_name(row["data_source"], row["index"])
        return
    for source, extra in zip(frame["data_source"], frame["extra_info"], strict=True):
        yield task_name(source, (extra or {}).get("index", 0))  # 0 is the dataset's default


def _refuse_media(dataset: Any) -> None:
    names = set(getattr(getattr(dataset, "dataframe", None), "column_names", ()))
    media = [
        name for name in (getattr(dataset, key, None) for key in _MEDIA_KEYS) if name is not None and name in names
    ]
    if media:
        raise ConfigurationError(
            f"training data: column {', '.join(media)}: tasks with images, sound or video cannot be replayed."
            " Set exp_manager.experience_replay.enable=false; recording works"
        )
