"""`open_checkpoint`: a checkpoint as one state dict, without a merge; and loading it into torch."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack, overload

from unshard.api.flow.converting import convert_one
from unshard.api.flow.sources import inflated, read_checkpoint
from unshard.api.lazy import OpenCheckpoint
from unshard.api.loading import Loaded, Opened
from unshard.api.options import MergeOptions, given_path, taking
from unshard.containers.strided import Elements
from unshard.engines.arrays import TensorReader
from unshard.errors import UsageError
from unshard.keywords import OpenKeywords
from unshard.plan.work import as_stored
from unshard.progress import Warned
from unshard.tensors.dtypes import DType, numpy_dtype

if TYPE_CHECKING:
    from unshard.engines.into_torch import Module, Tensor
from unshard.showing import hearing

__all__ = ["load_into", "load_state_dict", "open_checkpoint"]


@overload
def open_checkpoint(
    path: str | Path, *, framework: Literal["np"] = "np", **options: Unpack[OpenKeywords]
) -> OpenCheckpoint[Elements]: ...


@overload
def open_checkpoint(
    path: str | Path, *, framework: Literal["pt"], **options: Unpack[OpenKeywords]
) -> "OpenCheckpoint[Tensor]": ...


@taking(OpenKeywords, names="training")
def open_checkpoint(
    path: str | Path, *, framework: str = "np", **options: Unpack[OpenKeywords]
) -> "OpenCheckpoint[Elements | Tensor]":
    """Open a checkpoint as one state dict; tensors are read when they are asked for.

    Nothing is merged or copied, except that the items of a compressed checkpoint are decompressed
    into a temporary directory until it is closed. Memory is the size of the requested tensors plus
    a few MB. The dtypes are those stored. Notes about the checkpoint (a step that was passed over)
    are `UnshardWarning`s.

    Args:
        path: at any level of the checkpoint's tree; any format that `merge` reads.
        framework: "np" for arrays of numpy, with bfloat16 and float8 of ml_dtypes; or "pt" for
            tensors of torch (extra `torch`).
        options: as for `merge`, but the default of `names` is "training": the state dict as it was
            saved, with separate adapters, and tied weights under both names. "hub" gives what
            `merge` writes: names of the hub, experts one by one, adapters fused.

    Raises:
        CheckpointError: it cannot be read.
        ConversionError: with names "hub": the names cannot be resolved.
        UsageError: an option is not valid, or torch is not installed.
    """
    make = _maker(framework)
    names = options.setdefault("names", "training")
    chosen = MergeOptions(**options)
    with ExitStack() as stack:
        stored = read_checkpoint(given_path(path, "the checkpoint"), chosen)
        with hearing(None) as heard:
            for note in stored.catalog.notes:
                heard(Warned(note))
        checkpoint = inflated(stored, stack)
        found = (
            as_stored(checkpoint.catalog)
            if names == "training"
            else convert_one(checkpoint, chosen).tensors
        )
        reader = TensorReader(checkpoint.location.weights_dir)
        stack.callback(reader.close)
        opened = Opened(checkpoint, chosen, {one.name: one for one in found}, reader)
        return OpenCheckpoint(opened, make, stack.pop_all())


@taking(OpenKeywords, names="training")
def load_state_dict(path: str | Path, **options: Unpack[OpenKeywords]) -> "dict[str, Tensor]":
    """Read a whole checkpoint into tensors of torch (extra `torch`), by name.

    Args:
        path: as for `open_checkpoint`.
        options: as for `open_checkpoint`.

    Raises:
        UnshardError: as `open_checkpoint` raises it; or a file is gone or ends early.
    """
    with open_checkpoint(path, framework="pt", **options) as checkpoint:
        return {name: checkpoint.get_tensor(name) for name in checkpoint}


@taking(OpenKeywords, names="training")
def load_into(
    model: "Module", path: str | Path, *, strict: bool = True, **options: Unpack[OpenKeywords]
) -> Loaded:
    """Load a checkpoint into a model of torch, one tensor at a time, without a merge.

    Args:
        model: any module of torch; its names determine how tensors are converted.
        path: as for `open_checkpoint`.
        strict: raise if names are missing or unexpected; otherwise return them.
        options: as for `open_checkpoint`.

    Raises:
        ConversionError: the checkpoint does not fit the model; nothing was copied.
        UnshardError: as `open_checkpoint` raises it; or a file is gone or ends early.
    """
    with open_checkpoint(path, **options) as checkpoint:
        return checkpoint.load_into(model, strict=strict)


def _maker(framework: str) -> "Callable[[Elements, DType], Elements | Tensor]":
    """Return a function that makes an array of this framework from bits."""
    if framework == "np":
        return lambda bits, dtype: bits.view(numpy_dtype(dtype))
    if framework == "pt":
        from unshard.engines.into_torch import as_tensor, need_torch

        need_torch()
        return as_tensor
    raise UsageError(f"framework {framework!r}: unknown", expected='"np" or "pt"')
