"""The interface of all readers: a location and options in, a catalog out.

A reader is a module with one `Format`. It reads names, pickles and headers, never weights, and
returns the place of every chunk of every tensor. Steps that all formats share (names of wrappers,
the check for holes, companions) follow in `open`. One format here is recognised and refused: only
its own tool can read it.
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
from unshard.read.model_config import ConfigFile
from unshard.read.tree import Tree
from unshard.tensors.catalog import Catalog
from unshard.with_notes import WithNotes

if TYPE_CHECKING:
    from unshard.read.optimizer_state import SavedState

_COMPARED = 1 << 20
_NUMBERED = re.compile(r"pytorch_model_fsdp_([1-9]\d*)")
_FILE_SUFFIX = re.compile(r"(?<=.)\.(?:ckpt|pt|pth|bin|safetensors)$")
_FAIRSEQ2 = re.compile(r"sdp_\d+\.pt")

# Folders of a step, and the role of their weights; SkyRL and NeMo-RL call the actor `policy`.
ROLES = {"actor": "actor", "policy": "actor", "critic": "critic"}
# The same for folders that only a search finds: of ROLL, OpenRLHF, open-instruct.
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
    """The user's choice in addition to the path; None for no preference.

    Attributes:
        step: the training step.
        role: "actor", "critic", or the name of any folder that holds one of several sets.
        weights: "model" or "ema"; of DeepSpeed also "module", those in the dtype of training.
        pass_over: whether an incomplete step may be passed over for an older one.
    """

    step: int | None = None
    role: Role | None = None
    weights: Weights | None = None
    pass_over: bool = True


class PassedOver(NamedTuple):
    """A step that was not taken.

    Attributes:
        step: its number, if the directory's name has it.
        reason: without the path of the run.
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
        config_file: the config.json of the checkpoint, to be read once.
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
    """The place of one set of weights.

    Attributes:
        weights_dir: the directory that holds the weight files.
        step_dir: the checkpoint's own directory; `weights_dir` itself or above it.
        step: training step, if the step directory's name has it.
        role: of the weights, if a folder's name has it ("actor", "critic", "ref"), else None.
        weights: "model", "ema" or "module".
        format: of the weights.
        file: the chosen file, if the path is a file; the directory may hold other weights.
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
        """Return whether these weights have this role, or are in a folder of this name."""
        return role == self.role or role in self.weights_dir.relative_to(self.step_dir).parts

    @property
    def place(self) -> Path:
        """The directory of the weights, or the one file that is the whole checkpoint."""
        is_alone = self.file is not None and not self.format.claims(Tree(), self.file)
        return self.file if self.file is not None and is_alone else self.weights_dir

    @property
    def path(self) -> Path:
        """The path to pass for this checkpoint: its directory, or its one file."""
        return self.step_dir if self.place == self.weights_dir else self.place

    @property
    def title(self) -> str:
        """The weights for people: path, step, role, model or EMA."""
        step = "" if self.step is None else f"step {self.step}, "
        role = "" if self.role is None else f"{self.role}, "
        kind = "EMA" if self.weights == "ema" else self.weights
        return f"{self.place} ({step}{role}{kind} weights)"

    @property
    def default_output(self) -> Path:
        """`merged/<step directory>[-ROLE][-WEIGHTS]` next to the step directory.

        An actor and model weights are left out. A file that is a checkpoint of its own has its
        output next to it; a second model of one step has its number in the name. A suffix of a file
        (Lightning's `….ckpt`) is removed from the directory's name.
        """
        suffix = "" if self.role in (None, "actor") else f"-{self.role}"
        suffix += "" if self.weights == "model" else f"-{self.weights}"
        if self.place != self.weights_dir:
            return self.weights_dir / "merged" / (self.place.stem + suffix)
        if number := _NUMBERED.fullmatch(self.weights_dir.name):
            suffix = f"-{number[1]}" + suffix
        return self.step_dir.parent / "merged" / (_FILE_SUFFIX.sub("", self.step_dir.name) + suffix)


def _nothing(*_: object) -> None:
    """Return None; the default of a format without such a feature."""


def unfinished_file(location: Location) -> str | None:
    """Return a message about a missing or unfinished file of a checkpoint, in any format."""
    from unshard.read.unfinished import why_folder_unfinished, why_unfinished

    if location.path.is_file():
        return why_unfinished([location.path])
    return why_folder_unfinished(location.weights_dir)


class ReshardFormat(Enum):
    """The formats of `reshard`: `dcp` is loaded by `dcp.load`, `accelerate` by `load_state`."""

    VERL = "verl"
    LMMS = "lmms"
    DCP = "dcp"
    ACCELERATE = "accelerate"

    @property
    def is_dcp(self) -> bool:
        """Whether the files are those of torch.distributed.checkpoint, not of ranks."""
        return self in {ReshardFormat.DCP, ReshardFormat.ACCELERATE}


class Format(NamedTuple):
    """A way to store weights.

    Attributes:
        name: for people: "FSDP rank files".
        holds: returns whether a directory of a tree has files of this format, by their names.
        read: reads them; `read.open` sets `roots`, `format` and `step` of the catalog.
        claims: returns whether a file, by its name, is a part of such a set, not a checkpoint.
        sharded: whether ranks have parts; they are preferred to whole weights next to them.
        weights: the possible sets of weights of a checkpoint.
        tagged: whether a directory is a tag of DeepSpeed's; the file `latest` next to it has the
            last complete tag.
        missing: returns a message about a missing or unfinished file, while a trainer may be
            writing; None if there is none.
        optimizer: reads the optimizer's state of a checkpoint of so many ranks, if there is one.
        scheduler: reads the state of the scheduler that is stored with the weights, if any.
        frozen: returns the parameters that are stored whole because they are not trained; None if
            the files do not show it.
        reshard_format: returns the format of `reshard` of a checkpoint; None if it has another.
        reshards_to: the formats of `reshard` whose trainers load tensors by the names that it has.

    `read` raises a `CheckpointError` for every problem with the files.
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
    scheduler: Callable[[Location], WithNotes[Plain]] = lambda _: WithNotes(None)
    frozen: Callable[[Location], Collection[str] | None] = _nothing
    reshard_format: Callable[[Location, Catalog], ReshardFormat | None] = _nothing
    reshards_to: Collection[ReshardFormat] = tuple(ReshardFormat)

    def __str__(self) -> str:
        return self.name


def role_in(folders: Sequence[str]) -> Role | None:
    """Return the role of the first folder whose name has one."""
    known = ROLES | _MORE_ROLES
    return next((known[name] for name in folders if name in known), None)


def has_file(matches: Callable[[str], bool]) -> Callable[[Tree, Path], bool]:
    """Return a function that returns whether a directory has a file whose name matches."""
    return lambda tree, directory: any(map(matches, tree.inside(directory)))


def by_name(matches: Callable[[str], bool]) -> Callable[[Tree, Path], bool]:
    """Return a function that returns whether a file's name matches."""
    return lambda _, path: matches(path.name)


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


def files_in(roots: Sequence[Path], matches: Callable[[str], bool]) -> list[Path]:
    """Return the files with matching names in all directories, by name.

    A file that several directories hold is taken from the first, if it is the same everywhere.

    Raises:
        CorruptError: two directories hold different files of one name.
        IncompleteError: a matching name is not a file.
    """
    names: set[str] = set()
    for root in roots:
        for path in root.iterdir():
            if not matches(path.name):
                continue
            if not path.is_file():
                raise IncompleteError(f"{path}: not a regular file (broken link?)")
            names.add(path.name)
    files = (find_file(roots, name) for name in sorted(names))
    return [path for path in files if path is not None]


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
    paths = [root / name for root in roots if (root / name).is_file()]
    for other in paths[1:]:
        if not (paths[0].samefile(other) or _have_same_bytes(paths[0], other)):
            raise CorruptError(
                f"{other}: differs from {paths[0]}, which has the same name",
                expected="directories that each hold other ranks' files of one checkpoint",
                hint="are these two steps, or two runs?",
            )
    return paths[0] if paths else None


def _holds_fairseq2(tree: Tree, directory: Path) -> bool:
    """Return whether a directory is a step of fairseq2 without `hg/`, its export that we read."""
    is_step = any(tree.glob(directory, "model/pp_*/tp_*/sdp_*.pt"))
    return is_step and not tree.is_dir(directory / "hg")


def _refuse_fairseq2(location: Location, _: ReadOptions) -> Catalog:
    raise NotMergeableError(
        f"{location.weights_dir}: a fairseq2 checkpoint",
        expected="a checkpoint of the FSDP family, or fairseq2's export in the folder hg",
        found="files per pipeline, tensor and data parallel rank (model/pp_*/tp_*/sdp_*.pt)",
        hint="export the step to Hugging Face with fairseq2, or pass a step with the folder hg",
    )


FAIRSEQ2 = Format(
    "fairseq2 checkpoint",
    _holds_fairseq2,
    _refuse_fairseq2,
    by_name(lambda name: _FAIRSEQ2.fullmatch(name) is not None),
)
