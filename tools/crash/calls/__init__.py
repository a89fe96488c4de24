"""Kills processes that record agent sessions."""
