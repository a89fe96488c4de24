"""Other projects' directories, names and environments."""
