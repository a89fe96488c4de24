"""Damaging directories at random and looking at what reading them does; see docs/crash-testing.md."""
