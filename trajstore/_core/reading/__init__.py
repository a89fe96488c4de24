"""Reads batches from disk: sources, visible entries, and addresses of their rows."""
