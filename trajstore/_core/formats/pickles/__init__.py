"""Reads foreign pickles without running code that they name."""
