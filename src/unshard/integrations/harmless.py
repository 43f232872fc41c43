"""What runs inside a training must never end it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def ignoring_errors(what: str) -> Iterator[None]:
    """Log any exception and continue: nothing here may hurt a training."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (the one place where this is the contract)
        log.warning("%s: %s: %s", what, type(error).__name__, error)
