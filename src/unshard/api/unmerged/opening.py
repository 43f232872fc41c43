"""Open a checkpoint as one state dict without a merge; read tensors on demand, load into torch."""

import json
import weakref
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeVar, Unpack, get_args, overload

import numpy as np

from unshard.api.converting import convert_one
from unshard.api.options import MergeOptions, accepting, given_path
from unshard.api.sources import adapter_beside, inflated, read_checkpoint, with_optimizer
from unshard.api.unmerged.loading import Loaded, Opened, fill
from unshard.console import counted, listener_or_default
from unshard.containers.strided import Elements
from unshard.convert.optimizer import convert_optimizer
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import shape_of
from unshard.engines.arrays import Empty, TensorReader
from unshard.errors import NoSuchTensorError, UsageError
from unshard.keywords import OpenKeywords
from unshard.plan.operations import Target, Tiled
from unshard.plan.planner import make_operation
from unshard.plan.work import as_stored
from unshard.progress import Warned
from unshard.read.open import Checkpoint
from unshard.tensors.dtypes import DType, numpy_dtype
from unshard.tensors.selection import Index, Selection, select
from unshard.write.companions import optimizer_fields

if TYPE_CHECKING:
    from unshard.engines.into_torch import Module, Tensor

_Array_co = TypeVar("_Array_co", covariant=True)
_NEAREST = 3
_Part = Literal["model", "optimizer"]
_READERS = 4  # threads that read a whole checkpoint


@dataclass(frozen=True, eq=False, repr=False)
class LazyTensor(Generic[_Array_co]):
    """A tensor of an open checkpoint that is only read when it is indexed.

    Indexing returns a new array with the stored dtype, and the values and shape of numpy's basic
    indexing; without dimensions, an array of shape ().
    """

    _tensor: ConvertedTensor
    _read: Callable[[Tiled, Selection], _Array_co]

    def __repr__(self) -> str:
        """Return name, dtype and shape; nothing is read."""
        return f"<LazyTensor {self._tensor.name!r}: {self.get_dtype()} {self.get_shape()}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, elements."""
        return shape_of(self._tensor.recipe)

    def get_shape(self) -> list[int]:
        """Return the shape, like the slices of safetensors."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the dtype code of safetensors ("BF16"), or torch's name if it has no code."""
        return self._tensor.dtype.code or self._tensor.dtype.name

    def __getitem__(self, index: Index) -> _Array_co:
        """Read a part: integers, slices with any step, `...`, `None`, and tuples of these.

        Raises:
            IndexError: as in numpy; or for any other kind of index.
            CorruptError: a file is gone, has changed, or ends early.
            UsageError: the checkpoint was closed.
        """
        return self._read(self._operation, select(index, self.shape))

    @cached_property
    def _operation(self) -> Tiled:
        nowhere = Target(0, 0, self.shape)  # in memory, not in a file
        return make_operation(nowhere, self._tensor.recipe, self._tensor.dtype)


