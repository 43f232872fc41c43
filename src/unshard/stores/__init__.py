"""Object stores: buckets, the paths in them, and the reading of their objects."""

OTHER_SCHEMES = ("http", "https", "hf")
"""Those of addresses that `other_stores` reads, and not obstore."""
