"""Durable files: published whole, or appended to; the writer and readers of a directory. No trajectories here."""