class TensorNames(KeysView[str]):
    """The names of a checkpoint's tensors: the keys of a dict, which can be indexed like a list."""

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return names by their position in the state dict."""
        return list(self)[index]

    def __repr__(self) -> str:
        """Return the names as a list."""
        return repr(list(self))


class OpenCheckpoint(Mapping[str, _Array_co]):
    """A checkpoint as one state dict that reads tensors, or parts of tensors, on demand.

    `unshard.open_checkpoint` returns it. It is a context manager, and a mapping of names to whole
    tensors; every lookup reads the tensor again, so `values()` and `items()` keep one tensor in
    memory at a time. It is equal only to itself. Several threads may read from it; another process
    must open its own.

    Args:
        opened: its parts.
        make: makes an array of the framework from bits.
        stack: resources to close.
    """

    def __init__(
        self, opened: Opened, make: Callable[[Elements, DType], _Array_co], stack: ExitStack
    ) -> None:
        self._opened = opened
        self._tensors = opened.tensors
        self._make = make
        self._close = weakref.finalize(self, stack.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files, and remove what was decompressed; nothing can be read afterwards."""
        self._close()

    def keys(self) -> TensorNames:
        """Return the names of all tensors, in the order of the state dict."""
        return TensorNames(self)

    def __getitem__(self, name: str) -> _Array_co:
        """Read a whole tensor, as `get_tensor` does."""
        return self.get_tensor(name)

    def __eq__(self, other: object) -> bool:
        """Compare by identity: comparing contents would read all of them."""
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """Return one line: path, number of tensors, format, step."""
        facts = self.metadata()
        step = f", step {facts['step']}" if "step" in facts else ""
        state = "" if self._close.alive else ", closed"
        count = counted(len(self), "tensor")
        return f"<OpenCheckpoint {facts['path']!r}: {count}, {facts['format']}{step}{state}>"

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def get_tensor(self, name: str) -> _Array_co:
        """Read a whole tensor. It raises the errors of `get_slice` and of indexing its result."""
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> LazyTensor[_Array_co]:
        """Return a tensor that is only read when it is indexed.

        Raises:
            NoSuchTensorError: no tensor has this name; also a `KeyError`.
        """
        if name not in self._tensors:
            name = str(name)

            def shared(other: str) -> int:
                """Return the length of the common prefix plus that of the common suffix."""
                begins: int = sum(takewhile(bool, map(eq, name, other)))
                ends: int = sum(takewhile(bool, map(eq, name[::-1], other[::-1])))
                return begins + ends

            nearest = sorted(self._tensors, key=shared, reverse=True)[:_NEAREST]
            raise NoSuchTensorError(
                f"{self._opened.path}: has no tensor {name}",
                hint=f"the nearest names are {', '.join(nearest)}",
            )
        return LazyTensor(self._tensors[name], self._read)  # its reference keeps this open

    def metadata(self) -> dict[str, str]:
        """Return facts about the checkpoint as strings; unknown values are left out.

        The keys are path, format, writer, step, world_size, role ("actor" or "critic"), weights
        ("model" or "ema"), and config, the path of its config.json. The part "optimizer" also has
        the key optimizer: steps and parameter groups as JSON.
        """
        checkpoint = self._opened.checkpoint
        catalog, location = checkpoint.catalog, checkpoint.location
        state = checkpoint.optimizer
        facts = {
            "path": self._opened.path,
            "format": catalog.format,
            "writer": catalog.writer,
            "step": catalog.step,
            "world_size": catalog.world_size,
            "role": location.role,
            "weights": location.weights,
            "config": checkpoint.companions.config,
            "optimizer": None if state is None else json.dumps(optimizer_fields(state)),
        }
        return {key: str(value) for key, value in facts.items() if value is not None}

    def load_into(self, model: "Module", *, strict: bool = True) -> Loaded:
        """Copy the tensors into a model's parameters and buffers, tile by tile.

        Values are cast to the model's dtypes as by torch, except fractions to integers; parameters
        on the meta device get the checkpoint's dtype. Names and expert layout of training and of
        the hub are converted to those of the model. Tied weights stay tied, and need only one name.
        Every rank of a sharded model (DTensors) reads its own part.

        Args:
            model: any module of torch.
            strict: raise if names are missing or unexpected; otherwise return them.

        Raises:
            ConversionError: the checkpoint does not fit the model; nothing was copied.
            CorruptError: a file is gone, has changed, or ends early.
            UsageError: torch is not installed, or the checkpoint was closed.
        """
        return fill(model, self._opened, strict=strict)

    def _read(self, operation: Tiled, selection: Selection) -> _Array_co:
        return self._make(self._opened.reader.read(operation, selection), operation.to)


@overload
def open_checkpoint(
    path: str | Path,
    *,
    framework: Literal["np"] = "np",
    part: _Part = "model",
    **options: Unpack[OpenKeywords],
) -> OpenCheckpoint[Elements]: ...


@overload
def open_checkpoint(
    path: str | Path,
    *,
    framework: Literal["pt"],
    part: _Part = "model",
    **options: Unpack[OpenKeywords],
) -> "OpenCheckpoint[Tensor]": ...


