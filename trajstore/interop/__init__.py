"""Other projects' directories and names."""
