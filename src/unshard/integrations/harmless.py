"""Error handling for code that runs inside a training, which it must never end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def ignoring_errors(consequence: str) -> Iterator[None]:
    """Log any exception, with its consequence, and continue."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (an error must not end the training)
        log.warning("%s: %s: %s", consequence, type(error).__name__, error)
