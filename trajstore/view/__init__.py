"""A page over a living store: ``trajstore view``, and :func:`serving` for what has no path.

Floor 9 of ``docs/design/house.md``: imports from lower floors only.
"""

from trajstore.view.serving import serving

__all__ = ["serving"]
