"""Open what a merge starts from: checkpoints, each with the base model if one was named."""

import hashlib
import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.api.options import MergeOptions, given_path
from unshard.containers.file_states import FileStates, noting
from unshard.convert.expected.ignored import lost_mtp
from unshard.convert.lora.names import split_adapter
from unshard.convert.recipes import take
from unshard.errors import (
    ChangedError,
    ConversionError,
    NoConfigError,
    UnshardError,
)
from unshard.fronts import Text
from unshard.progress import Chosen, Listener, Stage
from unshard.read.beside.adapter_config import find_adapter, lora_names
from unshard.read.beside.companions import completed
from unshard.read.format import ReadOptions
from unshard.read.model_config import ConfigFile
from unshard.read.open import Checkpoint, open_latest, open_whole
from unshard.read.training_state.reader import TrainingState, read_training_state
from unshard.stores.remote_path import RemotePath, path_of
from unshard.tensors.catalog import Catalog, weight_files
from unshard.write.stage import scratch_directory
from unshard.write.staging.targets import check_space

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """What an output is made from: one checkpoint, or several, which are averaged.

    Attributes:
        checkpoints: in the order in which they are added. The last gives config and companions.
        weights: what each counts in an average.
        training: scheduler and random state, to be written next to the weights.
        opening: when opening them began, by `time.monotonic()`.
    """

    checkpoints: tuple[Checkpoint, ...]
    weights: tuple[float, ...] = (1.0,)
    training: TrainingState = field(default_factory=TrainingState)
    opening: float = field(default_factory=time.monotonic)

    @property
    def last(self) -> Checkpoint:
        """What is merged; of several, the last."""
        return self.checkpoints[-1]

    @property
    def catalogs(self) -> list[Catalog]:
        """The tensors of all checkpoints, and those of their optimizers' states."""
        return [catalog for one in self.checkpoints for catalog in one.catalogs]

    @property
    def states(self) -> FileStates:
        """The files of all checkpoints, as they were when they were opened first."""
        states = FileStates()
        for one in self.checkpoints:
            states.include(one.states)
        return states

    @property
    def notes(self) -> list[str]:
        """What a user should know about how they were read."""
        return [note for one in self.checkpoints for note in one.catalog.notes]

    def unchanged(self) -> None:
        """Check that every file that was read is still the one that it was.

        Raises:
            CorruptError: one is gone, was replaced, or was written to: what was read may be half of
                one step, and half of another.
        """
        for one in self.checkpoints:
            one.states.check()

    def digest(self) -> str:
        """Return another text for other files with weights, also of the base.

        Raises:
            CorruptError: a file is gone.
        """
        found = hashlib.blake2b(digest_size=16)
        for one in self.checkpoints:
            tables = [catalog.tensors for catalog in one.catalogs]
            tables += [] if one.base is None else [one.base.tensors]
            paths = set[Path]().union(*(weight_files(table.values()) for table in tables))
            for path in sorted(paths):
                state = one.states[path]
                facts = (state.inode, state.size, state.modified_ns, state.changed_ns)
                found.update(repr((str(path), *facts)).encode(errors="surrogatepass"))
        return found.hexdigest()

    def label(self, path: Path) -> str:
        """Return what tells a file from others, and from itself with other bytes, on any machine.

        Not its absolute path or inode, which are those of one mount.

        Raises:
            CorruptError: the file is gone.
        """
        found = (at for at, one in enumerate(self.checkpoints) if path in one.states)
        number = next(found, len(self.checkpoints) - 1)
        state, home = self.checkpoints[number].states[path], self.checkpoints[number].location
        is_own = path.is_relative_to(home.step_dir)
        name = str(path.relative_to(home.step_dir)) if is_own else path.name
        tag = state.inode if isinstance(path, RemotePath) else ""  # the ETag; on a disk an inode
        return f"{number}/{name} {state.size} {state.modified_ns} {tag}"

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of all files that were read, or are to be copied."""
        paths = {path for one in self.checkpoints for path in one.states.states}
        return tuple(sorted(map(self.label, paths)))

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Check in the end as `unchanged` does, also after an error: it may be the consequence."""
        try:
            yield
        except ChangedError:  # which may name a node, too
            raise
        except (UnshardError, OSError):
            try:
                self.unchanged()
            except ChangedError:
                raise
            except UnshardError:
                _log.debug("the sources cannot be looked at")
            raise
        self.unchanged()

    @property
    def compressed_bytes(self) -> int:
        """How many bytes decompressing takes, at most; 0 if nothing is compressed."""
        return sum(map(_compressed_bytes, self.checkpoints))

    def decompressed(self, scratch: Path) -> "Sources":
        """Return the same decompressed, each into a file in the directory `scratch`."""
        # A compressed item can be read only from its start to its end, tiles in any order.
        check_space(scratch, self.compressed_bytes)
        checkpoints = tuple(
            _inflated(one, scratch / f"items-{number}")
            for number, one in enumerate(self.checkpoints)
        )
        return replace(self, checkpoints=checkpoints)


