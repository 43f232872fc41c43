"""Plugins with which inference engines load training shards without a merge."""
