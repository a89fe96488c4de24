"""A node is lost with its disk, again and again, and its store made anew of the mirror: docs/crash-testing.md."""
