"""Scheduler and random state of a training."""
