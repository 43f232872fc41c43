"""Torch distributed checkpoints: `.metadata` and `*.distcp`."""
