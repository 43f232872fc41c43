"""From a path to a checked catalog: the one entrance to this room."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.errors import (
    CorruptError,
    IncompleteError,
    NotMergeableError,
    UnknownFormatError,
    UsageError,
    raise_all,
)
from unshard.read.check import check
from unshard.read.companions import find_companions
from unshard.read.discover import discover, regular_of
from unshard.read.ema import filled
from unshard.read.flat_parameters import refuse_flat_parameters
from unshard.read.format import Location, Reading, ReadOptions, Request
from unshard.read.whole_files import WHOLE_FILES
from unshard.read.wrapper_names import unwrapped
from unshard.tensors.catalog import Catalog, TensorEntry

__all__ = ["Checkpoint", "open_latest", "open_whole"]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A catalog and the place it was read from."""

    location: Location
    catalog: Catalog


def open_latest(
    path: Path, request: Request, options: ReadOptions, also: Sequence[Path] = ()
) -> Checkpoint:
    """Read the checkpoint that a path means: of several, the highest complete step.

    Args:
        path: at any level of the checkpoint's tree.
        request: what the user asked for.
        options: how to read it.
        also: directories of other nodes, which hold more files of the same checkpoint.

    Raises:
        CheckpointError: see `discover`, and the reader of the format.
    """
    with _blaming(path):
        return _open_latest(path, request, options, also)


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Say of a file that cannot be read that it is the checkpoint's."""
    try:
        yield
    except OSError as error:
        raise CorruptError(
            f"{error.filename or path}: cannot be read: {error.strerror or error}",
            hint="are its permissions right, and is its disk mounted?",
        ) from error


def _open_latest(
    path: Path, request: Request, options: ReadOptions, also: Sequence[Path]
) -> Checkpoint:
    locations = discover(path, request)
    passed_over: list[IncompleteError] = []
    for location in locations:
        try:
            whole = replace(location, also=tuple(_beside(location, other) for other in also))
            catalog = _read(whole, options, [error.text for error in passed_over])
        except IncompleteError as error:
            passed_over.append(error)
        else:
            return Checkpoint(whole, catalog)
    raise_all(IncompleteError, f"{path}: no step is complete", passed_over)
    raise UnknownFormatError(f"{path}: no checkpoint")


def open_whole(path: Path, options: ReadOptions) -> Checkpoint:
    """Read whole weights, whatever else lies beside them: the shards, after a merge in place.

    Args:
        path: a directory that holds whole weights, or one file of them.
        options: how to read it.

    Raises:
        CheckpointError: there are none; or see the reader of whole files.
    """
    with _blaming(path):
        start = path.parent.resolve() / path.name if path.is_file() else path.resolve()
        place = start.parent if start.is_file() else start
        if not start.exists() or not (start.is_file() or WHOLE_FILES.holds(start)):
            what = f"{path}: holds no whole weights"
            raise UnknownFormatError(what, expected="model.safetensors")
        file = start if start.is_file() else None
        location = Location(place, place, None, None, "model", WHOLE_FILES, file)
        return Checkpoint(location, _read(location, options, ()))


def _beside(location: Location, other: Path) -> Path:
    """Return where another node keeps its files of the same checkpoint."""
    found = discover(other, Request(None, location.role, location.weights))
    same = [at for at in found if at.step == location.step] or [
        at for at in found if len(found) == 1
    ]
    if not same:
        raise IncompleteError(
            f"{other}: holds no step {location.step}, which was found in {location.weights_dir}",
            found=f"steps {', '.join(str(at.step) for at in found)}",
        )
    if same[0].format is not location.format or same[0].step != location.step:
        raise UsageError(
            f"--also {shlex.quote(str(other))}: is not a part of {location.weights_dir}",
            expected=f"{location.format} of step {location.step}",
            found=f"{same[0].format} of step {same[0].step}",
        )
    return same[0].weights_dir


def _read(location: Location, options: ReadOptions, passed_over: Sequence[str]) -> Catalog:
    reading, tensors, notes = _weights(location, options)
    beside = regular_of(location) if location.weights == "ema" else None
    if beside is not None:
        regular, others, _ = _weights(beside, options)
        whole = filled(tensors, others)
        tensors, notes = dict(whole.tensors), [*notes, *whole.notes]
        if whole.notes:
            reading = replace(
                reading,
                archives=reading.archives + regular.archives,
                missing=reading.missing + regular.missing,
                missing_ranks=reading.missing_ranks + regular.missing_ranks,
            )
    catalog = Catalog(
        roots=location.roots,
        format=location.format.name,
        writer=reading.writer,
        step=location.step,
        world_size=reading.world_size,
        tensors=tensors,
        skipped=reading.skipped,
        companions=find_companions(location, options.config),
        training_state=reading.training_state,
        archives=reading.archives,
        missing=reading.missing,
        missing_ranks=reading.missing_ranks,
        notes=(
            *(f"passed over {path}: it holds no weights" for path in location.empty),
            *(f"passed over an incomplete step: {error}" for error in passed_over),
            *notes,
        ),
    )
    check(catalog)
    return catalog


def _weights(
    location: Location, options: ReadOptions
) -> tuple[Reading, dict[str, TensorEntry], list[str]]:
    """Read one set of weights; return it, its tensors without wrappers, and what to say."""
    reading = location.format.read(location, options)
    if not reading.tensors:
        raise NotMergeableError(
            f"{location.file or location.weights_dir}: holds no model weights",
            found=", ".join(one.fqn for one in reading.skipped[:8]) or "nothing at all",
            hint="if this is a part of a checkpoint (its optimizer), give the directory above it",
        )
    refuse_flat_parameters(location.weights_dir, reading.tensors)
    tensors, renamed = unwrapped(reading.tensors)
    return reading, tensors, [*reading.notes, *renamed]
