"""Kills of actors and of a whole node while producers add through Ray."""
