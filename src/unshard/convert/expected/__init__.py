"""The tensors that a model must have, according to its base or its config."""
