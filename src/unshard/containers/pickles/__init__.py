"""Pickles, read without running anything, and written."""
