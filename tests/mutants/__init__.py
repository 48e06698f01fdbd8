"""Mistakes put into a copy of the package, each with the tests that notice it."""