def open_source(
    given: str | Path, options: MergeOptions, listener: Listener, *, pass_over: bool = True
) -> Sources:
    """Open the checkpoint that a given path means, with its training state.

    `pass_over` is whether an older step may be taken, with a warning, for one that is not complete,
    or that is an error, as it is for the tools that `unshard.compat` replaces.
    """
    opening = time.monotonic()
    path = given_path(given, "the checkpoint")
    listener(Stage("reading"))
    checkpoint = read_checkpoint(path, options, pass_over=pass_over)
    if options.optimizer:
        checkpoint = with_optimizer(checkpoint, options)
    listener(Chosen(f"merging {checkpoint.title}"))
    if not options.extra_state or options.lora == "adapter":
        return Sources((checkpoint,), opening=opening)
    with noting(checkpoint.states):
        state = read_training_state(checkpoint.location, checkpoint.catalog.world_size)
    return Sources((checkpoint,), training=state, opening=opening)


def read_checkpoint(path: Path, options: MergeOptions, *, pass_over: bool = True) -> Checkpoint:
    """Read the checkpoint that a path means, and the base model."""
    base = None
    if options.base is not None:
        from unshard.read.base import read_base

        base = read_base(str(options.base))
    reading = replace(options.reading, shapes={} if base is None else base.shapes)
    choice = options.choice._replace(pass_over=pass_over)
    checkpoint = open_latest(path, choice, reading, [path_of(one) for one in options.also])
    _log_choice(path, checkpoint)
    if options.lora in ("fuse", "adapter", "both"):
        checkpoint = _with_adapter(checkpoint)
    if base is None:
        # transformers would load a model under Megatron's names with random weights.
        if options.names == "training":
            return checkpoint
        return _with_recorded_base(_with_recorded_config(checkpoint), options)
    if base.companions.folder and (note := base.note_of(checkpoint.config)):
        catalog = replace(checkpoint.catalog, notes=(*checkpoint.catalog.notes, note))
        checkpoint = replace(checkpoint, catalog=catalog)
    companions = completed(checkpoint.companions, base.companions)
    if options.lora != "adapter" and not base.tensors:
        recipes = {name: take(entry) for name, entry in checkpoint.catalog.tensors.items()}
        lost = options.select(lost_mtp(companions.model, recipes, base.files))
        if lost or split_adapter(recipes).adapter_only:  # what its weights are needed for
            base = read_base(base.name, needs_weights=True)
    checkpoint.states.include(base.states)
    return _with_recorded_config(replace(checkpoint, companions=companions, base=base))


