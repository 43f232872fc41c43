"""What every reader takes and gives: a place, the user's options, and what was found there.

A reader is a module with one `Format`. It reads names, pickles and headers, never weights, and
returns where every chunk of every tensor is. What all formats share (names of wrappers, the check
for holes, companions) is done by `open` afterwards. One format is here that is recognised and
refused: only its own tool can read it.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unshard.containers.open_files import opened, pread, size_of
from unshard.containers.torch_files.writer import Plain
from unshard.errors import CorruptError, IncompleteError, NotMergeableError
from unshard.keywords import Weights
from unshard.noted import Noted
from unshard.read.model_config import ConfigFile
from unshard.read.tree import Tree
from unshard.tensors.catalog import Catalog

if TYPE_CHECKING:
    from unshard.read.optimizer_state import SavedState

_COMPARED = 1 << 20

_NUMBERED = re.compile(r"pytorch_model_fsdp_([1-9]\d*)")
_FILE_SUFFIX = re.compile(r"(?<=.)\.(?:ckpt|pt|pth|bin|safetensors)$")
_FAIRSEQ2 = re.compile(r"sdp_\d+\.pt")

# Folders of a step, and whose weights they have: `policy` is what SkyRL and NeMo-RL call the actor.
ROLES = {"actor": "actor", "policy": "actor", "critic": "critic"}
# The same of folders that are looked for by a search only: of ROLL, OpenRLHF, open-instruct.
_MORE_ROLES = {
    "_actor": "actor",
    "actor_train": "actor",
    "_critic": "critic",
    "critic_train": "critic",
    "ref": "ref",
    "reference": "ref",
    "ref_policy": "ref",
    "reward": "reward",
    "value": "value",
    "reward_model": "reward",
    "teacher": "teacher",
    "student": "student",
}

Role = str  # "actor", "critic", "ref", "reward", "value", "teacher", "student"
EVERY_ROLE = "all"


class Choice(NamedTuple):
    """What the user chose in addition to the path; None for no preference.

    Attributes:
        step: the training step.
        role: "actor", "critic", or the name of any folder that holds one of several sets.
        weights: "model" or "ema"; of DeepSpeed also "module", those in the dtype of training.
        pass_over: whether a step that is not complete may be passed over for an older one.
    """

    step: int | None = None
    role: Role | None = None
    weights: Weights | None = None
    pass_over: bool = True


class PassedOver(NamedTuple):
    """A step that was not taken.

    Attributes:
        step: its number, where the directory's name says it.
        reason: why, without the path of the run.
    """

    step: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a checkpoint.

    Attributes:
        config: the user's own config, a file or a directory.
        assume_dim0: take plain tensors that differ between ranks as shards along dimension 0.
        ep_size: size of the expert parallelism that the files do not record.
        allowed_globals: tensor subclasses to read as the plain tensors they store.
        shapes: shapes of tensors that are known from elsewhere (the base model), by name.
        config_file: the config.json that was found for the checkpoint, to be read once.
        selects: whether the output has a part of the tensors: only that part must be mergeable.
    """

    config: Path | None = None
    assume_dim0: bool = False
    ep_size: int | None = None
    allowed_globals: frozenset[str] = frozenset()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    config_file: ConfigFile | None = None
    selects: bool = False


