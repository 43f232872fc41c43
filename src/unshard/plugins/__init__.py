"""Plugins of inference engines: they load training shards themselves, and nothing is merged."""
