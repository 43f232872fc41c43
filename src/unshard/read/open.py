"""From a path to a checked catalog: the only entry point of this room."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.console import counted
from unshard.containers.file_states import FileStates, noting
from unshard.errors import (
    CheckpointError,
    CorruptError,
    DeltaError,
    IncompleteError,
    NotMergeableError,
    UnknownFormatError,
    UnshardError,
    UsageError,
    raise_all,
)
from unshard.fronts import unadvised
from unshard.read.beside.adapter_config import adapter_files, lora_names
from unshard.read.beside.companions import Companions, find_companions
from unshard.read.finding.candidates import sibling_weights
from unshard.read.finding.discover import discover, find
from unshard.read.finding.markers import notes_of, writer_by_tree
from unshard.read.format import Choice, Location, PassedOver, ReadOptions, blaming, shortened
from unshard.read.hub_files import PIPELINE_INDEX
from unshard.read.model_config import ModelConfig
from unshard.read.step_names import step_of
from unshard.read.tree import Tree
from unshard.read.wrapper_names import refuse_flat_parameters, stored_names, unwrapped
from unshard.tensors.boxes import Gap, distinct, find_gap
from unshard.tensors.catalog import Catalog, TensorEntry

if TYPE_CHECKING:
    from unshard.read.base import Base
    from unshard.read.beside.base_name import BaseName
    from unshard.read.optimizer_state import OptimizerState


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint that was read: where it is, its contents, and its other files.

    Attributes:
        location, catalog: the place, and the tensors.
        companions: config, tokenizer and the like; completed by those of the base model.
        base: the model that it was trained from, if known.
        config_of: the base model in a file of the trainer, if its config is used.
        passed_over: higher steps of the run, or other steps of an average, that are not complete.
        own_config: the config.json of the checkpoint itself, if the user chose another one.
        optimizer: the state of its optimizer, if requested.
        adapter: the LoRA adapter in a file next to its weights, if requested.
        states: the states of its files when they were first opened.
    """

    location: Location
    catalog: Catalog
    companions: Companions
    base: "Base | None" = None
    config_of: "BaseName | None" = None
    passed_over: tuple[PassedOver, ...] = ()
    own_config: Path | None = None
    optimizer: "OptimizerState | None" = None
    adapter: "Checkpoint | None" = None
    states: FileStates = field(default_factory=FileStates)

    @property
    def catalogs(self) -> tuple[Catalog, ...]:
        """The tensors of the model, and those of the optimizer's state and of the adapter."""
        others = (part.catalog for part in (self.optimizer, self.adapter) if part is not None)
        return (self.catalog, *others)

    @property
    def config(self) -> ModelConfig | None:
        """The model's config.json; None without one."""
        return self.companions.model

    @property
    def config_source(self) -> str:
        """The source of the config, for people; empty if the user or the checkpoint has it."""
        if self.config_of is None:
            return ""
        part, model = "config of" if self.base is None else "base", self.config_of
        return f", with the {part} {model.name}, which {model.file.name} names"

    @property
    def title(self) -> str:
        """The weights, the source of the config, and steps that were passed over, for people."""
        passed = (f"; passed over step {step}: {reason}" for step, reason in self.passed_over)
        return self.location.title + self.config_source + "".join(passed)


def open_latest(
    path: Path, choice: Choice, options: ReadOptions, also: Sequence[Path] = ()
) -> Checkpoint:
    """Read the checkpoint of a path; of several steps, the highest complete one.

    `also` are directories of other nodes, with more files of the same checkpoint.

    Raises:
        CheckpointError: see `discover`, and the reader of the format.
    """
    passed: list[tuple[Location, IncompleteError]] = []
    with blaming(path):
        locations = find(path, choice)
        for location in locations:
            if location.empty and not choice.pass_over:
                raise _not_the_newest(location.empty[0], location, "it has no weights")
            try:
                parts = tuple(_part_in(other, location) for other in also)
                checkpoint = _read(replace(location, also=parts), options)
            except (CheckpointError, FileNotFoundError) as error:
                if not location.path.exists():
                    continue  # a trainer has just removed it
                reason = _why_incomplete(error)
                if reason is None:
                    raise
                is_passed = choice.pass_over or isinstance(reason, DeltaError)
                older = None if is_passed else next(locations, None)
                if older is not None:
                    raise _not_the_newest(location.step_dir, older, reason.subject) from error
                passed.append((location, reason))
            else:
                for delta in (error for _, error in passed if isinstance(error, DeltaError)):
                    if not delta.hint.startswith("make it"):  # the hint about an archive
                        delta.hint = f"to merge the newest whole step: ⟦+--step {location.step}⟧"
                    raise delta
                is_chosen = choice.step is not None or path.resolve() not in location.path.parents
                noted = _with_notes(checkpoint, notes_of(location, is_chosen=is_chosen))
                return passing_over(noted, location.empty, passed)
    raise_all(IncompleteError, f"{path}: no step is complete", [error for _, error in passed])
    raise IncompleteError(
        f"{path}: the checkpoint was removed while it was read", hint="merge another step"
    )


