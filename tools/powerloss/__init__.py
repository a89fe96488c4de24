"""Power loss: what changes files is recorded, and every kind of disk that a crash may leave is looked at."""
