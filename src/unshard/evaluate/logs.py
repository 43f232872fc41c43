"""Log lines of commands that run for long, on stderr."""

import logging

from unshard.errors import printable

__all__ = ["log_to_stderr"]


class _Printable(logging.Formatter):
    """Escapes what would control a terminal: reasons come from servers, evaluators and trackers."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr(level: int, form: str) -> None:
    """Let all loggers write to stderr, unless the process has set up its logging already.

    Args:
        level: the lowest that is written.
        form: of a line, as `logging.Formatter` takes it.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable(form))
    logging.basicConfig(level=level, handlers=[handler])
