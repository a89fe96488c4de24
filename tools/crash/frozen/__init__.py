"""Writers of an object store that are frozen, lose the store to another writer, and wake up."""
