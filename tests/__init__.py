"""Tests. A package, so that a helper imports as `tests.helper` whatever else is installed under that name."""
