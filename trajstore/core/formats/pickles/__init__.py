"""Pickles of others, read without running what they name."""
