"""The version of trajstore."""

VERSION = "0.1.0"
