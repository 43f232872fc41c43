"""Object stores: buckets, the paths in them, and the reading of their objects."""
