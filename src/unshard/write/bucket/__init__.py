"""Outputs that are written directly into an object store."""
