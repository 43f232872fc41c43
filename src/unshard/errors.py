"""Every error that unshard raises on purpose, as one tree.

    UnshardError                     exit code
    ├── UsageError                   2   invalid options or arguments
    │   ├── NoSuchTensorError            no tensor of that name; a KeyError too
    │   └── NoSuchFileError              no file of that name; a KeyError too
    ├── CheckpointError              3   something is wrong with the checkpoint
    │   ├── UnknownFormatError           not a format that unshard can read
    │   ├── IncompleteError              files or ranks are missing, empty or truncated
    │   │   └── DeltaError                   a delta to another version, not a whole model
    │   ├── CorruptError                 a file contradicts its own format, or other files
    │   │   └── ChangedError                 a file was replaced or written to while it was read
    │   ├── UnsafeError                  a pickle refers to code that runs commands
    │   ├── NotMergeableError            readable, but the full tensors cannot be derived
    │   └── NoConfigError                no config.json: transformers would not load the output
    ├── ConversionError              4   names or dtypes of the output cannot be resolved
    ├── OutputError                  5   the output exists, has no space or is not writable
    └── StoreError                   6   an object store does not answer, or refuses a request

An error has a subject (file, tensor, rank), the expected and the actual value, and a hint. A stage
gathers all its problems and raises once (see `raise_all`).
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import ClassVar

from unshard.fronts import PYTHON, Front, Text, marked, render

_SHOWN_PROBLEMS = 20
_SHOWN_NAMES = 3
_OF_TENSOR = re.compile(r"tensor (.+?)(?= \[[\d, ]*\]|: )")
# C0 and C1 except line breaks and tabs, invisible characters, and those that change the direction
# of text. The joiners U+200C and U+200D stay: words and emoji need them.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f"
    r"\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_SIZES = re.compile(r"\[[\d:, ]*\]")


def printable(text: str) -> str:
    r"""Escape characters that a UTF-8 stream refuses or that control a terminal.

    Control characters become `\x1b`, half a surrogate pair `\udcff`; line breaks and tabs stay.
    File names, names in pickles, a server's answers and evaluators' logs may contain anything.
    A `Text` stays a `Text`.
    """
    if isinstance(text, Text):
        return Text(printable(text.marked))
    text = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def as_message(text: str, *, advises: bool = False) -> str:
    """Return a `printable` message, a `Text` if it marks options.

    Args:
        text: the message.
        advises: whether a plain `str` may advise to add options.
    """
    message = text if advises and not isinstance(text, Text) else marked(text)
    return printable(Text(message) if "⟦" in message else message)


def _in_front(name: str) -> property:
    """Return a property: a part of a message as the error's front writes it.

    It is a `Text`, so that a sum of it keeps the marks of its options.
    """

    def get(error: "UnshardError") -> str:
        text: str = getattr(error, name)
        return Text(text.marked, error.front) if isinstance(text, Text) else text

    def put(error: "UnshardError", text: str) -> None:
        setattr(error, name, as_message(text, advises=name == "_hint"))

    return property(get, put)


class UnshardError(Exception):
    """Base of all errors raised on purpose.

    Args:
        subject: the problem, with file, tensor and rank where they are known.
        expected: the value that was expected.
        found: the value that was found instead.
        hint: the next step for the user.

    All four mark the options of `unshard merge` that they mention: `⟦--lora-alpha N⟧`. They and
    `str` write these options as `front` does; see `unshard.fronts`.
    """

    exit_code: ClassVar[int] = 1
    subject, expected, found, hint = map(_in_front, ("_subject", "_expected", "_found", "_hint"))

    def __init__(
        self, subject: str, *, expected: str = "", found: str = "", hint: str = ""
    ) -> None:
        self.front: Front = PYTHON
        self.subject, self.expected, self.found, self.hint = subject, expected, found, hint
        super().__init__(self.text)

    @property
    def text(self) -> str:
        """The whole message, with the options of `unshard merge`."""
        text: str = "" + self.subject
        text += "\n  expected: " + self.expected if self.expected else ""
        text += "\n  found:    " + self.found if self.found else ""
        text += "\n  hint:     " + self.hint if self.hint else ""
        return text

    def __str__(self) -> str:
        """Return the whole message as its front writes it, and the lines to use."""
        shown, lines = render(self.text, self.front)
        return "\n  use:      ".join([shown, *lines])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all parts: `Exception` alone would lose those given by keyword."""
        state = {name: getattr(self, name) for name in ("expected", "found", "hint")}
        return (type(self), (self.subject,), state)


