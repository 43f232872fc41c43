"""The command line: parses, calls `api`, prints. It computes nothing."""
