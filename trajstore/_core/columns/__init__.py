"""A trajectory as columns: its fields, schema, checks, and private memory. Imports no higher package."""
