"""What runs in the trainer's process, or watches its directory: submissions out, results in."""
