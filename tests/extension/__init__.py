"""Additions to the package that live outside of it."""
