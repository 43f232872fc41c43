"""Reads the state of an optimizer: moments by parameter, steps and hyper-parameters."""
