"""Stores in object storage: their directory, locks and leases; and mirrors."""
