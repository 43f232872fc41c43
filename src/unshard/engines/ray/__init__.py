"""The nodes of a Ray cluster run a plan, a comparison or a verification."""