def is_adapter(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has a LoRA adapter, and not the weights that it updates."""
    tensors = checkpoint.catalog.tensors
    recipes = {name: take(entry) for name, entry in tensors.items()} if lora_names(tensors) else {}
    with suppress(ConversionError):
        return split_adapter(recipes).adapter_only
    return True  # or a part of one, which is an error when it is fused


def adapter_beside(checkpoint: Checkpoint) -> Path | None:
    """Return the file of a LoRA adapter next to weights that have none among them."""
    if lora_names(checkpoint.catalog.tensors):
        return None
    return find_adapter(checkpoint.location)


def _with_adapter(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the adapter next to its weights."""
    path = adapter_beside(checkpoint)
    if path is None:
        return checkpoint
    adapter = open_whole(path, ReadOptions())
    checkpoint.states.include(adapter.states)
    return replace(checkpoint, adapter=adapter)


def _with_recorded_config(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without a config.json with the one that its arguments determine."""
    companions, catalog = checkpoint.companions, checkpoint.catalog
    if companions.config_file is not None or not catalog.recorded:
        return checkpoint
    from unshard.read.megatron.config import config_of, doubts

    (path, *_) = catalog.training_state
    made = config_of(catalog.recorded, path)
    if made is None:
        return checkpoint
    companions = replace(companions, config_file=ConfigFile(path, made))
    what = f"no config.json: it is made of the arguments in {path.name} ({made.types[0]})"
    catalog = replace(catalog, notes=(*catalog.notes, what, *doubts(catalog.recorded)))
    return replace(checkpoint, companions=companions, catalog=catalog)


def _with_recorded_base(checkpoint: Checkpoint, options: MergeOptions) -> Checkpoint:
    """Return a checkpoint with what it needs of the one base that its trainer's files name."""
    companions = checkpoint.companions
    has_config, is_alone = companions.config_file is not None, is_adapter(checkpoint)
    if not options.needs_config or (has_config and not is_alone):
        return checkpoint
    from unshard.read.base import local_base
    from unshard.read.beside.base_name import find_base_names

    found = find_base_names(checkpoint.location)
    named = found[0] if len(found) == 1 else None
    if named is None or named.directory is None:
        return checkpoint
    base = local_base(named.name, named.directory)
    whole = replace(checkpoint, companions=completed(companions, base.companions), config_of=named)
    if is_alone:
        checkpoint.states.include(base.states)
        return replace(whole, base=base) if base.tensors else checkpoint
    whole.companions.note(checkpoint.states)
    is_part = not any(name.startswith(("tokenizer", "vocab")) for name in whole.companions.files)
    if is_part and named.directory.parent.name == "snapshots":
        name = shlex.quote(named.name)
        note = Text(f"{name} has no tokenizer on this machine; to download it: ⟦+--base {name}⟧")
        catalog = replace(whole.catalog, notes=(*whole.catalog.notes, note))
        whole = replace(whole, catalog=catalog)
    return whole


def refuse_unloadable(sources: Sources, options: MergeOptions) -> None:
    """Raise a NoConfigError, before weights are read, if transformers would not load the output.

    `--config none` and `--names training` write such weights on purpose.
    """
    last = sources.last
    is_open = last.config is None and not last.catalog.recorded
    if options.needs_config and is_open and not is_adapter(last):  # which have errors of their own
        raise no_config(last, NoConfigError, "; for the weights alone: ⟦--config none⟧")


def no_config(
    checkpoint: Checkpoint, kind: type[UnshardError], otherwise: str = ""
) -> UnshardError:
    """Return the error about a checkpoint without a config; `otherwise` is a hint to add."""
    from unshard.read.beside.base_name import advice, find_base_names

    at, found, give = checkpoint.location, "", "⟦+--config FILE⟧"
    if checkpoint.base is None:
        found, base = advice(find_base_names(at))
        # A base is the model of the hub, whose head is another than that of a critic or a reward.
        give = give if at.role in ("critic", "value", "reward") else f"{base} or ⟦--config FILE⟧"
    weights = "" if at.weights_dir == at.step_dir else f"{at.weights_dir}, "
    run = "" if at.step is None else f", the run {at.step_dir.parent}"
    return kind(
        f"no config.json was found in or next to {at.weights_dir}: transformers needs one to load "
        "the weights",
        expected=f"config.json in {weights}{at.step_dir}, huggingface/ in them{run}",
        found=found,
        hint=f"give it with {give}{otherwise}",
    )


def with_optimizer(checkpoint: Checkpoint, options: MergeOptions) -> Checkpoint:
    """Return a checkpoint with the state of its optimizer."""
    from unshard.read.optimizer.reader import read_optimizer

    with noting(checkpoint.states):
        state = read_optimizer(checkpoint, options.reading)
    for path in state.catalog.weight_files:
        checkpoint.states.add(path)
    catalog = replace(checkpoint.catalog, notes=(*checkpoint.catalog.notes, *state.notes))
    return replace(checkpoint, catalog=catalog, optimizer=state)


def _compressed_bytes(checkpoint: Checkpoint) -> int:
    if not any(one.is_compressed for one in checkpoint.catalogs):
        return 0
    from unshard.read.dcp.items import inflated_bytes

    return sum(map(inflated_bytes, checkpoint.catalogs))


def _log_choice(path: Path, checkpoint: Checkpoint) -> None:
    location, catalog, companions = checkpoint.location, checkpoint.catalog, checkpoint.companions
    _log.info(
        "%s: %s, written by %s, in %s: step %s, role %s, %s weights",
        *(path, catalog.format, catalog.writer, location.weights_dir),
        *(location.step, location.role, location.weights),
    )
    _log.info(
        "world size %s, %d tensors, %d values left out; config: %s",
        *(catalog.world_size, len(catalog.tensors), len(catalog.skipped)),
        companions.config or "none",
    )
    for file in companions.files.values():
        _log.debug("to copy: %s", file)
    for name, entry in catalog.tensors.items():
        dtype, chunks = entry.dtype.name, len(entry.chunks)
        _log.debug("read %s: %s %s, chunks: %d", name, dtype, entry.shape, chunks)


def _inflated(checkpoint: Checkpoint, scratch: Path) -> Checkpoint:
    """Return a checkpoint decompressed into a file, and its optimizer's state into another."""
    from unshard.read.dcp.items import inflate

    state = checkpoint.optimizer
    if state is not None:
        from unshard.read.optimizer.reader import steps_of

        catalog = inflate(state.catalog, scratch.with_name(f"{scratch.name}.optimizer"))
        state = replace(state, catalog=catalog)
        state = replace(state, steps=steps_of(state))
    catalog = inflate(checkpoint.catalog, scratch)
    checkpoint.states.check()
    return replace(checkpoint, catalog=catalog, optimizer=state)


def inflated(checkpoint: Checkpoint, stack: ExitStack) -> Checkpoint:
    """Return the checkpoint with nothing compressed; what that needs is removed by the stack."""
    needed = _compressed_bytes(checkpoint)
    if not needed:
        return checkpoint
    scratch = scratch_directory(stack)
    check_space(scratch, needed)
    return _inflated(checkpoint, scratch / "items")
