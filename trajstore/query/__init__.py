"""Queries over trajectories: facts, messages, tokens and steps, with SQL expressions."""

from trajstore._core.store.facts import FACTS
from trajstore.query.facts import Facts
from trajstore.query.query import Query, Stream
from trajstore.query.relations import RELATIONS

__all__ = ["FACTS", "RELATIONS", "Facts", "Query", "Stream"]
