"""How long to wait between failures."""

__all__ = ["backoff"]


def backoff(failures: int, *, first_s: float, most_s: float) -> float:
    """Return how long to wait after a failure: doubled with each of the failures before it."""
    return min(first_s * 2.0 ** min(failures, 32), most_s)
