"""Write results to a file and to experiment trackers."""
