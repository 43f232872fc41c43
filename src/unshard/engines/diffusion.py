"""Into diffusers: the model class that a config names, with tensors that are read one by one.

Its `from_pretrained` reads files alone. So the class is built by `from_config`, and gets its values
as `load_model_dict_into_meta` gives them (diffusers 0.42): in the dtype that is asked for, float32
by default, and always float32 where the class keeps modules so.
"""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from unshard.errors import OutputError, UsageError, how_to_install
from unshard.read.model_config import ModelConfig
from unshard.tensors.dtypes import DType
from unshard.write.verification.comparison import Loading, Mismatch
from unshard.write.verification.load import Shape, refuse_misfits

if TYPE_CHECKING:
    import torch

    from unshard.engines.into_transformers import Unread


class Lazy(Protocol):
    """A tensor of which nothing is read before it is indexed."""

    @property
    def shape(self) -> Shape:
        """Of the whole tensor."""

    def __getitem__(self, index: Any) -> "Unread":
        """Return what is to be read."""


def load_diffusers(
    config: ModelConfig,
    tensors: Mapping[str, Lazy],
    options: Mapping[str, Any],
    allowed: Mapping[str, bool],
) -> "torch.nn.Module":
    """Return the model that a config names, in evaluation mode.

    Args:
        config: with `_class_name`.
        tensors: by the names of the output.
        options: keywords of diffusers' `from_pretrained`: `torch_dtype` alone, or `dtype`.
        allowed: `allow_missing` and `allow_unexpected`, as for `merge`.

    Raises:
        UsageError: diffusers is not installed, or does not know the class; or another option.
        ConversionError: names or shapes differ; all that do are named.
    """
    import torch

    if unknown := options.keys() - {"torch_dtype", "dtype"}:
        raise UsageError(
            f"{min(unknown)}: does not apply to a model of diffusers, which is built in memory",
            expected="dtype",
        )
    dtype = options.get("dtype") or options.get("torch_dtype") or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = _build(config)
    finally:
        torch.set_default_dtype(before)
    places = model.state_dict(keep_vars=True)
    found = _compare(model, {name: one.shape for name, one in tensors.items()})
    missing = () if allowed["allow_missing"] else found.missing
    unexpected = () if allowed["allow_unexpected"] else found.unexpected
    refuse_misfits(Loading(found.model_class, missing, unexpected, found.mismatched))
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name in places.keys() & tensors.keys():
        in_full = any(part in name.split(".") for part in kept)
        wanted = torch.float32 if in_full else dtype
        place = places[name]
        wanted = wanted if place.is_floating_point() else place.dtype
        place.data = tensors[name][...].to(dtype=wanted)
    return model.eval()


def place_in_diffusers(config: ModelConfig, tensors: Mapping[str, tuple[DType, Shape]]) -> Loading:
    """Compare names and shapes with those of the class that a config names, on the meta device.

    Raises:
        UsageError: diffusers is not installed.
        OutputError: it has no such class, or the config does not fit it.
    """
    try:
        import torch
    except ImportError as error:
        raise _not_installed(error) from error
    with torch.device("meta"):
        model = _build(config)
    return _compare(model, {name: shape for name, (_, shape) in tensors.items()})


def _build(config: ModelConfig) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise _not_installed(error) from error
    name = str(config.fields["_class_name"])
    known = getattr(diffusers, name, None)
    if not (isinstance(known, type) and issubclass(known, diffusers.ModelMixin)):
        raise OutputError(
            f"{config.path}: names no model class of diffusers {diffusers.__version__}",
            found=f"_class_name: {name}",
        )
    try:
        return known.from_config(dict(config.fields))
    except Exception as error:
        raise OutputError(f"{config.path}: diffusers cannot build {name}: {error}") from error


def _compare(model: Any, tensors: Mapping[str, Shape]) -> Loading:
    """Return what has no counterpart: as diffusers' loading, which ignores some names."""
    shapes = {name: tuple(one.shape) for name, one in model.state_dict(keep_vars=True).items()}
    ignored: Iterable[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = (
        name
        for name in tensors.keys() - shapes.keys()
        if not any(re.search(one, name) for one in ignored)
    )
    mismatched = (
        Mismatch(name, found, shapes[name])
        for name, found in sorted(tensors.items())
        if shapes.get(name, found) != found
    )
    missing = tuple(sorted(shapes.keys() - tensors.keys()))
    return Loading(type(model).__name__, missing, tuple(sorted(unexpected)), tuple(mismatched))


def _not_installed(error: ImportError) -> UsageError:
    return UsageError(
        f"a model of diffusers: {error.name} is not installed",
        hint=how_to_install("torch diffusers", "torch"),
    )
