"""Killing a writer at random moments and looking at what it leaves; see docs/crash-testing.md."""
