"""The path from memory to disk: queue, thread pool, commit log, maintenance."""
