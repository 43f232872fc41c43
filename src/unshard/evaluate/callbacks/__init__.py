"""Callbacks of trainers: each module imports its trainer, which must be installed."""
