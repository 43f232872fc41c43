"""From a catalog to recipes: names and dtypes of output tensors, and how each is made. Pure."""
