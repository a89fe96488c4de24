"""The way from memory to disk: queue, pool of threads, log of commits, housekeeping.

Floor 5 of ``docs/design/house.md``: imports from lower floors only.
"""
