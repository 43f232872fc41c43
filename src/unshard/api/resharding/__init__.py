"""`reshard`: a training checkpoint, for another number of ranks."""