@accepting(OpenKeywords, names="training")
def open_checkpoint(
    path: str | Path,
    *,
    framework: str = "np",
    part: _Part = "model",
    **options: Unpack[OpenKeywords],
) -> "OpenCheckpoint[Elements | Tensor]":
    """Open a checkpoint as one state dict that reads tensors on demand.

    Nothing is merged or copied, except that the items of a compressed checkpoint are decompressed
    into a temporary directory until it is closed. Memory is the size of the requested tensors plus
    a few MB. Tensors have their stored dtypes. Notes about the checkpoint (a step that was passed
    over) are `UnshardWarning`s.

    Args:
        path: any level of the checkpoint's tree; any format that `merge` reads.
        framework: "np" for arrays of numpy, with bfloat16 and float8 of ml_dtypes; or "pt" for
            tensors of torch (extra `torch`).
        part: "model", or "optimizer" for the state of its optimizer: tensors under the names of
            torch's flattened optimizer state dict (`state.lm_head.weight.exp_avg`), all other
            values in `metadata()["optimizer"]`.
        options: as for `merge`, but the default of `names` is "training": the state dict as it was
            saved, with separate adapters, and tied weights under both names. "hub" gives the output
            of `merge`: names of the hub, experts one by one, adapters fused.

    Raises:
        CheckpointError: it cannot be read.
        ConversionError: with names "hub": the names cannot be resolved.
        UsageError: an option is not valid, or torch is not installed.
    """
    make, empty = _choose_framework(framework)
    if part not in get_args(_Part):
        raise UsageError(f"part {part!r}: unknown", expected=", ".join(get_args(_Part)))
    options.setdefault("names", "training")
    chosen = MergeOptions(**options, optimizer=part == "optimizer")
    with ExitStack() as stack:
        checkpoint = read_unmerged(path, chosen, stack)
        tensors = {tensor.name: tensor for tensor in _tensors(checkpoint, chosen)}
        reader = TensorReader(checkpoint.location.weights_dir, empty, checkpoint.states)
        stack.callback(reader.close)
        opened = Opened(checkpoint, chosen, tensors, reader)
        return OpenCheckpoint(opened, make, stack.pop_all())


def _tensors(checkpoint: Checkpoint, options: MergeOptions) -> Sequence[ConvertedTensor]:
    """Return the tensors of the model, or of the optimizer's state, under the requested names."""
    model = as_stored(checkpoint.catalog)
    if options.names != "training":
        model = [*convert_one(checkpoint, options).tensors]
    if checkpoint.optimizer is None:
        return model
    if options.names == "training":
        return as_stored(checkpoint.optimizer.catalog)
    return convert_optimizer(model, checkpoint.catalog, checkpoint.optimizer)[0].value


def read_unmerged(path: str | Path, options: MergeOptions, stack: ExitStack) -> Checkpoint:
    """Read a checkpoint and warn of its notes; the stack removes decompressed files."""
    stored = read_checkpoint(given_path(path, "the checkpoint"), options)
    if options.optimizer:
        stored = with_optimizer(stored, options)
    with listener_or_default(None) as heard:
        for note in stored.catalog.notes:
            heard(Warned(note))
        if options.names == "training" and (adapter := adapter_beside(stored)) is not None:
            heard(Warned(f"the LoRA adapter next to the weights, {adapter}, is not applied"))
    return inflated(stored, stack)


@accepting(OpenKeywords, names="training")
def load_state_dict(path: str | Path, **options: Unpack[OpenKeywords]) -> "dict[str, Tensor]":
    """Read a whole checkpoint into tensors of torch (extra `torch`), by name.

    Args:
        path: as for `open_checkpoint`.
        options: as for `open_checkpoint`.

    Raises:
        UnshardError: as `open_checkpoint` raises it; or a file is gone, has changed, or ends early.
    """
    with (
        open_checkpoint(path, framework="pt", **options) as checkpoint,
        ThreadPoolExecutor(_READERS) as pool,
    ):
        return dict(zip(checkpoint, pool.map(checkpoint.get_tensor, checkpoint), strict=True))


@accepting(OpenKeywords, names="training")
def load_into(
    model: "Module", path: str | Path, *, strict: bool = True, **options: Unpack[OpenKeywords]
) -> Loaded:
    """Load a checkpoint into a model of torch, tile by tile, without a merge.

    Args:
        model: any module of torch; tensors are converted to its names.
        path: as for `open_checkpoint`.
        strict: raise if names are missing or unexpected; otherwise return them.
        options: as for `open_checkpoint`.

    Raises:
        ConversionError: the checkpoint does not fit the model; nothing was copied.
        UnshardError: as `open_checkpoint` raises it; or a file is gone, has changed, or ends early.
    """
    with open_checkpoint(path, **options) as checkpoint:
        return checkpoint.load_into(model, strict=strict)


def _choose_framework(
    framework: str,
) -> "tuple[Callable[[Elements, DType], Elements | Tensor], Empty]":
    """Return a function that makes an array of this framework from bits, and an allocator."""
    if framework == "np":
        return lambda bits, dtype: bits.view(numpy_dtype(dtype)), np.empty
    if framework == "pt":
        from unshard.engines.into_torch import as_tensor, need_torch, torch_memory

        need_torch()
        return as_tensor, torch_memory
    raise UsageError(f"framework {framework!r}: unknown", expected='"np" or "pt"')