def _why_incomplete(error: CheckpointError | FileNotFoundError) -> IncompleteError | None:
    """Return the reason why a step is incomplete; None if something else is wrong with it."""
    if isinstance(error, IncompleteError):
        return error
    missing = error if isinstance(error, FileNotFoundError) else error.__cause__
    if isinstance(missing, FileNotFoundError):
        return IncompleteError(
            f"{missing.filename}: no longer exists", hint="was the checkpoint removed meanwhile?"
        )
    return None


def _not_the_newest(newest: Path, older: Location, why: str) -> IncompleteError:
    return IncompleteError(
        f"the newest checkpoint, {newest}, is not complete: {why}",
        hint=f"to merge an older step, pass its directory: {older.step_dir}",
    )


def passing_over(
    checkpoint: Checkpoint,
    empty: Sequence[Path],
    incomplete: Sequence[tuple[Location, IncompleteError]],
) -> Checkpoint:
    """Return a checkpoint with notes about steps that were passed over."""
    passed = [PassedOver(step_of(path.name), "it has no weights") for path in empty]
    for at, error in incomplete:
        # The title has the step already.
        subject = error.subject.splitlines()[0].replace(f"{at.step_dir}/", "")
        passed.append(PassedOver(at.step, subject))
    notes = [f"passed over {path}: it has no weights" for path in empty]
    texts = [unadvised(error.text) for _, error in incomplete]  # the step need not be merged
    notes += ["passed over an incomplete step: " + text for text in texts]
    noted = _with_notes(checkpoint, notes)
    return replace(noted, passed_over=(*checkpoint.passed_over, *passed))


def _with_notes(checkpoint: Checkpoint, notes: Sequence[str]) -> Checkpoint:
    catalog = replace(checkpoint.catalog, notes=(*notes, *checkpoint.catalog.notes))
    return replace(checkpoint, catalog=catalog)


def open_whole(path: Path, options: ReadOptions) -> Checkpoint:
    """Read the whole weights in a directory, or one file of them, also next to shards.

    Raises:
        CheckpointError: there are none; or see the reader of whole files.
    """
    from unshard.read.whole_files.reader import WHOLE_FILES

    with blaming(path):
        start = path.parent.resolve() / path.name if path.is_file() else path.resolve()
        if (start / PIPELINE_INDEX).is_file():
            from unshard.read.beside.pipelines import component_of, is_pipeline

            start = component_of(start) if is_pipeline(start / PIPELINE_INDEX) else start
        place = start.parent if start.is_file() else start
        if not start.exists() or not (start.is_file() or WHOLE_FILES.holds(Tree(), start)):
            problem = "has no whole weights" if start.exists() else "no such file or directory"
            raise UnknownFormatError(f"{path}: {problem}", expected="model.safetensors")
        file = start if start.is_file() else None
        location = Location(place, place, None, None, "model", WHOLE_FILES, file)
        return _read(location, options)


def _part_in(other: Path, location: Location) -> Path:
    """Return the folder in another node's directory that has files of the same checkpoint."""
    locations = discover(other, Choice(None, location.role, location.weights))
    same = [at for at in locations if at.step == location.step]
    same = same or (locations if len(locations) == 1 else [])
    if not same:
        raise IncompleteError(
            f"{other} has no step {location.step}, unlike {location.weights_dir}",
            found=f"steps {', '.join(str(at.step) for at in locations)}",
        )
    if (same[0].format, same[0].step) != (location.format, location.step):
        raise UsageError(
            f"⟦--also {shlex.quote(str(other))}⟧: is not a part of {location.weights_dir}",
            expected=f"{location.format} of step {location.step}",
            found=f"{same[0].format} of step {same[0].step}",
        )
    return same[0].weights_dir


def _read(location: Location, options: ReadOptions) -> Checkpoint:
    with noting(FileStates()) as states:
        # Before the weights: two readers use the config, which is read once.
        companions = find_companions(location, options.config)
        companions.note(states)
        options = replace(options, config_file=companions.config_file)
        catalog = _weights(location, options)
        if (
            location.weights == "ema"
            and (regular := sibling_weights(location, "model")) is not None
        ):
            catalog = _completed(catalog, _weights(regular, options))
        check_coverage(catalog)
        later = catalog.weight_files  # files of compressed items have not been opened yet
        if lora_names(catalog.tensors):
            later |= set(filter(None, adapter_files(location)))
        for path in later:
            states.add(path)
        own = None if options.config is None else find_companions(location, None).config
    return Checkpoint(location, catalog, companions, own_config=own, states=states)


