"""Tests of `unshard.evaluate`; helpers that several share."""
