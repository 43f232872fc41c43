"""Merge each checkpoint of a run as soon as it is complete."""
