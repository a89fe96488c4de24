"""Looking at directories: what lies there, what it holds, whether it is whole.

Floor 8 of ``docs/design/house.md``: imports from lower floors only.
"""
