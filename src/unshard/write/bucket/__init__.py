"""A place in an object store, and an output that is written there directly."""
