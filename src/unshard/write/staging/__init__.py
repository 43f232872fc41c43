"""A directory next to the target, and its commit: whole, or not at all."""
