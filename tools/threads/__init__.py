"""Threads of one process that read while what they read is replaced and given back. See docs/crash-testing.md."""
