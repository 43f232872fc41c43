"""Open the checkpoints of a merge, with the base model."""

import hashlib
import logging
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.api.options import MergeOptions, given_path
from unshard.containers.file_states import FileStates, noting
from unshard.convert.expected.ignored import lost_mtp
from unshard.convert.lora.names import split_adapter
from unshard.convert.recipes import Take, take
from unshard.errors import ChangedError, ConversionError, NoConfigError, UnshardError
from unshard.fronts import Text
from unshard.progress import Chosen, Listener, Stage
from unshard.read.beside.adapter_config import find_adapter, lora_names
from unshard.read.beside.companions import completed
from unshard.read.format import ReadOptions
from unshard.read.model_config import ConfigFile
from unshard.read.open import Checkpoint, open_latest, open_whole
from unshard.read.training_state.reader import TrainingState, read_training_state
from unshard.stores.remote_path import RemotePath, path_of
from unshard.tensors.catalog import Catalog, TensorEntry, weight_files
from unshard.write.stage import scratch_directory
from unshard.write.staging.targets import check_space

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The inputs of an output: one checkpoint, or several to average.

    Attributes:
        checkpoints: in the order of the sum; config and companions come from the last.
        weights: coefficient of each checkpoint.
        training: scheduler and random state, to be written next to the weights.
        opening: start of opening them, by `time.monotonic()`.
    """

    checkpoints: tuple[Checkpoint, ...]
    weights: tuple[float, ...] = (1.0,)
    training: TrainingState = field(default_factory=TrainingState)
    opening: float = field(default_factory=time.monotonic)

    @property
    def last(self) -> Checkpoint:
        """The only checkpoint, or the last of several."""
        return self.checkpoints[-1]

    @property
    def catalogs(self) -> list[Catalog]:
        """The tensors of all checkpoints, and of their optimizers' states."""
        return [catalog for source in self.checkpoints for catalog in source.catalogs]

    @property
    def states(self) -> FileStates:
        """The states of all checkpoints' files when they were first opened."""
        states = FileStates()
        for source in self.checkpoints:
            states.include(source.states)
        return states

    @property
    def notes(self) -> list[str]:
        """Messages for the user about how they were read."""
        return [note for source in self.checkpoints for note in source.catalog.notes]

    def unchanged(self) -> None:
        """Check that no file has changed since it was opened.

        Raises:
            CorruptError: a file is gone, was replaced, or was written to: the tensors may be a mix
                of two steps.
        """
        for source in self.checkpoints:
            source.states.check()

    def digest(self) -> str:
        """Return a digest of the states of all files with weights, including the base's.

        Raises:
            CorruptError: a file is gone.
        """
        digest = hashlib.blake2b(digest_size=16)
        for source in self.checkpoints:
            tables = [catalog.tensors for catalog in source.catalogs]
            tables += [] if source.base is None else [source.base.tensors]
            paths = set[Path]().union(*(weight_files(table.values()) for table in tables))
            for path in sorted(paths):
                state = source.states[path]
                facts = (state.inode, state.size, state.modified_ns, state.changed_ns)
                digest.update(repr((str(path), *facts)).encode(errors="surrogatepass"))
        return digest.hexdigest()

    def label(self, path: Path) -> str:
        """Return a label that identifies a version of a file on any machine.

        It has no absolute path or inode, because these differ between mounts.

        Raises:
            CorruptError: the file is gone.
        """
        last = len(self.checkpoints) - 1
        number = next((at for at in range(last) if path in self.checkpoints[at].states), last)
        state, home = self.checkpoints[number].states[path], self.checkpoints[number].location
        is_own = path.is_relative_to(home.step_dir)
        name = str(path.relative_to(home.step_dir)) if is_own else path.name
        tag = state.inode if isinstance(path, RemotePath) else ""  # a store's inode is the ETag
        return f"{number}/{name} {state.size} {state.modified_ns} {tag}"

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of all files that were read, or will be copied."""
        paths = {path for source in self.checkpoints for path in source.states.states}
        return tuple(sorted(map(self.label, paths)))

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Call `unchanged` at the end, also after an error, which a change may have caused."""
        try:
            yield
        except ChangedError:  # it may name a node, too
            raise
        except (UnshardError, OSError):
            try:
                self.unchanged()
            except ChangedError:
                raise
            except UnshardError:
                _log.debug("the sources cannot be checked")
            raise
        self.unchanged()

    @property
    def compressed_bytes(self) -> int:
        """Upper bound on the bytes that decompression writes; 0 if nothing is compressed."""
        return sum(map(_compressed_bytes, self.checkpoints))

    def decompressed(self, scratch: Path) -> "Sources":
        """Return the sources decompressed into files in the directory `scratch`.

        Tiles need random access, and a compressed item can only be read sequentially.
        """
        check_space(scratch, self.compressed_bytes)
        checkpoints = tuple(
            _inflated(source, scratch / f"items-{number}")
            for number, source in enumerate(self.checkpoints)
        )
        return replace(self, checkpoints=checkpoints)


