"""What uses a checkpoint without merging it: tensors on demand, and models in memory."""
