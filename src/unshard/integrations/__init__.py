"""Hooks in trainers' own processes."""
