"""Evaluate every checkpoint while training goes on. Core commands never import this room."""
