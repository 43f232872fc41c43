"""`--verbose`: what the `unshard` loggers say, on stderr."""

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Annotated, ParamSpec

import typer

__all__ = ["logged"]

P = ParamSpec("P")
Verbose = Annotated[
    int,
    typer.Option(
        *("--verbose", "-v"),
        count=True,
        show_default=False,
        help="Print what is read and decided, with times; -vv prints more.",
    ),
]
_NAME = "verbose"
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever stderr is when a line comes: a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def logged(command: Callable[P, None]) -> Callable[P, None]:
    """Give a command the option `--verbose`, its last one."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        chosen = int(str(kwargs.pop(_NAME, 0)))
        if not chosen:
            command(*args, **kwargs)
            return
        logger, handler = logging.getLogger("unshard"), _Stderr()
        handler.setFormatter(logging.Formatter("%(relativeCreated)6.0f ms  %(name)s: %(message)s"))
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(_LEVELS[min(chosen, len(_LEVELS) - 1)])
        try:
            command(*args, **kwargs)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

    signature = inspect.signature(command)
    verbose = inspect.Parameter(
        _NAME, inspect.Parameter.KEYWORD_ONLY, default=0, annotation=Verbose
    )
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), verbose]
    )
    run.__annotations__ = {**command.__annotations__, _NAME: Verbose}
    return run
