"""Hooks for trainers' own processes: what they call is replaced, or called back, by unshard."""
