"""A page over a living store: ``trajstore view``, and :func:`serving` for what has no path."""

from trajstore.view.serving import serving

__all__ = ["serving"]
