"""Who runs a plan: here, threads of one process."""
