"""A checkpoint in another format than the one it came in."""
