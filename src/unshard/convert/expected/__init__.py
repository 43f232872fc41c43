"""The tensors that a model must have, by its base or by its config."""
