"""Evaluators on the nodes of a Ray cluster: placed, watched and ended from the server's machine."""
