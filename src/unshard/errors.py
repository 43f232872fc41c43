"""Every error that unshard raises on purpose, as one tree.

    UnshardError                     exit code
    ├── UsageError                   2   the request itself makes no sense
    │   ├── NoSuchTensorError            no tensor of that name; a KeyError too
    │   └── NoSuchFileError              no file of that name; a KeyError too
    ├── CheckpointError              3   something is wrong with the checkpoint
    │   ├── UnknownFormatError           nothing here that unshard can read
    │   ├── IncompleteError              files or ranks are missing, empty or truncated
    │   │   └── DeltaError                   it has only what changed since another version
    │   ├── CorruptError                 a file contradicts its own format, or its neighbours
    │   │   └── ChangedError                 a file was replaced or written to while it was read
    │   ├── UnsafeError                  a pickle refers to code that runs commands
    │   ├── NotMergeableError            readable, but no full tensor follows from it
    │   └── NoConfigError                no config.json: transformers would not load the output
    ├── ConversionError              4   names or dtypes of the output cannot be resolved
    ├── OutputError                  5   the output exists, has no space or is not writable
    └── StoreError                   6   an object store does not answer, or refuses a request

An error names its subject (file, tensor, rank), what was expected, what was found, and what to do
next. A stage gathers all its problems and raises once (see `raise_all`).
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
# C0 and C1 but for line breaks and tabs, and what is invisible or turns the direction of text. The
# joiners U+200C and U+200D stay: words and emoji need them.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f"
    r"\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_SIZES = re.compile(r"\[[\d:, ]*\]")


def printable(text: str) -> str:
    r"""Return a text that any UTF-8 stream accepts, and that does not control a terminal.

    Control characters become `\x1b`, half a surrogate pair `\udcff`; line breaks and tabs stay.
    File names, names in pickles, answers of a server and logs of evaluators may contain anything.
    A `Text` stays one.
    """
    if isinstance(text, Text):
        return Text(printable(text.marked))
    text = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def told(text: str, *, advises: bool = False) -> str:
    """Return a message, `printable`, of which the options are data; `advises`: to add some."""
    known = text if advises and not isinstance(text, Text) else marked(text)
    return printable(Text(known) if "⟦" in known else known)


def _worded(name: str) -> property:
    """Return a part of a message, in the words of the error's front; sums of it keep its marks."""

    def get(error: "UnshardError") -> str:
        text: str = getattr(error, name)
        return Text(text.marked, error.front) if isinstance(text, Text) else text

    is_hint = name == "_hint"
    return property(get, lambda error, text: setattr(error, name, told(text, advises=is_hint)))


class UnshardError(Exception):
    """Base of all errors raised on purpose.

    Args:
        subject: what is wrong: a sentence that names file, tensor and rank where they are known.
        expected: what should have been there.
        found: what is there.
        hint: what to do next.

    All four name options as `unshard merge` has them, and mark them: `⟦--lora-alpha N⟧`. They and
    `str` are read in the words of `front`; see `unshard.fronts`.
    """

    exit_code: ClassVar[int] = 1
    subject, expected, found, hint = map(_worded, ("_subject", "_expected", "_found", "_hint"))

    def __init__(
        self, subject: str, *, expected: str = "", found: str = "", hint: str = ""
    ) -> None:
        self.front: Front = PYTHON
        self.subject, self.expected, self.found, self.hint = subject, expected, found, hint
        super().__init__(self.text)

    @property
    def text(self) -> str:
        """The whole message as it was written: with the options of `unshard merge`."""
        text: str = "" + self.subject
        text += "\n  expected: " + self.expected if self.expected else ""
        text += "\n  found:    " + self.found if self.found else ""
        text += "\n  hint:     " + self.hint if self.hint else ""
        return text

    def __str__(self) -> str:
        """Return the whole message in the words of its front: of Python, if no other took it."""
        shown, lines = render(self.text, self.front)
        return "\n  use:      ".join([shown, *lines])

    def __reduce__(self) -> tuple[object, ...]:
        """Travel between processes whole: `Exception` alone would lose the named parts."""
        state = {name: getattr(self, name) for name in ("expected", "found", "hint")}
        return (type(self), (self.subject,), state)


