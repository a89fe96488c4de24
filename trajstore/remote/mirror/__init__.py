"""A continuously updated copy of a store elsewhere, and restoring from it: see docs/design/many-machines.md."""
