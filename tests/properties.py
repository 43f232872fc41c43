"""How many examples a property is tried with, where its test says a number of its own."""

from hypothesis import settings

QUICK = 50
"""How many at most in `make test`."""


def examples(count: int) -> int:
    """Return a number of examples; in `make test` at most 50."""
    return min(count, QUICK) if settings.get_current_profile_name() == "quick" else count