@dataclass(frozen=True, slots=True)
class Location:
    """Where one set of weights is.

    Attributes:
        weights_dir: the directory that holds the weight files.
        step_dir: the checkpoint's own directory; `weights_dir` itself or above it.
        step: training step, where the step directory's name says it.
        role: whose weights they are, where a folder says so ("actor", "critic", "ref"), else None.
        weights: "model", "ema" or "module".
        format: how the weights are stored there.
        file: the one file that is meant, where the path names a file and the directory may hold
            other weights.
        empty: higher steps of the run, which have no weights and were passed over.
        also: directories that hold more files of the same checkpoint (of other nodes).
        others: the other sets of weights of the step, if every role was asked for.
    """

    weights_dir: Path
    step_dir: Path
    step: int | None
    role: Role | None
    weights: Weights
    format: "Format"
    file: Path | None = None
    empty: tuple[Path, ...] = ()
    also: tuple[Path, ...] = ()
    others: tuple["Location", ...] = ()

    @property
    def roots(self) -> tuple[Path, ...]:
        """All directories that hold files of the checkpoint."""
        return (self.weights_dir, *self.also)

    def is_called(self, role: Role) -> bool:
        """Return whether a role, or the name of a folder of the step, means these weights."""
        return role == self.role or role in self.weights_dir.relative_to(self.step_dir).parts

    @property
    def place(self) -> Path:
        """The directory of the weights, or the one file that is the whole checkpoint."""
        is_alone = self.file is not None and not self.format.claims(Tree(), self.file)
        return self.file if self.file is not None and is_alone else self.weights_dir

    @property
    def path(self) -> Path:
        """What to give to mean this checkpoint again: its directory, or its one file."""
        return self.step_dir if self.place == self.weights_dir else self.place

    @property
    def title(self) -> str:
        """Which weights these are, for people: path, step, role, model or EMA."""
        step = "" if self.step is None else f"step {self.step}, "
        role = "" if self.role is None else f"{self.role}, "
        kind = "EMA" if self.weights == "ema" else self.weights
        return f"{self.place} ({step}{role}{kind} weights)"

    @property
    def default_output(self) -> Path:
        """`merged/<step directory>[-ROLE][-WEIGHTS]` next to the step directory.

        Neither an actor nor model weights are named. A file that is a checkpoint of its own has its
        output next to it; a second model of one step has its number in the name. A directory that
        is called like a file (Lightning's `….ckpt`) gives it its name without the suffix.
        """
        suffix = "" if self.role in (None, "actor") else f"-{self.role}"
        suffix += "" if self.weights == "model" else f"-{self.weights}"
        if self.place != self.weights_dir:
            return self.weights_dir / "merged" / (self.place.stem + suffix)
        if number := _NUMBERED.fullmatch(self.weights_dir.name):
            suffix = f"-{number[1]}" + suffix
        return self.step_dir.parent / "merged" / (_FILE_SUFFIX.sub("", self.step_dir.name) + suffix)


def _nothing(*_: object) -> None:
    """Return None, as a format that has no such thing."""


def unfinished_file(location: Location) -> str | None:
    """Return which file of a checkpoint is missing or not finished, in any format."""
    from unshard.read.unfinished import why_folder_unfinished, why_unfinished

    if location.path.is_file():
        return why_unfinished([location.path])
    return why_folder_unfinished(location.weights_dir)


class ReshardFormat(Enum):
    """Who loads what a reshard writes: `dcp` is for `dcp.load`, `accelerate` for `load_state`."""

    VERL = "verl"
    LMMS = "lmms"
    DCP = "dcp"
    ACCELERATE = "accelerate"

    @property
    def is_dcp(self) -> bool:
        """Whether the files are those of torch.distributed.checkpoint, and not of ranks."""
        return self in {ReshardFormat.DCP, ReshardFormat.ACCELERATE}


class Format(NamedTuple):
    """A way to store weights.

    Attributes:
        name: for people: "FSDP rank files".
        holds: returns whether a directory of a tree has files of this format, by their names.
        read: reads them. Of the catalog, `read.open` sets what the location says: `roots`, `format`
            and `step`.
        claims: returns whether a file, by its name, is a part of such a set, not a checkpoint.
        sharded: whether ranks have parts; they are preferred to whole weights next to them.
        weights: which sets of weights a checkpoint may have.
        tagged: whether a directory is a tag of DeepSpeed's, and the file `latest` next to it has
            the last complete one.
        missing: returns which file is missing or not finished, while a trainer may be writing;
            None if none is.
        optimizer: reads the state of the optimizer of a checkpoint of so many ranks; None without.
        scheduler: reads the state of the scheduler that is among the weights; None without.
        frozen: returns which parameters it stores whole, because they are not trained; None if
            nothing in the files shows it.
        reshard_format: returns the format of `reshard` that a checkpoint is in; None if in another.
        reshards_to: the formats of `reshard` whose trainers load tensors by the names that it has.

    `read` raises a `CheckpointError` for everything that is wrong with the files.
    """

    name: str
    holds: Callable[[Tree, Path], bool]
    read: Callable[[Location, ReadOptions], Catalog]
    claims: Callable[[Tree, Path], bool]
    sharded: bool = True
    weights: tuple[Weights, ...] = ("model", "ema")
    tagged: bool = False
    missing: Callable[[Location], str | None] = unfinished_file
    optimizer: "Callable[[Location, int, ReadOptions], SavedState | None]" = _nothing
    scheduler: Callable[[Location], Noted[Plain]] = lambda _: Noted(None)
    frozen: Callable[[Location], Collection[str] | None] = _nothing
    reshard_format: Callable[[Location, Catalog], ReshardFormat | None] = _nothing
    reshards_to: Collection[ReshardFormat] = tuple(ReshardFormat)

    def __str__(self) -> str:
        return self.name


