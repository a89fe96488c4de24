"""Pickles of others, read without running what they name.

Floor 2 of ``docs/design/house.md``, below the formats beside it: imports from lower floors only.
"""
