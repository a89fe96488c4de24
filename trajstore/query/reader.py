"""Queries over the trajectories that a reader shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from trajstore._core.base.arguments import one_of
from trajstore._core.files.base import Directory
from trajstore.query.facts import Facts
from trajstore.query.query import Query
from trajstore.query.readable import Locked
from trajstore.query.relations import RELATIONS, TRAJECTORIES, Asked, Found, late_columns, read_rows, scan
from trajstore.query.trained import TRAINED, trained


class Queries:
    """Makes the queries of one reader; keeps the table of facts between them.

    Args:
        locked: calls a function with the contents of the reader, under its lock.
        directories: returns the directories of its stores, by rank.
    """

    def __init__(self, locked: Locked, directories: Callable[[], Mapping[int, Directory]]) -> None:
        self._locked = locked
        self._directories = directories
        self._facts = Facts(locked)
        self.damaged: set[int] = set()
        """Ids of the trajectories whose rows were left out of answers, because they cannot be read."""

    def query(self, relation: str) -> Query:
        """Return a query over one relation.

        Raises:
            ConfigurationError: there is no such relation.
        """
        return Query(
            self._facts.table,
            partial(scan, self._read, partial(late_columns, self._locked)),
            one_of("relation", relation, (TRAJECTORIES, *RELATIONS, TRAINED)),
            lambda: trained(self._directories()),
        )

    def _read(self, asked: Asked) -> Found:
        tables, faults = read_rows(self._locked, asked)
        numbers = [number for number, _ in faults]
        if numbers:  # those that are gone were evicted
            there = self._locked(lambda contents: contents.index.find_many(numbers) >= 0)
            self.damaged.update(number for number, is_there in zip(numbers, there.tolist(), strict=True) if is_there)
        return tables, faults
