"""The server: it accepts jobs, runs evaluators, and keeps the results. Only `http/` knows HTTP."""
