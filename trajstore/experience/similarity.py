"""Which tasks of the pool are most like those of a batch, by the texts of the tasks.

Takes no lock: the one training loop that owns the pool is the one caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from trajstore.retrieval import RetrievalIndex

Task = TypeVar("Task")


class SimilarTasks(Generic[Task]):
    """An index of the texts of the pool's tasks, which follows the pool. Nothing is left to chance.

    What it answers depends on the tasks that it follows and on their order, not on those that were there before: after
    a resume it answers the same.

    Args:
        get_task: returns the task of an id; ``None`` if the training data have no such task, which is then left out.
        text_of: returns what a task asks for.
    """

    def __init__(self, get_task: Callable[[str], Task | None], text_of: Callable[[Task], str]) -> None:
        self._get_task = get_task
        self._text_of = text_of
        self._index = RetrievalIndex()
        self._keys: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next = 0

    def follow(self, names: Sequence[str]) -> None:
        """Have these tasks in the index, in this order, and no others."""
        last, kept = -1, True
        new: list[str] = []
        for name in names:
            key = self._keys.get(name, -1)
            kept = kept and key > last  # from the first that is new, or stands elsewhere, all are added anew
            if kept:
                last = key
            else:
                new.append(name)
        there = set(names).difference(new)
        self._remove([name for name in self._keys if name not in there])
        self._add(new)

    def nearest(self, tasks: Sequence[Task], among: Collection[str], n: int) -> list[str]:
        """Return up to ``n`` ids of different tasks: in turn the one most like each of the given tasks.

        Args:
            tasks: to be compared with, in the order of their turns.
            among: ids that may be returned.
            n: how many at the most; fewer if no more have a word in common.
        """
        allowed = set(among)
        without = [key for name, key in self._keys.items() if name not in allowed]
        queues = [
            iter([self._names[hit.key] for hit in self._index.search(self._text_of(task), n, without)])
            for task in tasks
        ]
        chosen: dict[str, None] = {}
        while queues and len(chosen) < n:
            left = []
            for queue in queues:
                found = next((name for name in queue if name not in chosen), None)
                if found is not None and len(chosen) < n:
                    chosen[found] = None
                    left.append(queue)
            queues = left
        return list(chosen)

    def _add(self, names: Sequence[str]) -> None:
        keys, texts = [], []
        for name in names:
            task = self._get_task(name)
            if task is None:
                continue
            self._keys[name], self._names[self._next] = self._next, name
            keys.append(self._next)
            texts.append(self._text_of(task))
            self._next += 1
        self._index.add(keys, texts)

    def _remove(self, names: Sequence[str]) -> None:
        keys = [self._keys.pop(name) for name in names]
        for key in keys:
            del self._names[key]
        self._index.remove(keys)
