"""Replay and durable trajectories in verl's V1 trainer, by configuration alone.

verl loads :mod:`trainer_hooks.verl.plugin` by itself (entry-point group ``verl.plugins``) in every process of a run.
Importing this package loads nothing. It stands above the rest of ``trainer_hooks`` and of ``trajstore``: neither of
them imports it.
"""
