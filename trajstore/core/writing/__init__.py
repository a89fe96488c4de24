"""The way from memory to disk: queue, pool of threads, log of commits, housekeeping."""
