"""Kills the driver of a real verl training, over and over. See ``docs/crash-testing.md``."""
