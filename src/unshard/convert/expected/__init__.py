"""The tensors that a model must have: those of its base, or those that its config says."""
