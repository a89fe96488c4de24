"""Experience replay inside a training loop: batches, masks, losses, advantages, metrics, and the trainers.

Import each module by its own name; importing this package loads nothing.
"""
