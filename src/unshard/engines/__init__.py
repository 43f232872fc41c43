"""What runs a plan: threads of one process, or several processes, on files or in memory."""
