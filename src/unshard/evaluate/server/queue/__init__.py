"""Which job runs when, on which GPUs, and how it ends."""
