"""Which job runs when, on which GPUs, and what becomes of it."""
