"""Submit checkpoints and fetch results, in the trainer's process or by watching its directory."""
