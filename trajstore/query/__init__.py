"""Queries over trajectories: facts, messages, tokens and steps, with SQL expressions."""

from trajstore._core.store.facts import FACTS
from trajstore.query.facts import Facts
from trajstore.query.query import Query
from trajstore.query.relations import RELATIONS
from trajstore.query.stream import Stream

__all__ = ["FACTS", "RELATIONS", "Facts", "Query", "Stream"]
