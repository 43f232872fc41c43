"""What every engine needs of a checkpoint: the tensors that a merge would write, and a config.

An engine starts from a directory with config.json and tokenizer. Its loader gets the rest as JSON:
the checkpoint, and the options of `open_checkpoint` except `names`, which are those of the hub.
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
from unshard.engines.arrays import TensorReader
from unshard.engines.into_torch import RecycledMemory, as_tensor, need_torch
from unshard.errors import ConversionError, UsageError
from unshard.keywords import EngineKeywords
from unshard.progress import Warned
from unshard.read.beside.companions import Companions
from unshard.read.model_config import ModelConfig
from unshard.showing import counted, hearing
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
"""The options that a loader takes from JSON."""
_SHOWN = 5

Shapes = Mapping[str, tuple[int, ...]]


def checked(given: Mapping[str, object]) -> EngineKeywords:
    """Return options that came as JSON; None leaves an option out.

    Raises:
        UsageError: an option is not known, or its value is of another type.
    """
    for name, value in given.items():
        if name not in _KINDS:
            expected = ", ".join(sorted(OPTIONS))
            raise UsageError(f"{name}: not an option of the loader", expected=expected)
        kinds = _KINDS[name]
        # True is an int to Python.
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if value is not None and not fits:
            what = f"{name}: {value!r} is not a value of this option"
            raise UsageError(what, expected=" or ".join(kind.__name__ for kind in kinds))
    return cast(
        "EngineKeywords", {name: value for name, value in given.items() if value is not None}
    )


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The weights of a checkpoint as an engine loads them, and the config that fits them.

    Attributes:
        tensors: by their names on the hub; each is read when it is looked up.
        config: what a merge would write as config.json, but for the dtype; None without one.
        step: the step that was found, if it has one.
        memory: in which tensors are made; others of similar sizes may be made there as well.
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
        """Yield tensors with their names; while one is used, the next is read."""
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
def weights_of(checkpoint: str | Path, options: EngineKeywords) -> Iterator[Weights]:
    """Open a checkpoint for an engine, its names and shapes checked as in a merge.

    Raises:
        CheckpointError: it cannot be read.
        ConversionError: names cannot be resolved, or tensors are missing or unexpected.
        UsageError: an option is not valid, or torch is not installed.
    """
    need_torch()
    chosen = MergeOptions(**options)
    with ExitStack() as stack:
        read = read_unmerged(checkpoint, chosen, stack)
        made = convert(Sources((read,)), chosen)
        with hearing(None) as heard:
            for note in made.notes:
                heard(Warned(note))
        memory = RecycledMemory()
        reader = TensorReader(read.location.weights_dir, memory, read.states)
        stack.callback(reader.close)
        opened = Opened(read, chosen, {one.name: one for one in made.tensors}, reader)
        with OpenCheckpoint(opened, as_tensor, stack.pop_all()) as tensors:
            yield Weights(tensors, made.config, read.location.step, memory)


def check_config(weights: Weights, stated: ModelConfig, *, hint: str) -> None:
    """Check that the engine's config fits the weights, where a merge would change config.json.

    Args:
        weights: of the checkpoint.
        stated: the config that the engine has.
        hint: how to give the engine the config that fits.

    Raises:
        ConversionError: the engine would tie weights that differ, or has another vocabulary.
    """
    needed = weights.config
    if needed is None:
        return
    engine, own = (_vocabulary(stated), _vocabulary(needed))
    problem = f"the vocabulary of the engine's config is {engine}, that of the checkpoint {own}"
    if stated.is_tied and not needed.is_tied:
        problem = "the engine's config ties head and embedding, which differ in the checkpoint"
    elif engine == own:
        return
    raise ConversionError(f"{weights.path}: {problem}", hint=hint)


def _vocabulary(config: ModelConfig) -> object:
    return config.text.get("vocab_size", config.fields.get("vocab_size"))


def check_shapes(weights: Weights, before: Shapes) -> None:
    """Check that a running engine can take the tensors of another checkpoint.

    Args:
        weights: of that checkpoint.
        before: names and shapes of what the engine was started with.

    Raises:
        ConversionError: they are not the same.
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
    """What an engine is started with.

    Attributes:
        title: which weights these are, for people.
        step: the step of the checkpoint, if it has one.
        config: config.json as the engine must read it.
        companions: the files as they are.
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
        """The directory that has exactly what the engine must read; None if there is none."""
        config, stated = self.companions.config, self.companions.model
        if config is None or stated is None or config.name != "config.json":
            return None
        together = all(path == config.parent / name for name, path in self.companions.files.items())
        return config.parent if together and stated.fields == self.config.fields else None


def describe(checkpoint: str | Path, options: EngineKeywords) -> Described:
    """Read what an engine is started with; no weights are read.

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
    """Yield a directory with config, tokenizer and the like, as an engine must read them.

    It is the checkpoint's own if that has them all as they must be, and otherwise a temporary one,
    removed in the end. It has no weights.
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
    """Return what the loader must be given, as JSON: the checkpoint and how to read it.

    Args:
        checkpoint: as for `merge`.
        step: the step that was found: a run may have a newer one when the engine loads.
        options: as for `describe`.
    """
    place = given_path(checkpoint, "the checkpoint").absolute()
    found: dict[str, object] = {"checkpoint": str(place)}
    found |= {} if step is None else {"step": step}
    for name, value in options.items():
        if value is None or value is False or value in ((), []):
            continue  # as if it were not given
        if name == "also":
            found[name] = [_absolute(one) for one in options["also"]]
        else:
            found[name] = _absolute(value) if name in {"base", "config"} else value
    return found


def _absolute(value: object) -> str:
    """Return a local path as an absolute one; the id of a model on the hub as it is."""
    path = path_of(str(value))
    return str(path.absolute()) if path.exists() else str(value)
