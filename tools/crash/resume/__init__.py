"""Killing a training loop around its checkpoints: the resumed run must equal the uninterrupted one."""
