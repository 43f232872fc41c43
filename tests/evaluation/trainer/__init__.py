"""Tests of what runs next to a trainer: callbacks, sinks, the submitter, the watcher."""
