"""Durable files: published whole, or appended to; the writer and readers of a directory. No trajectories here.

Floor 1 of ``docs/design/house.md``: imports from lower floors only.
"""