def open_source(
    given: str | Path, options: MergeOptions, listener: Listener, *, pass_over: bool = True
) -> Sources:
    """Open the checkpoint at a path, with its training state.

    With `pass_over`, an incomplete step is skipped for an older one, with a warning. Otherwise it
    is an error, as in the tools that `unshard.compat` replaces.
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
    """Read the checkpoint at a path, and the base model."""
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
        checkpoint = _with_notes(checkpoint, note)
    companions = completed(checkpoint.companions, base.companions)
    if options.lora != "adapter" and not base.tensors:
        recipes = stored_recipes(checkpoint.catalog.tensors)
        lost = options.select(lost_mtp(companions.model, recipes, base.files))
        if lost or split_adapter(recipes).adapter_only:  # only these need the base's weights
            base = read_base(base.name, needs_weights=True)
    checkpoint.states.include(base.states)
    return _with_recorded_config(replace(checkpoint, companions=companions, base=base))


def stored_recipes(tensors: Mapping[str, TensorEntry]) -> dict[str, Take]:
    """Return recipes for whole tensors as they are stored, by name."""
    return {name: take(entry) for name, entry in tensors.items()}


def _with_notes(checkpoint: Checkpoint, *notes: str) -> Checkpoint:
    catalog = replace(checkpoint.catalog, notes=(*checkpoint.catalog.notes, *notes))
    return replace(checkpoint, catalog=catalog)


def is_adapter(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has a LoRA adapter without the weights that it updates."""
    tensors = checkpoint.catalog.tensors
    with suppress(ConversionError):
        return split_adapter(stored_recipes(tensors) if lora_names(tensors) else {}).adapter_only
    return True  # a part of an adapter: fusing it is an error


def adapter_beside(checkpoint: Checkpoint) -> Path | None:
    """Return the file of a LoRA adapter next to weights without LoRA tensors."""
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
    """Return a checkpoint with a config made from its training arguments, if it has no config."""
    companions, catalog = checkpoint.companions, checkpoint.catalog
    if companions.config_file is not None or not catalog.recorded:
        return checkpoint
    from unshard.read.megatron.config import config_of, doubts

    (path, *_) = catalog.training_state
    config = config_of(catalog.recorded, path)
    if config is None:
        return checkpoint
    companions = replace(companions, config_file=ConfigFile(path, config))
    note = f"no config.json: it was made from the arguments in {path.name} ({config.types[0]})"
    checkpoint = _with_notes(checkpoint, note, *doubts(catalog.recorded))
    return replace(checkpoint, companions=companions)


def _with_recorded_base(checkpoint: Checkpoint, options: MergeOptions) -> Checkpoint:
    """Return a checkpoint completed from the only base that its trainer's files name."""
    companions = checkpoint.companions
    has_config, is_alone = companions.config_file is not None, is_adapter(checkpoint)
    if not options.needs_config or (has_config and not is_alone):
        return checkpoint
    from unshard.read.base import local_base
    from unshard.read.beside.base_name import find_base_names

    bases = find_base_names(checkpoint.location)
    named = bases[0] if len(bases) == 1 else None
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
        return _with_notes(whole, note)
    return whole


def refuse_unloadable(sources: Sources, options: MergeOptions) -> None:
    """Raise a NoConfigError, before weights are read, if transformers would not load the output.

    `--config none` and `--names training` write such weights on purpose. Adapters and Megatron's
    checkpoints have errors of their own.
    """
    last = sources.last
    lacks_config = last.config is None and not last.catalog.recorded
    if options.needs_config and lacks_config and not is_adapter(last):
        raise no_config(last, NoConfigError, "; for the weights alone: ⟦--config none⟧")


def no_config(
    checkpoint: Checkpoint, kind: type[UnshardError], otherwise: str = ""
) -> UnshardError:
    """Return the error for a checkpoint without a config; `otherwise` is added to its hint."""
    from unshard.read.beside.base_name import advice, find_base_names

    at, named, give = checkpoint.location, "", "⟦+--config FILE⟧"
    if checkpoint.base is None:
        named, base = advice(find_base_names(at))
        # The head of a critic or a reward model differs from that of the base on the hub.
        give = give if at.role in ("critic", "value", "reward") else f"{base} or ⟦--config FILE⟧"
    weights = "" if at.weights_dir == at.step_dir else f"{at.weights_dir}, "
    run = "" if at.step is None else f", the run {at.step_dir.parent}"
    return kind(
        f"no config.json was found in or next to {at.weights_dir}: transformers needs one to load "
        "the weights",
        expected=f"config.json in {weights}{at.step_dir}, huggingface/ in them{run}",
        found=named,
        hint=f"give it with {give}{otherwise}",
    )


def with_optimizer(checkpoint: Checkpoint, options: MergeOptions) -> Checkpoint:
    """Return a checkpoint with the state of its optimizer."""
    from unshard.read.optimizer.reader import read_optimizer

    with noting(checkpoint.states):
        state = read_optimizer(checkpoint, options.reading)
    for path in state.catalog.weight_files:
        checkpoint.states.add(path)
    return replace(_with_notes(checkpoint, *state.notes), optimizer=state)


def _compressed_bytes(checkpoint: Checkpoint) -> int:
    if not any(catalog.is_compressed for catalog in checkpoint.catalogs):
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
    """Return a checkpoint decompressed into a file, and its optimizer's state into a second."""
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
    """Return the checkpoint decompressed; the stack removes the temporary files."""
    needed = _compressed_bytes(checkpoint)
    if not needed:
        return checkpoint
    scratch = scratch_directory(stack)
    check_space(scratch, needed)
    return _inflated(checkpoint, scratch / "items")
