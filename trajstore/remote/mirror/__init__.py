"""A copy of a store that follows its writer to another place, and the way back: see docs/design/mirror.md."""
