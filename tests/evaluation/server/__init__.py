"""Tests of `unshard.evaluate.server`."""
