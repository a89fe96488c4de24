"""Suites that every format and every directory must pass; for tests of formats and directories written elsewhere too.

Needs pytest. Subclass :class:`~trajstore.testing.formats.FormatConformance` or
:class:`~trajstore.testing.directory.DirectoryConformance` in a test module and define its fixture.
"""
