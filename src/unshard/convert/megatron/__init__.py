"""Convert Megatron-core's names and layouts to those of the hub."""
