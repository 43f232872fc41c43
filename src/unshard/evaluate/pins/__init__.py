"""Pins: hard links that keep a checkpoint until it is evaluated."""
