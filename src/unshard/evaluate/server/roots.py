"""Checks that a checkpoint, and every file of it, is below the server's roots."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.pins.files import list_checkpoint
from unshard.evaluate.run_folder import RunFolder
from unshard.read.beside.companions import companions_in
from unshard.read.step_names import named_average, step_of
from unshard.stores.remote_path import RemotePath, is_url, path_of

_LONGEST_PATH = 4096
_INNER = 2  # how deep a checkpoint may be below its step: global_step_10/actor

_EXPECTED = "an absolute path of printable characters, or s3://bucket/folder without `..` and `%`"


def resolve_checkpoint(path: str, roots: Sequence[Path]) -> Path:
    """Return a checkpoint's path without symbolic links, if it is below one of the roots.

    The checkpoint need not exist: see `check_there`. A user who may write below a root can replace
    the checkpoint by a link after this check, and no check can prevent that: roots are for
    directories whose writers may read everything that the server can read.

    An address in an object store must be below a root in that store; no request is sent.

    Raises:
        UsageError: the path is not absolute, or is not below a root.
    """
    is_address = is_url(path)
    if not (path.startswith("/") or is_address) or _is_odd(path):
        raise not_accepted("checkpoint", path, expected=_EXPECTED)
    try:
        resolved = path_of(path).resolve()
        if not is_address:
            resolved.exists()  # raises where no file can have this name
        resolved_roots = [root.resolve() for root in roots]
    except PermissionError as error:
        raise not_readable(error) from error
    except (OSError, RuntimeError) as error:
        raise not_accepted("checkpoint", path, expected="a path that can be followed") from error
    if any(map(resolved.is_relative_to, resolved_roots)):
        if named_average(resolved) is not None:  # no pin keeps the steps of an average
            hint = "write the average with unshard average"
            expected = "a checkpoint on a disk"
            raise not_accepted("checkpoint", path, expected=expected, hint=hint)
        return resolved
    raise UsageError(
        "checkpoint: not under a directory that this server may read",
        expected="a directory below one of: "
        + (", ".join(map(str, roots)) or "none is configured"),
        found=path,
        hint="add its directory to the server's `roots`",
    )


def _is_odd(path: str) -> bool:
    """Return whether a path is too long, or an address has parts that could leave a root."""
    is_trick = is_url(path) and (".." in path.split("/") or "%" in path or "\\" in path)
    return is_trick or len(path) > _LONGEST_PATH or not path.isprintable()


def check_merged(checkpoint: Path, *, is_direct: bool) -> None:
    """Raise if a checkpoint in an object store is to be read by an evaluator itself."""
    if isinstance(checkpoint, RemotePath) and is_direct:
        raise UsageError(
            "checkpoint: the profile (weights: direct) cannot read object stores: evaluators get "
            "no credentials of stores",
            expected="a checkpoint on a disk, or a profile with `weights: merged`",
            found=str(checkpoint),
        )


def check_links(checkpoint: Path, run: Path, roots: Sequence[Path]) -> None:
    """Raise unless every file that would be pinned or merged is below a root, links followed.

    Object stores have no links. Files that no longer exist are ignored. A link that is made after
    this check is not found: see `resolve_checkpoint`.

    Args:
        checkpoint: a directory or a file.
        run: the directory above it that may contain its config and tokenizer.
        roots: the directories that may be read.

    Raises:
        UsageError: names the first file that is elsewhere.
    """
    if isinstance(checkpoint, RemotePath):
        return
    resolved_roots = [root.resolve() for root in roots]
    try:
        for file in _files(checkpoint, run):
            target = file.resolve()
            if not any(map(target.is_relative_to, resolved_roots)):
                raise UsageError(
                    f"{file}: leads out of the directories that this server may read",
                    found=str(target),
                    hint="put the file itself there, or add its directory to the server's `roots`",
                )
    except FileNotFoundError:
        return
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{checkpoint}: cannot be followed", found=str(error)) from error


def _files(checkpoint: Path, run: Path) -> Iterator[Path]:
    above = [parent for parent in checkpoint.parents if parent.is_relative_to(run)]
    for folder in (*above, *(parent / "huggingface" for parent in above)):
        own = companions_in(folder)
        yield from own.files.values()
        if own.config is not None:
            yield own.config
    is_folder = checkpoint.is_dir()
    for name in list_checkpoint(checkpoint).files:
        yield checkpoint / name if is_folder else checkpoint


def check_there(checkpoint: Path, *, is_step: bool) -> None:
    """Raise if neither a checkpoint nor its run exists: a trainer may have removed a step since.

    `is_step`: the client sent a step; otherwise it may be in the name of the directory.

    Raises:
        UsageError: neither exists, or the server may not read it.
    """
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            checkpoint.stat()
            return
        paths = (checkpoint, *checkpoint.parents[:_INNER])
        steps = [path for path in paths if step_of(path.name) is not None]
        if is_step and not steps:
            steps = [checkpoint]
        if any(step.parent.is_dir() for step in steps):
            return
    except PermissionError as error:
        raise not_readable(error) from error
    raise UsageError(
        "the checkpoint does not exist, and neither does the directory of its run",
        expected="a checkpoint, or the directory of a run, as the server sees the path",
        found=str(checkpoint),
        hint="check the path; if the server has the disk under another path, use that path",
    )


def is_inside(run: Path, roots: Sequence[Path]) -> bool:
    """Return whether a run on a disk, and our files in it, links followed, are below a root."""
    places = [root.resolve() for root in roots if not isinstance(root, RemotePath)]
    paths = (run.resolve(), RunFolder(run).pins.resolve())
    return all(any(path.is_relative_to(place) for place in places) for path in paths)


def not_readable(error: PermissionError) -> UsageError:
    """Return the error for a checkpoint, or its run, that the server may not read."""
    return UsageError(
        "the server is not allowed to read the checkpoint",
        found=f"{error.filename}: {error.strerror}",
        hint=f"give the server's user (uid {os.geteuid()}) the right to read and enter the "
        "directories of the run, or start the server as their owner",
    )


def not_accepted(field: str, found: object, *, expected: str, hint: str = "") -> UsageError:
    """Return the error for a field of a request that the server does not accept."""
    return UsageError(
        f"{field} cannot be accepted", expected=expected, found=f"{found!r:.200}", hint=hint
    )
