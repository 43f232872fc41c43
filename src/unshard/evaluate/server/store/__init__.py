"""The database: the truth about jobs and results."""
