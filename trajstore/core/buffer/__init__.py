"""The replay buffer that users hold, and the parts that only it needs.

Floor 6 of ``docs/design/house.md``: imports from lower floors only.
"""
