"""Pictures of the page over a store, for the documentation."""
