"""Checkpoints written by real torch in several processes, and the tensors they were made from."""
