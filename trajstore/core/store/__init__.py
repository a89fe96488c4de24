"""What one directory says: snapshot, log, shards, saved points, and the committed state that they make together."""
