"""The way from disk to a batch: sources, the entries shown, and where their rows can be read now."""
