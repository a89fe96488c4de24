"""Feeds a learner: batches drawn and read ahead, exact and elastic resume."""
