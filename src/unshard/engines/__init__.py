"""What runs a plan: threads, or the nodes of a Ray cluster, on files or in memory."""
