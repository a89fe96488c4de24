"""A page over a living store: ``trajstore view``."""