def role_in(folders: Sequence[str]) -> Role | None:
    """Return the role that the name of the first folder with a known name states."""
    known = ROLES | _MORE_ROLES
    return next((known[name] for name in folders if name in known), None)


def has_file(is_meant: Callable[[str], bool]) -> Callable[[Tree, Path], bool]:
    """Return a function that returns whether a directory has a file whose name is meant."""
    return lambda tree, directory: any(map(is_meant, tree.inside(directory)))


def by_name(is_meant: Callable[[str], bool]) -> Callable[[Tree, Path], bool]:
    """Return a function that returns whether a file's name is meant."""
    return lambda _, path: is_meant(path.name)


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Report a file that cannot be read as an error of the checkpoint."""
    try:
        yield
    except OSError as error:
        raise CorruptError(
            f"{error.filename or path}: cannot be read: {error.strerror or error}",
            hint="check its permissions, and that its disk is mounted",
        ) from error


def shortened(names: Sequence[str], most: int = 5) -> str:
    """Return the first of some names, and "…" if there are more."""
    return ", ".join(names[:most]) + (" …" if len(names) > most else "")


def files_in(roots: Sequence[Path], is_meant: Callable[[str], bool]) -> list[Path]:
    """Return the files of these names in all directories, by name.

    A file that several directories hold is taken from the first, if it is the same everywhere.

    Raises:
        CorruptError: two directories hold different files of one name.
        IncompleteError: one of these names is not a file.
    """
    names: set[str] = set()
    for root in roots:
        for path in root.iterdir():
            if not is_meant(path.name):
                continue
            if not path.is_file():
                raise IncompleteError(
                    f"{path}: is not a file", hint="is it a link to a file that no longer exists?"
                )
            names.add(path.name)
    found = (find_file(roots, name) for name in sorted(names))
    return [path for path in found if path is not None]


def _have_same_bytes(first: Path, second: Path) -> bool:
    with opened(first) as ours, opened(second) as theirs:
        size = size_of(ours)
        return size == size_of(theirs) and all(
            pread(ours, _COMPARED, at) == pread(theirs, _COMPARED, at)
            for at in range(0, size, _COMPARED)
        )


def find_file(roots: Sequence[Path], name: str) -> Path | None:
    """Return the file of this name, or relative path, from the first directory that has it.

    Raises:
        CorruptError: two directories hold different files of that name.
    """
    there = [root / name for root in roots if (root / name).is_file()]
    for other in there[1:]:
        if not (there[0].samefile(other) or _have_same_bytes(there[0], other)):
            raise CorruptError(
                f"{other}: differs from {there[0]}, which has the same name",
                expected="directories that each hold other ranks' files of one checkpoint",
                hint="are these two steps, or two runs?",
            )
    return there[0] if there else None


def _holds_fairseq2(tree: Tree, directory: Path) -> bool:
    """A step of fairseq2 without `hg/`, its export to Hugging Face, which can be merged."""
    is_step = any(tree.glob(directory, "model/pp_*/tp_*/sdp_*.pt"))
    return is_step and not tree.is_dir(directory / "hg")


def _refuse_fairseq2(location: Location, _: ReadOptions) -> Catalog:
    raise NotMergeableError(
        f"{location.weights_dir}: a fairseq2 checkpoint",
        expected="a checkpoint of the FSDP family, or fairseq2's export in the folder hg",
        found="files per pipeline, tensor and data parallel rank (model/pp_*/tp_*/sdp_*.pt)",
        hint="have fairseq2 export the step to Hugging Face, or give a step that has the folder hg",
    )


FAIRSEQ2 = Format(
    "fairseq2 checkpoint",
    _holds_fairseq2,
    _refuse_fairseq2,
    by_name(lambda name: _FAIRSEQ2.fullmatch(name) is not None),
)
