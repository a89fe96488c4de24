"""Experience replay inside a training loop: batches, masks, losses, advantages, metrics, and the trainers.

Every module is imported by its own name; importing this package loads nothing.
"""
