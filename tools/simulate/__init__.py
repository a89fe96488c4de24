"""Runs the store in a world in which one seed decides every interleaving, delay, failure and crash."""
