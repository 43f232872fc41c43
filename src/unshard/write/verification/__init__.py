"""Checks and comparisons of outputs."""
