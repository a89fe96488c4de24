"""The way from disk to a batch: sources, the entries shown, and where their rows can be read now.

Floor 4 of ``docs/design/house.md``: imports from lower floors only.
"""
