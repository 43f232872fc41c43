"""Tensors as integers: boxes, placements, dtypes and the catalog. Pure: nothing here does I/O."""
