"""A checkpoint as engines load it: the tensors that a merge would write, and a config.

An engine starts from a directory with config.json and tokenizer. Its loader gets the rest as JSON:
the checkpoint, and the options of `open_checkpoint` except `names`, which is always "hub".
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from unshard.api.converting import convert
from unshard.api.options import MergeOptions, given_path
from unshard.api.sources import Sources, no_config, read_checkpoint
from unshard.api.unmerged.loading import Opened
from unshard.api.unmerged.opening import OpenCheckpoint, read_unmerged
from unshard.console import counted, listener_or_default
from unshard.engines.arrays import TensorReader
from unshard.engines.into_torch import RecycledMemory, as_tensor, need_torch
from unshard.errors import ConversionError, UsageError
from unshard.keywords import EngineKeywords
from unshard.progress import Warned
from unshard.read.beside.companions import Companions
from unshard.read.model_config import ModelConfig
from unshard.stores.remote_path import path_of
from unshard.write.companions import companion_files, write_files

if TYPE_CHECKING:
    from unshard.engines.into_torch import Tensor

_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("weights", "role"), (str,)),
    **dict.fromkeys(("base", "config"), (str, Path)),
    **dict.fromkeys(("step", "ep_size"), (int,)),
    **dict.fromkeys(("also", "allow_globals"), (list, tuple)),
    "assume_dim0": (bool,),
    "lora_alpha": (int, float),
}
OPTIONS = frozenset(_KINDS)
"""The options that a loader accepts as JSON."""
_SHOWN = 5

Shapes = Mapping[str, tuple[int, ...]]


def checked(options: Mapping[str, object]) -> EngineKeywords:
    """Return options from JSON, without those that are None.

    Raises:
        UsageError: an option is unknown, or its value has the wrong type.
    """
    given = {name: value for name, value in options.items() if value is not None}
    unknown = [name for name in options if name not in _KINDS]
    if unknown:
        expected = ", ".join(sorted(OPTIONS))
        raise UsageError(f"{unknown[0]}: not an option of the loader", expected=expected)
    for name, value in given.items():
        kinds = _KINDS[name]
        # A bool is an int in Python.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise UsageError(
                f"{name}: invalid value {value!r}",
                expected=" or ".join(kind.__name__ for kind in kinds),
            )
    return cast("EngineKeywords", given)


@dataclass(frozen=True, slots=True, eq=False)
class EngineWeights:
    """The weights of a checkpoint as an engine loads them, and the config that fits them.

    Attributes:
        tensors: by their names on the hub; read on access.
        config: the config.json that a merge would write, except for the dtype; None without one.
        step: the step of the checkpoint, if it has one.
        memory: the memory of the tensors, which is reused.
    """

    tensors: "OpenCheckpoint[Tensor]"
    config: ModelConfig | None
    step: int | None
    memory: RecycledMemory

    @property
    def path(self) -> str:
        """The directory of the weights."""
        return self.tensors.metadata()["path"]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by name."""
        return {name: self.tensors.get_slice(name).shape for name in self.tensors}

    def read(self, names: Iterable[str]) -> "Iterator[tuple[str, Tensor]]":
        """Yield tensors with their names, and read the next tensor meanwhile."""
        with ThreadPoolExecutor(1) as reader:
            reading: tuple[str, Future[Tensor]] | None = None
            for name in names:
                current, reading = reading, (name, reader.submit(self.tensors.get_tensor, name))
                if current is not None:
                    yield current[0], current[1].result()
                    del current
            if reading is not None:
                yield reading[0], reading[1].result()


@contextmanager
def weights_of(checkpoint: str | Path, options: EngineKeywords) -> Iterator[EngineWeights]:
    """Open a checkpoint for an engine, and check names and shapes as in a merge.

    Raises:
        CheckpointError: it cannot be read.
        ConversionError: names cannot be resolved, or tensors are missing or unexpected.
        UsageError: an option is not valid, or torch is not installed.
    """
    need_torch()
    chosen = MergeOptions(**options)
    with ExitStack() as stack:
        read = read_unmerged(checkpoint, chosen, stack)
        output = convert(Sources((read,)), chosen)
        with listener_or_default(None) as listener:
            for note in output.notes:
                listener(Warned(note))
        memory = RecycledMemory()
        reader = TensorReader(read.location.weights_dir, memory, read.states)
        stack.callback(reader.close)
        opened = Opened(read, chosen, {tensor.name: tensor for tensor in output.tensors}, reader)
        with OpenCheckpoint(opened, as_tensor, stack.pop_all()) as tensors:
            yield EngineWeights(tensors, output.config, read.location.step, memory)


