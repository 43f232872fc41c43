"""Megatron-core's names and layouts, and those of the hub."""
