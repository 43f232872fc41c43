"""From recipes to a plan: output files and headers, then operations on byte ranges. Pure."""
