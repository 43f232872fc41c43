"""The log of long-running commands, on stderr."""

import json
import logging
from datetime import UTC, datetime

from unshard.errors import printable

LOG_MARK = "The log ends with:"
"""The line of an error message before a quoted evaluator's log."""

_LONGEST = 500


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters: texts come from servers, evaluators and trackers."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _JsonFormatter(logging.Formatter):
    """Writes a JSON object per line, in ASCII, so that no text can break a line.

    `about`, an `extra` of the record, has further fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "about", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def log_to_stderr(level: int, form: str, *, as_json: bool = False) -> None:
    """Log to stderr, unless the process has set up its logging already.

    `form` is the format of a line for `logging.Formatter`; `as_json` writes JSON objects instead.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if as_json else _PrintableFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])


def one_line(text: str) -> str:
    """Return a text as one line of at most 500 characters, without control characters.

    An evaluator's log that an error quotes is left out.
    """
    own = text.partition(f"\n{LOG_MARK}")[0]
    parts = [part for line in own.splitlines() if (part := " ".join(line.split()))]
    line = printable("; ".join(parts)[: _LONGEST + 1])
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