class UsageError(UnshardError):
    """An option, an argument, or a combination of them is invalid."""

    exit_code = 2


class NoSuchTensorError(UsageError, KeyError):
    """No tensor has that name."""


class NoSuchFileError(UsageError, KeyError):
    """A merge would write no file of that name."""


class CheckpointError(UnshardError):
    """Something is wrong with the checkpoint."""

    exit_code = 3


class UnknownFormatError(CheckpointError):
    """The path contains no checkpoint that unshard reads."""


class IncompleteError(CheckpointError):
    """Files or ranks are missing, empty or truncated."""


class DeltaError(IncompleteError):
    """A delta to another version, not a whole model; RL trainers publish such deltas."""


class CorruptError(CheckpointError):
    """A file contradicts its own format, or other ranks."""


class ChangedError(CorruptError):
    """A file was replaced, written to or removed while it was being read."""


class UnsafeError(CheckpointError):
    """A pickle refers to code that runs commands or opens files."""


class NotMergeableError(CheckpointError):
    """The checkpoint is readable, but its full tensors cannot be derived from it."""


class NoConfigError(CheckpointError):
    """There is no config.json, without which transformers would not load the output."""


class ConversionError(UnshardError):
    """Names or dtypes of the output cannot be resolved."""

    exit_code = 4


class OutputError(UnshardError):
    """The output exists already, has no space or cannot be written."""

    exit_code = 5


class StoreError(UnshardError):
    """An object store cannot be reached, or refuses a request."""

    exit_code = 6


def how_to_install(packages: str, extra: str) -> str:
    """Return the hint for missing packages that one of unshard's extras installs.

    Environments of `uv tool` and pipx have no pip, and unshard is not on a package index.
    """
    return f"pip install {packages}, or install unshard again with its extra: .[{extra}]"


class UnshardWarning(UserWarning):
    """A warning about a merge or a checkpoint."""


def raise_all(kind: type[UnshardError], summary: str, problems: Sequence[UnshardError]) -> None:
    """Raise one error that lists all `problems`; return if there are none.

    A single problem is raised as it is. Problems that differ only in the tensor become one item
    with the tensors' names. The first 20 items are listed, the rest counted.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    groups: dict[tuple[str, ...], list[UnshardError]] = {}
    for problem in problems:
        subject = problem.subject
        if (of_tensor := _OF_TENSOR.match(subject)) is not None:
            subject = _SIZES.sub("[]", subject[of_tensor.end() :])
        key = type(problem).__name__, subject, problem.expected, problem.found, problem.hint
        groups.setdefault(key, []).append(problem)
    text = f"{summary} ({len(problems)} problems):"
    for group in islice(groups.values(), _SHOWN_PROBLEMS):
        text += "\n- " + _unite(group)
    rest = len(groups) - _SHOWN_PROBLEMS
    raise kind(text + (f"\n- and {rest} more" if rest > 0 else ""))


def _unite(group: Sequence[UnshardError]) -> str:
    """Return the text of the first of equal problems, and the names of the other tensors."""
    if len(group) == 1:
        return group[0].text
    matches = (_OF_TENSOR.match(problem.subject) for problem in group[1:])
    names = [match[1] for match in matches if match is not None]
    listed = ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")
    of_tensors = f" tensor{'s' if len(names) > 1 else ''}: {listed}" if names else ""
    return group[0].text + f"\n  and {len(group) - 1} more{of_tensors}"


@contextmanager
def front_of_errors(front: Front) -> Iterator[None]:
    """Set the front of errors that leave the context; the outermost context decides."""
    try:
        yield
    except UnshardError as error:
        error.front = front
        raise
