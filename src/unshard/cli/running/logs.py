"""`--verbose`: what the `unshard` loggers report, on stderr."""

import logging
import sys

import typer

__all__ = ["show_logs"]

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever stderr is when a line comes: a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show_logs(context: typer.Context, verbose: int) -> None:
    """Show the log of this command: of level info for `-v`, of level debug for `-vv`."""
    if not verbose:
        return
    logger, handler = logging.getLogger("unshard"), _Stderr()
    handler.setFormatter(logging.Formatter("%(relativeCreated)6.0f ms  %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[min(verbose, len(_LEVELS) - 1)])
    context.call_on_close(lambda: logger.setLevel(level))
    context.call_on_close(lambda: logger.removeHandler(handler))
