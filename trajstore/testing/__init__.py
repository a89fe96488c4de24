"""Conformance suites for formats and directories, including third-party ones.

Needs pytest. Subclass :class:`~trajstore.testing.formats.FormatConformance` or
:class:`~trajstore.testing.directory.DirectoryConformance` in a test module and define its fixture.
"""
