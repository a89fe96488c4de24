"""Conformance suites, failing disks and fault injection, which tests and campaigns share."""
