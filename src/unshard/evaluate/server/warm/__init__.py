"""Engines that stay between jobs: the process that has one, who hands it jobs, who keeps it."""
