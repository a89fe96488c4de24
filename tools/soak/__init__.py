"""A store used for an hour: what it takes of disk, memory, descriptors, maps and threads must not grow."""
