"""The three ways an output takes its place; each leaves the old state or the new one, never a mix.

* *new*: the target does not exist: one rename.
* *replace*: the target is an earlier output: it is exchanged with the new one in one atomic step,
  or, where the system cannot, moved aside first; a journal lets the next run finish that.
* *in place*: the target holds the checkpoint itself: files are moved into it one by one. The
  journal is written first, when everything is durable, so that the next run finishes what was
  begun.

A journal stands in the staging directory and is complete or absent. Every step of it may be done
twice. Trainers rotate checkpoints by modification time, so a merge in place gives it back.
"""

import errno
import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath

from unshard.errors import CorruptError, OutputError
from unshard.plan.layout import INDEX_NAME
from unshard.write.files import (
    carry_over,
    exchange,
    is_weight_file,
    set_mtime,
    sync,
    sync_tree,
)
from unshard.write.record import RECORD_NAME
from unshard.write.training_state import EXTRA_STATE_NAME, SCHEDULER_NAME

__all__ = ["Journal", "Mode", "commit", "finish"]

_JOURNAL = "journal.json"
_OUTPUT = "output"
_ASIDE = "aside"


class Mode(Enum):
    """How an output takes its place."""

    NEW = "new"
    REPLACE = "replace"
    IN_PLACE = "in place"


@dataclass(frozen=True, slots=True)
class Journal:
    """What remains to be done once everything is durable.

    Attributes:
        mode: REPLACE (by moving aside) or IN_PLACE.
        target: the target, relative to the directory that holds the staging directory.
        place: files to move into the target, in this order (IN_PLACE).
        remove: old weight files to remove from it (IN_PLACE).
        mtime_ns: modification time to give back to the target (IN_PLACE).
    """

    mode: Mode
    target: str
    place: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    mtime_ns: int = 0


def commit(staging: Path, target: Path, mode: Mode, replaced: Collection[str] = ()) -> None:
    """Make `staging/output` durable and let it take the target's place.

    Args:
        staging: the directory that holds `output`.
        target: what to replace, or to put files into.
        mode: how.
        replaced: in place: names of companions that go over those that are there.

    Raises:
        OutputError: a new target has come to exist meanwhile.
        OSError: the file system refuses; the target is as it was, or the journal is there.
    """
    output = staging / _OUTPUT
    if mode is Mode.REPLACE:
        stale = _stale_state(target, output)
        carry_over(target, output, leave=stale)
        output.chmod(target.stat().st_mode & 0o7777)
    sync_tree(output)
    match mode:
        case Mode.NEW:
            _rename_new(output, target)
            sync(target.parent)
        case Mode.REPLACE:
            if exchange(output, target):
                # what others put there since the first time
                carry_over(output, target, leave=stale)
                sync(target.parent)
            else:
                _run(staging, Journal(mode, target.name))
        case Mode.IN_PLACE:
            _run(staging, _journal_in_place(output, target, replaced))


def finish(staging: Path) -> None:
    """Do what the journal of an interrupted commit says, if there is one.

    Raises:
        CorruptError: the journal is not one that unshard writes.
    """
    path = staging / _JOURNAL
    if not path.exists():
        return
    try:
        fields = json.loads(path.read_bytes())
        journal = Journal(
            Mode(fields["mode"]),
            str(fields["target"]),
            tuple(map(str, fields["place"])),
            tuple(map(str, fields["remove"])),
            int(fields["mtime_ns"]),
        )
        _check_names(journal)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path}: not a journal of unshard: {error}") from error
    _apply(staging, journal)


def _check_names(journal: Journal) -> None:
    """Refuse names that lead out of the two directories a commit is about."""
    for name in (journal.target, *journal.place, *journal.remove):
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"the name {name!r}")


def _rename_new(output: Path, target: Path) -> None:
    try:
        output.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OutputError(f"{target}: appeared while it was being made") from error
        raise


def _stale_state(target: Path, output: Path) -> list[str]:
    """Return the training state that an earlier merge put there, and that this one has not."""
    try:
        recorded = json.loads((target / RECORD_NAME).read_bytes())["output"]["training_state"]
        known = [name for name in (EXTRA_STATE_NAME, SCHEDULER_NAME) if name in recorded]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [name for name in known if not (output / name).exists()]


def _journal_in_place(output: Path, target: Path, replaced: Collection[str]) -> Journal:
    """Weights first, then what belongs to them or is lacking, then what says that all is there."""
    names = [str(p.relative_to(output)) for p in sorted(output.rglob("*")) if p.is_file()]
    weights = [name for name in names if is_weight_file(name) and name != INDEX_NAME]
    last = [name for name in (INDEX_NAME, RECORD_NAME) if name in names]
    over = {EXTRA_STATE_NAME, SCHEDULER_NAME, *replaced}
    state = [name for name in names if name in over and name not in weights]
    known = {*weights, *state, *last}
    lacking = [name for name in names if name not in known and not (target / name).exists()]
    old = [p.name for p in sorted(target.iterdir()) if is_weight_file(p.name)]
    remove = [name for name in old if name not in names] + _stale_state(target, output)
    place = (*weights, *state, *lacking, *last)
    return Journal(Mode.IN_PLACE, target.name, place, tuple(remove), target.stat().st_mtime_ns)


def _run(staging: Path, journal: Journal) -> None:
    """Write the journal, durably, then do what it says."""
    fields = {
        "mode": journal.mode.value,
        "target": journal.target,
        "place": journal.place,
        "remove": journal.remove,
        "mtime_ns": journal.mtime_ns,
    }
    draft = staging / f"{_JOURNAL}.new"
    draft.write_text(json.dumps(fields), encoding="utf-8")
    sync(draft)
    draft.rename(staging / _JOURNAL)
    sync(staging)
    _apply(staging, journal)


def _apply(staging: Path, journal: Journal) -> None:
    output, target = staging / _OUTPUT, staging.parent / journal.target
    if journal.mode is Mode.REPLACE:
        if output.exists():
            if target.exists():
                target.rename(staging / _ASIDE)
            output.rename(target)
    else:
        for name in journal.place:
            if (output / name).exists():
                (target / name).parent.mkdir(exist_ok=True)
                (output / name).replace(target / name)
        for name in journal.remove:
            (target / name).unlink(missing_ok=True)
        set_mtime(target, journal.mtime_ns)
        sync(target)
    sync(staging.parent)
