"""From a path to a checked catalog: the one entrance to this room."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.errors import (
    IncompleteError,
    NotMergeableError,
    UnknownFormatError,
    UsageError,
    raise_all,
)
from unshard.read.beside.base import Base
from unshard.read.beside.companions import Companions, find_companions
from unshard.read.beside.model_config import ModelConfig
from unshard.read.check import check
from unshard.read.discover import discover, regular_of, step_of
from unshard.read.ema import filled
from unshard.read.flat_parameters import refuse_flat_parameters
from unshard.read.format import (
    Location,
    PassedOver,
    Reading,
    ReadOptions,
    Request,
    blaming,
)
from unshard.read.whole_files.reader import WHOLE_FILES
from unshard.read.wrapper_names import unwrapped
from unshard.tensors.catalog import Catalog, TensorEntry

__all__ = ["Checkpoint", "open_latest", "open_whole", "passing_over"]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint that was read: where it is, what it holds, and what belongs to it.

    Attributes:
        location, catalog: where, and what.
        companions: config, tokenizer and the like; completed by those of the base model.
        base: the model that it was trained from, if one was named.
        passed_over: higher steps of the run, or other steps of an average, that are not complete.
    """

    location: Location
    catalog: Catalog
    companions: Companions
    base: Base | None = None
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def config(self) -> ModelConfig | None:
        """The model's config.json, read once, when it is first asked for; None without one.

        Raises:
            CorruptError: it is not a config.
        """
        return self.companions.model

    @property
    def title(self) -> str:
        """Which weights these are, and what was passed over for them, for people."""
        passed = (f"; passed over step {one.step}: {one.reason}" for one in self.passed_over)
        return self.location.title + "".join(passed)


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
    with blaming(path):
        return _open_latest(path, request, options, also)


def _open_latest(
    path: Path, request: Request, options: ReadOptions, also: Sequence[Path]
) -> Checkpoint:
    locations = discover(path, request)
    if locations[0].empty and not request.pass_over:
        raise _not_the_newest(locations[0].empty[0], locations, "it has no weights")
    passed: list[tuple[Location, IncompleteError]] = []
    for location in locations:
        try:
            whole = replace(location, also=tuple(_beside(location, other) for other in also))
            checkpoint = _read(whole, options)
        except IncompleteError as error:
            if not request.pass_over and location is not locations[-1]:
                older = locations[locations.index(location) + 1 :]
                raise _not_the_newest(location.step_dir, older, error.subject) from error
            passed.append((location, error))
        else:
            return passing_over(checkpoint, location.empty, passed)
    raise_all(IncompleteError, f"{path}: no step is complete", [error for _, error in passed])
    raise UnknownFormatError(f"{path}: no checkpoint")


def _not_the_newest(newest: Path, older: Sequence[Location], why: str) -> IncompleteError:
    return IncompleteError(
        f"the newest checkpoint, {newest}, is not complete: {why}",
        hint=f"to merge an older one, give its directory: {older[0].step_dir}",
    )


def passing_over(
    checkpoint: Checkpoint,
    empty: Sequence[Path],
    incomplete: Sequence[tuple[Location, IncompleteError]],
) -> Checkpoint:
    """Return a checkpoint that says which others were passed over.

    Args:
        checkpoint: the one that was taken.
        empty: directories of steps that have no weights.
        incomplete: the other steps, each with what it lacks.
    """
    passed = [PassedOver(step_of(path.name), "it has no weights") for path in empty]
    passed += [PassedOver(at.step, _reason(at, error)) for at, error in incomplete]
    notes = [f"passed over {path}: it has no weights" for path in empty]
    notes += [f"passed over an incomplete step: {error.text}" for _, error in incomplete]
    catalog = replace(checkpoint.catalog, notes=(*notes, *checkpoint.catalog.notes))
    return replace(checkpoint, catalog=catalog, passed_over=(*checkpoint.passed_over, *passed))


def _reason(location: Location, error: IncompleteError) -> str:
    """Return what a step lacks, in one line, without the path of the step."""
    return error.subject.splitlines()[0].replace(f"{location.step_dir}/", "")


def open_whole(path: Path, options: ReadOptions) -> Checkpoint:
    """Read whole weights, whatever else lies beside them: the shards, after a merge in place.

    Args:
        path: a directory that holds whole weights, or one file of them.
        options: how to read it.

    Raises:
        CheckpointError: there are none; or see the reader of whole files.
    """
    with blaming(path):
        start = path.parent.resolve() / path.name if path.is_file() else path.resolve()
        place = start.parent if start.is_file() else start
        if not start.exists() or not (start.is_file() or WHOLE_FILES.holds(start)):
            what = f"{path}: holds no whole weights"
            raise UnknownFormatError(what, expected="model.safetensors")
        file = start if start.is_file() else None
        location = Location(place, place, None, None, "model", WHOLE_FILES, file)
        return _read(location, options)


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


def _read(location: Location, options: ReadOptions) -> Checkpoint:
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
        training_state=reading.training_state,
        archives=reading.archives,
        missing=reading.missing,
        missing_ranks=reading.missing_ranks,
        notes=tuple(notes),
    )
    companions = find_companions(location, options.config)
    check(catalog)
    return Checkpoint(location, catalog, companions)


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
