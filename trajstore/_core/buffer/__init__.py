"""The replay buffer that users hold, and the parts that only it needs."""
