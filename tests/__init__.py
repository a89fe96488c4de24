"""Tests. A package, so that no other distribution's ``tests`` takes its name."""
