"""Replay and durable trajectories in verl's V1 trainer, by configuration alone.

verl loads :mod:`trainer_hooks.verl.plugin` (entry-point group ``verl.plugins``) in every process of a run. Importing
this package loads nothing. The rest of ``trainer_hooks`` and ``trajstore`` do not import it.
"""
