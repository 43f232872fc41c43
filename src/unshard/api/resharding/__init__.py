"""`reshard`: write a training checkpoint for another number of ranks."""
