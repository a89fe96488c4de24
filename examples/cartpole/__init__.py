"""CartPole learned from a replay buffer on disk. Imports run downward: ``run`` → ``dqn``."""
