"""The programs that evaluate a model, and their results."""
