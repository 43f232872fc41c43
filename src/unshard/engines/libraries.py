"""Models of other libraries than transformers: loaded, or their names and shapes compared.

diffusers' `from_pretrained` reads files alone. So the class that a config names is built by
`from_config`, and gets its values as `load_model_dict_into_meta` gives them (diffusers 0.42): in
the dtype that is asked for, float32 by default, and always float32 where the class keeps modules
so.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from unshard.errors import OutputError, UsageError, how_to_install
from unshard.read.model_config import ModelConfig
from unshard.tensors.dtypes import DType
from unshard.write.verification.comparison import Loading, Mismatch
from unshard.write.verification.load import Shape, refuse_misfits, verify_load

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
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype: {options} has none of torch", expected="torch.bfloat16")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = _build(config)
    finally:
        torch.set_default_dtype(before)
    places = model.state_dict(keep_vars=True)
    found = _compare_with(model, {name: one.shape for name, one in tensors.items()})
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
    model.eval()
    return cast("torch.nn.Module", model)


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
    return _compare_with(model, {name: shape for name, (_, shape) in tensors.items()})


def place_in_modules(listed: Path, tensors: Mapping[str, tuple[DType, Shape]]) -> Loading:
    """Compare names and shapes with what sentence-transformers loads from a directory.

    Its first module is a model of transformers, which is compared as one.

    Args:
        listed: the directory's modules.json.
        tensors: of all modules, each after its folder.

    Raises:
        UsageError: sentence-transformers or transformers is not installed.
        OutputError: it does not load the directory.
    """
    from unshard.read.beside.modules import in_folders, modules_at

    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise _not_installed(error, "sentence-transformers") from error
    inner = {name: form for name, form in tensors.items() if "/" not in name}
    first = verify_load(listed.parent, inner)
    try:
        model = SentenceTransformer(str(listed.parent), device="cpu", local_files_only=True)
    except Exception as error:
        what = f"{listed.parent}: sentence-transformers does not load it: {error}"
        raise OutputError(what) from error
    loaded = in_folders(model.state_dict(), modules_at(listed))
    shapes = {name: tuple(one.shape) for name, one in loaded.items() if "/" in name}
    found = {name: shape for name, (_, shape) in tensors.items() if "/" in name}
    apart = _compare("", shapes, found)
    return Loading(
        f"{first.model_class} of SentenceTransformer",
        (*first.missing, *apart.missing),
        (*first.unexpected, *apart.unexpected),
        (*first.mismatched, *apart.mismatched),
    )


def _build(config: ModelConfig) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise _not_installed(error) from error
    name = str(config.fields["_class_name"])
    known: Any = getattr(diffusers, name, None)
    if not (isinstance(known, type) and issubclass(known, diffusers.ModelMixin)):
        raise OutputError(
            f"{config.path}: names no model class of diffusers {diffusers.__version__}",
            found=f"_class_name: {name}",
        )
    try:
        build: Any = known.from_config
        return build(dict(config.fields))
    except Exception as error:
        raise OutputError(f"{config.path}: diffusers cannot build {name}: {error}") from error


def _compare_with(model: Any, tensors: Mapping[str, Shape]) -> Loading:
    """Return what has no counterpart: as diffusers' loading, which ignores some names."""
    shapes = {name: tuple(one.shape) for name, one in model.state_dict(keep_vars=True).items()}
    ignored: Iterable[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    meant = {
        name: shape
        for name, shape in tensors.items()
        if name in shapes or not any(re.search(one, name) for one in ignored)
    }
    return _compare(type(model).__name__, shapes, meant)


def _compare(name: str, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> Loading:
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys()
    mismatched = (
        Mismatch(one, found[one], expected[one])
        for one in sorted(expected.keys() & found.keys())
        if expected[one] != found[one]
    )
    return Loading(name, tuple(sorted(missing)), tuple(sorted(unexpected)), tuple(mismatched))


def _not_installed(error: ImportError, packages: str = "torch diffusers") -> UsageError:
    return UsageError(
        f"a model of {packages.rsplit(maxsplit=1)[-1]}: {error.name} is not installed",
        hint=how_to_install(packages, "torch"),
    )
