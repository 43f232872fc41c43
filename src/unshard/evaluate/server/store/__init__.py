"""The database of jobs and results."""
