"""Questions about trajectories: their facts as a table, filtered, grouped and sorted by expressions of SQL.

Floor 5 of ``docs/design/house.md``: imports from lower floors only.
"""

from trajstore.querying.facts import FACTS, Facts
from trajstore.querying.query import Query

__all__ = ["FACTS", "Facts", "Query"]
