"""What trainers call: each module imports its trainer, and is imported by those who have it."""