def check_config(weights: EngineWeights, config: ModelConfig, *, hint: str) -> None:
    """Check that the engine's config fits the weights.

    Args:
        weights: of the checkpoint.
        config: the engine's config.
        hint: how to give the engine a config that fits.

    Raises:
        ConversionError: the engine would tie weights that differ, or has another vocabulary.
    """
    needed = weights.config
    if needed is None:
        return
    if config.is_tied and not needed.is_tied:
        problem = "the engine's config ties head and embedding, which differ in the checkpoint"
    elif _vocabulary(config) != _vocabulary(needed):
        problem = (
            f"the engine's config has a vocabulary of {_vocabulary(config)}, the checkpoint of "
            f"{_vocabulary(needed)}"
        )
    else:
        return
    raise ConversionError(f"{weights.path}: {problem}", hint=hint)


def _vocabulary(config: ModelConfig) -> object:
    return config.text.get("vocab_size", config.fields.get("vocab_size"))


def check_local(path: str) -> None:
    """Check that a model's path is a local directory, if no checkpoint is configured.

    Raises:
        UsageError: it is not.
    """
    if not Path(path).exists():
        raise UsageError(
            f"--load-format unshard: {path} is not a local directory, and no checkpoint is "
            "configured",
            hint="""add --model-loader-extra-config '{"checkpoint": "DIR"}'""",
        )


def check_shapes(weights: EngineWeights, before: Shapes) -> None:
    """Check that a running engine can load another checkpoint.

    Args:
        weights: of that checkpoint.
        before: names and shapes of the tensors with which the engine was started.

    Raises:
        ConversionError: names or shapes differ.
    """
    now = weights.shapes
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not differing:
        return
    shown = ", ".join(
        f"{name} {before.get(name, 'missing')} -> {now.get(name, 'missing')}"
        for name in differing[:_SHOWN]
    )
    raise ConversionError(
        f"{weights.path}: has {counted(len(differing), 'tensor')} the engine did not start with",
        found=shown,
        hint="start a new engine for this model",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """The facts with which an engine is started.

    Attributes:
        title: a description of the weights.
        step: the step of the checkpoint, if it has one.
        config: the config.json for the engine.
        companions: the checkpoint's own files.
    """

    title: str
    step: int | None
    config: ModelConfig
    companions: Companions

    @property
    def has_tokenizer(self) -> bool:
        """Whether the files have a tokenizer."""
        return any(name.startswith("tokenizer") for name in self.companions.files)

    @property
    def directory(self) -> Path | None:
        """The directory with exactly the files that the engine needs; None if there is none."""
        config, model = self.companions.config, self.companions.model
        if config is None or model is None or config.name != "config.json":
            return None
        together = all(path == config.parent / name for name, path in self.companions.files.items())
        return config.parent if together and model.fields == self.config.fields else None


def describe(checkpoint: str | Path, options: EngineKeywords) -> Described:
    """Read the facts with which an engine is started, without the weights.

    Raises:
        UnshardError: as `weights_of` raises it.
        UsageError: the checkpoint has no config.json.
    """
    chosen = MergeOptions(**options)
    read = read_checkpoint(given_path(checkpoint, "the checkpoint"), chosen)
    config = convert(Sources((read,)), chosen).config
    if config is None:
        raise no_config(read, UsageError)
    step = read.location.step
    return Described(read.title, step, config.as_written(None), read.companions)


@contextmanager
def model_directory(described: Described) -> Iterator[Path]:
    """Yield a directory with config, tokenizer and the like for an engine, without weights.

    It is the checkpoint's own directory if its files fit, otherwise a temporary directory.
    """
    if described.directory is not None:
        yield described.directory
        return
    with TemporaryDirectory(prefix="_unshard-") as folder:
        write_files(companion_files(described.companions, described.config), Path(folder))
        yield Path(folder)


def loader_config(
    checkpoint: str | Path, step: int | None, options: EngineKeywords
) -> dict[str, object]:
    """Return the configuration of the loader, as JSON: the checkpoint and the options.

    Args:
        checkpoint: as for `merge`.
        step: the step, because a run may have a newer step when the engine loads.
        options: as for `describe`.
    """
    path = given_path(checkpoint, "the checkpoint").absolute()
    fields: dict[str, object] = {"checkpoint": str(path)}
    fields |= {} if step is None else {"step": step}
    for name, value in options.items():
        if value is None or value is False or value in ((), []):
            continue  # a default
        if name == "also":
            fields[name] = [_absolute(directory) for directory in options["also"]]
        else:
            fields[name] = _absolute(value) if name in {"base", "config"} else value
    return fields


def _absolute(value: object) -> str:
    """Return a local path as an absolute path; the hub id of a model unchanged."""
    path = path_of(str(value))
    return str(path.absolute()) if path.exists() else str(value)
