"""Engines that are kept between jobs: their process, its client, and their list."""
