"""Damage directories at random and check how they are read; see docs/crash-testing.md."""
