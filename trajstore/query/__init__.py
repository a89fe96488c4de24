"""Questions about trajectories: facts, messages, tokens and steps, filtered, grouped and sorted by expressions of SQL.

Floor 5 of ``docs/design/house.md``: imports from lower floors only.
"""

from trajstore.query.facts import FACTS, Facts
from trajstore.query.query import Query
from trajstore.query.relations import RELATIONS
from trajstore.query.stream import Stream

__all__ = ["FACTS", "RELATIONS", "Facts", "Query", "Stream"]
