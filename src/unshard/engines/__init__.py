"""Engines that run a plan: local threads, or the nodes of a Ray cluster."""
