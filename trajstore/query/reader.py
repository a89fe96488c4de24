"""Queries over the trajectories that a reader shows."""

from __future__ import annotations

from functools import partial

from trajstore.core.base.arguments import one_of
from trajstore.query.facts import Facts
from trajstore.query.query import Query
from trajstore.query.readable import Locked
from trajstore.query.relations import RELATIONS, TRAJECTORIES, late_columns, read_rows, scan


class Queries:
    """Makes the queries of one reader; keeps the table of facts between them.

    Args:
        locked: calls a function with the contents of the reader, under its lock.
    """

    def __init__(self, locked: Locked) -> None:
        self._locked = locked
        self._facts = Facts(locked)

    def query(self, relation: str) -> Query:
        """Return a query over one relation.

        Raises:
            ConfigurationError: there is no such relation.
        """
        return Query(
            self._facts.table,
            partial(scan, partial(read_rows, self._locked), partial(late_columns, self._locked)),
            one_of("relation", relation, (TRAJECTORIES, *RELATIONS)),
        )
