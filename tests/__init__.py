"""Tests; a package, so that no other distribution's ``tests`` shadows it."""
