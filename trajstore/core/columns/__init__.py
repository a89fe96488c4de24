"""A trajectory as columns: its fields, schema, checks, and memory of its own. Imports nothing of the rooms above it."""
