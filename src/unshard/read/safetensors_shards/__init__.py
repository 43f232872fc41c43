"""Safetensors files of which each has a shard of the tensors."""