def _weights(location: Location, options: ReadOptions) -> Catalog:
    """Read one set of weights, and remove wrappers from the names of its tensors."""
    catalog = location.format.read(location, options)
    if not catalog.tensors:
        raise NotMergeableError(
            f"{location.file or location.weights_dir}: has no model weights",
            found=", ".join(skipped.fqn for skipped in catalog.skipped[:8]) or "nothing",
            hint="if this is a part of a checkpoint (its optimizer), pass its parent directory",
        )
    refuse_flat_parameters(location.weights_dir, catalog.tensors)
    tensors, notes = unwrapped(catalog.tensors)
    # The tree shows the writer more exactly than the files, but for our own outputs.
    is_ours = catalog.writer.startswith("unshard ")
    by_tree = None if is_ours else writer_by_tree(location)
    return replace(
        catalog,
        roots=location.roots,
        format=location.format.name,
        step=location.step,
        writer=by_tree or catalog.writer,
        tensors=tensors,
        notes=(*catalog.notes, *notes),
        stored_names=stored_names(catalog.tensors),
    )


def _completed(ema: Catalog, regular: Catalog) -> Catalog:
    """Return the EMA tensors, completed by regular ones, in the order of the regular weights.

    A run may average only trained tensors, or those that a filter selects.
    """
    # Names that the regular weights lack may be other names of the same tensors.
    unknown = [name for name in ema.tensors if name not in regular.tensors]
    if unknown:
        raise NotMergeableError(
            f"the EMA set has {counted(len(unknown), 'tensor')} that the regular weights lack: "
            f"{unknown[0]} …",
            expected=f"names such as {next(iter(regular.tensors), 'none')}",
            hint="to merge the EMA set alone, copy its directory to another place",
        )
    tensors = {name: ema.tensors.get(name, entry) for name, entry in regular.tensors.items()}
    absent = [name for name in tensors if name not in ema.tensors]
    if not absent:
        return replace(ema, tensors=tensors)
    note = f"the EMA set lacks {counted(len(absent), 'tensor')}, taken from the regular weights"
    return replace(
        ema,
        tensors=tensors,
        archives=(*ema.archives, *regular.archives),
        missing=ema.missing + regular.missing,
        missing_ranks=ema.missing_ranks + regular.missing_ranks,
        notes=(*ema.notes, f"{note}: {shortened(absent, 8)}"),
    )


def check_coverage(catalog: Catalog) -> None:
    """Raise if a tensor is not covered exactly by its chunks, replicas aside."""
    gaps: dict[tuple[int, int, tuple[int, ...]], Gap | None] = {}
    problems = []
    for entry in catalog.tensors.values():
        offsets, sizes = entry.chunks.offsets, entry.chunks.sizes
        key = id(offsets), id(sizes), entry.shape  # tensors that are cut alike share these arrays
        if key not in gaps:
            rows = distinct(offsets, sizes)
            gaps[key] = find_gap(offsets[rows], sizes[rows], entry.shape)
        if (gap := gaps[key]) is not None:
            problems.append(_problem(entry, gap, incomplete=bool(catalog.missing)))
    if not problems:
        return
    if not catalog.missing:
        raise_all(CorruptError, "the chunks do not make whole tensors", problems)
    ranks = ", ".join(map(str, catalog.missing_ranks[:16]))
    names = "\n".join(f"  missing: {path}" for path in catalog.missing[:16])
    more = f" and {len(catalog.missing) - 16} more" if len(catalog.missing) > 16 else ""
    raise IncompleteError(
        f"{catalog.roots[0]}: Missing checkpoint for rank {ranks} of world size "
        f"{catalog.world_size}\n{names}{more}",
        expected=f"the files of all {catalog.world_size} ranks (replicas of others may be missing)",
        found=f"{counted(len(problems), 'tensor')} with holes, the first: {problems[0].subject}",
        hint="copy the files here from the nodes that wrote them, or take another checkpoint",
    )


def _problem(entry: TensorEntry, gap: Gap, *, incomplete: bool) -> UnshardError:
    kind, box = gap
    subject = f"tensor {entry.fqn} {list(entry.shape)}: region {box} is"
    if kind == "hole":
        error = IncompleteError if incomplete else CorruptError
        return error(f"{subject} missing from every rank")
    return CorruptError(f"{subject} stored twice, with different chunk boundaries")
