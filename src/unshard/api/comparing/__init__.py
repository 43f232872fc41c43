"""Checkpoints compared with one another, without a merge of any."""
