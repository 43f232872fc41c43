"""Real checkpoints, written by torch, accelerate, transformers and others."""
