"""The log of long-running commands, on stderr."""

import logging

from unshard.errors import printable

__all__ = ["log_to_stderr"]


class _Printable(logging.Formatter):
    """Escapes control characters: texts come from servers, evaluators and trackers."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr(level: int, form: str) -> None:
    """Let all loggers write to stderr, unless the process has set up its logging already.

    Args:
        level: the lowest level that is written.
        form: the format of a line for `logging.Formatter`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable(form))
    logging.basicConfig(level=level, handlers=[handler])
