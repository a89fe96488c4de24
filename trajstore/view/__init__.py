"""A page over a living store: ``trajstore view``.

Floor 9 of ``docs/design/house.md``: imports from lower floors only.
"""
