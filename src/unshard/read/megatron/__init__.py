"""Megatron-core distributed checkpoints: `torch_dist`, which is torch DCP with files next to it."""
