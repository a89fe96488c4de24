"""Questions about trajectories: facts, messages, tokens and steps, filtered, grouped and sorted by expressions of SQL.

Floor 5 of ``docs/design/house.md``: imports from lower floors only.
"""

from trajstore.querying.facts import FACTS, Facts
from trajstore.querying.query import Query
from trajstore.querying.relations import RELATIONS
from trajstore.querying.stream import Stream

__all__ = ["FACTS", "RELATIONS", "Facts", "Query", "Stream"]
