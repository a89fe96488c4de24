"""RLinf: its directories read in place and written (``layout``, ``source``)."""
