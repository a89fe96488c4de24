"""Samplers and their weights. Pure: they choose rows from trajectory metadata and a generator."""
