"""Processes that outlive the server: started, supervised, told apart, ended."""
