"""Use a checkpoint without merging it: tensors on demand, models in memory, files, uploads."""
