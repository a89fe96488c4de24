"""The content of one directory: snapshot, log, shards, saved points, and the committed state they form."""
