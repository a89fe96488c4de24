"""Queries over the trajectories that a reader shows."""

from __future__ import annotations

from functools import partial

from trajstore.core.base.arguments import one_of
from trajstore.query.facts import Facts
from trajstore.query.query import Query
from trajstore.query.readable import Locked
from trajstore.query.relations import RELATIONS, TRAJECTORIES, Asked, Found, late_columns, read_rows, scan


class Queries:
    """Makes the queries of one reader; keeps the table of facts between them.

    Args:
        locked: calls a function with the contents of the reader, under its lock.
    """

    def __init__(self, locked: Locked) -> None:
        self._locked = locked
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
            one_of("relation", relation, (TRAJECTORIES, *RELATIONS)),
        )

    def _read(self, asked: Asked) -> Found:
        tables, faults = read_rows(self._locked, asked)
        numbers = [number for number, _ in faults]
        if numbers:  # those that are gone were evicted
            there = self._locked(lambda contents: contents.index.find_many(numbers) >= 0)
            self.damaged.update(number for number, is_there in zip(numbers, there.tolist(), strict=True) if is_there)
        return tables, faults
