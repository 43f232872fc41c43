"""Processes that outlive the server: started, supervised, identified, ended."""
