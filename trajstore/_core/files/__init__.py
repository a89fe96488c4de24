"""Durable files, written atomically or appended; writer locks and reader leases. Knows nothing of trajectories."""
