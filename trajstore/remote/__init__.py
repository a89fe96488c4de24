"""Directories, locks and leases in object storage; mirrors of stores."""
