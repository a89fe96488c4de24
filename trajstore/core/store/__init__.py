"""What one directory says: snapshot, log, shards, saved points, and the committed state that they make together.

Floor 3 of ``docs/design/house.md``: imports from lower floors only.
"""