class UsageError(UnshardError):
    """The request makes no sense: an option, or a combination of options."""

    exit_code = 2


class NoSuchTensorError(UsageError, KeyError):
    """No tensor has that name."""


class NoSuchFileError(UsageError, KeyError):
    """A merge would write no file of that name."""


class CheckpointError(UnshardError):
    """Something is wrong with the checkpoint."""

    exit_code = 3


class UnknownFormatError(CheckpointError):
    """Nothing at the given place is a checkpoint that unshard reads."""


class IncompleteError(CheckpointError):
    """Files or ranks are missing, empty or truncated."""


class DeltaError(IncompleteError):
    """A version has only what changed since another one: RL trainers publish such deltas."""


class CorruptError(CheckpointError):
    """A file contradicts its own format, or other ranks."""


class ChangedError(CorruptError):
    """A file was replaced, written to or removed while it was being read."""


class UnsafeError(CheckpointError):
    """A pickle refers to code that runs commands or opens files."""


class NotMergeableError(CheckpointError):
    """The checkpoint is readable, but its full tensors do not follow from it."""


class NoConfigError(CheckpointError):
    """There is no config.json, without which transformers would not load the output."""


class ConversionError(UnshardError):
    """Names or dtypes of the output cannot be resolved."""

    exit_code = 4


class OutputError(UnshardError):
    """The output exists already, has no space or cannot be written."""

    exit_code = 5


class StoreError(UnshardError):
    """An object store cannot be reached, or does not allow what was asked of it."""

    exit_code = 6


def how_to_install(packages: str, extra: str) -> str:
    """Return the hint for packages that are missing, which an extra of unshard's would bring.

    Environments of `uv tool` and pipx have no pip, and unshard is not on a package index.
    """
    return f"pip install {packages}, or install unshard again with its extra: .[{extra}]"


class UnshardWarning(UserWarning):
    """A warning about a merge that was made, or about a checkpoint."""


def raise_all(kind: type[UnshardError], summary: str, problems: Sequence[UnshardError]) -> None:
    """Raise one error that lists all `problems`; return if there are none.

    A single problem is raised as it is. A fault of many tensors is listed once, with their names.
    Of very many faults, the first are shown and the rest counted.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    faults: dict[tuple[str, ...], list[UnshardError]] = {}
    for problem in problems:
        subject = problem.subject
        if (of_tensor := _OF_TENSOR.match(subject)) is not None:
            subject = _SIZES.sub("[]", subject[of_tensor.end() :])
        fault = type(problem).__name__, subject, problem.expected, problem.found, problem.hint
        faults.setdefault(fault, []).append(problem)
    text = f"{summary} ({len(problems)} problems):"
    for alike in islice(faults.values(), _SHOWN_PROBLEMS):
        text += "\n- " + _unite(alike)
    rest = len(faults) - _SHOWN_PROBLEMS
    raise kind(text + (f"\n- and {rest} more" if rest > 0 else ""))


def _unite(alike: Sequence[UnshardError]) -> str:
    """Return the first of some problems that are alike, and the names of the other tensors."""
    if len(alike) == 1:
        return alike[0].text
    found = (_OF_TENSOR.match(problem.subject) for problem in alike[1:])
    names = [match[1] for match in found if match is not None]
    listed = ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")
    of_tensors = f" tensor{'s' if len(names) > 1 else ''}: {listed}" if names else ""
    others = f"and {len(alike) - 1} more{of_tensors}"
    return alike[0].text + f"\n  {others}"


@contextmanager
def speaking(front: Front) -> Iterator[None]:
    """Let errors that leave the context speak the words of a front; the outermost decides."""
    try:
        yield
    except UnshardError as error:
        error.front = front
        raise
