"""From a path to a catalog: detect, discover, one module per format, companions, checks."""
