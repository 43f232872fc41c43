"""Where results are written: a file always, and the trackers that a user has."""
