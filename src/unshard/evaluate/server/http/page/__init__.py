"""The page: HTML at `/` and below `/view`, live by events, for people with a browser."""
