"""From a catalog to recipes: names and dtypes of the output, and how it is made. Pure."""
