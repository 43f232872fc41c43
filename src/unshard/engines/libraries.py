"""Load models of diffusers and sentence-transformers, or compare their names and shapes.

diffusers' `from_pretrained` only reads files. So `from_config` builds the class of a config, and
values are assigned as by `load_model_dict_into_meta` (diffusers 0.42): in the requested dtype,
float32 by default, and always float32 for modules that the class keeps so.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from unshard.errors import OutputError, UsageError
from unshard.read.model_config import ModelConfig
from unshard.tensors.dtypes import DType
from unshard.write.verification.comparison import Loading, Mismatch
from unshard.write.verification.load import Shape, need_modules, refuse_misfits, verify_load

if TYPE_CHECKING:
    import torch

    from unshard.engines.into_transformers import Unread


_DIFFUSERS = ("a model of diffusers: ", "torch", "diffusers")


class Lazy(Protocol):
    """A tensor that is read when it is indexed."""

    @property
    def shape(self) -> Shape:
        """The shape of the whole tensor."""

    def __getitem__(self, index: Any) -> "Unread":
        """Return the selected part, to be read."""


def load_diffusers(
    config: ModelConfig,
    tensors: Mapping[str, Lazy],
    options: Mapping[str, Any],
    allowed: Mapping[str, bool],
) -> "torch.nn.Module":
    """Return the model of a config, in evaluation mode.

    Args:
        config: with `_class_name`.
        tensors: by the names of the output.
        options: keywords of diffusers' `from_pretrained`: only `torch_dtype` or `dtype`.
        allowed: `allow_missing` and `allow_unexpected`, as for `merge`.

    Raises:
        UsageError: diffusers is not installed, or an option does not apply.
        OutputError: diffusers does not have the class, or cannot build it.
        ConversionError: names or shapes differ; lists all differences.
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
        raise UsageError(f"dtype: {options} has no dtype of torch", expected="torch.bfloat16")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = _build(config)
    finally:
        torch.set_default_dtype(before)
    parameters = model.state_dict(keep_vars=True)
    loading = _compare_with(model, {name: tensor.shape for name, tensor in tensors.items()})
    missing = () if allowed["allow_missing"] else loading.missing
    unexpected = () if allowed["allow_unexpected"] else loading.unexpected
    refuse_misfits(replace(loading, missing=missing, unexpected=unexpected))
    in_float32 = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name in parameters.keys() & tensors.keys():
        parameter = parameters[name]
        wanted = parameter.dtype
        if parameter.is_floating_point():
            wanted = torch.float32 if {*in_float32} & {*name.split(".")} else dtype
        parameter.data = tensors[name][...].to(dtype=wanted)
    model.eval()
    return cast("torch.nn.Module", model)


def place_in_diffusers(config: ModelConfig, tensors: Mapping[str, tuple[DType, Shape]]) -> Loading:
    """Compare names and shapes with a config's class of diffusers, on the meta device.

    Raises:
        UsageError: diffusers is not installed.
        OutputError: it does not have the class, or the config does not fit it.
    """
    need_modules(*_DIFFUSERS)
    import torch

    with torch.device("meta"):
        model = _build(config)
    return _compare_with(model, {name: shape for name, (_, shape) in tensors.items()})


def place_in_modules(listed: Path, tensors: Mapping[str, tuple[DType, Shape]]) -> Loading:
    """Compare names and shapes with the modules that sentence-transformers loads.

    The first module is a model of transformers, and is compared with `verify_load`.

    Args:
        listed: the directory's modules.json.
        tensors: of all modules, with the folder of each before their names.

    Raises:
        UsageError: sentence-transformers or transformers is not installed.
        OutputError: it does not load the directory.
    """
    from unshard.read.beside.modules import in_folders, modules_at

    need_modules("a model of sentence-transformers: ", "sentence_transformers")
    from sentence_transformers import SentenceTransformer

    inner = {name: form for name, form in tensors.items() if "/" not in name}
    first = verify_load(listed.parent, inner)
    try:
        model = SentenceTransformer(str(listed.parent), device="cpu", local_files_only=True)
    except Exception as error:
        raise OutputError(
            f"{listed.parent}: sentence-transformers does not load it: {error}"
        ) from error
    loaded = in_folders(model.state_dict(), modules_at(listed))
    expected = {name: tuple(tensor.shape) for name, tensor in loaded.items() if "/" in name}
    ours = {name: shape for name, (_, shape) in tensors.items() if "/" in name}
    others = _compare("", expected, ours)
    return Loading(
        f"{first.model_class} of SentenceTransformer",
        (*first.missing, *others.missing),
        (*first.unexpected, *others.unexpected),
        (*first.mismatched, *others.mismatched),
    )


def _build(config: ModelConfig) -> Any:
    need_modules(*_DIFFUSERS)
    import diffusers

    name = str(config.fields["_class_name"])
    model_class: Any = getattr(diffusers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, diffusers.ModelMixin)):
        raise OutputError(
            f"{config.path}: has no model class of diffusers {diffusers.__version__}",
            found=f"_class_name: {name}",
        )
    try:
        build: Any = model_class.from_config
        return build(dict(config.fields))
    except Exception as error:
        raise OutputError(f"{config.path}: diffusers cannot build {name}: {error}") from error


def _compare_with(model: Any, tensors: Mapping[str, Shape]) -> Loading:
    """Compare names and shapes like diffusers' loading, which ignores some names."""
    parameters = model.state_dict(keep_vars=True).items()
    expected = {name: tuple(parameter.shape) for name, parameter in parameters}
    ignored: Iterable[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ours = {
        name: shape
        for name, shape in tensors.items()
        if name in expected or not any(re.search(pattern, name) for pattern in ignored)
    }
    return _compare(type(model).__name__, expected, ours)


def _compare(title: str, expected: Mapping[str, Shape], ours: Mapping[str, Shape]) -> Loading:
    missing, unexpected = expected.keys() - ours.keys(), ours.keys() - expected.keys()
    mismatched = (
        Mismatch(name, ours[name], expected[name])
        for name in sorted(expected.keys() & ours.keys())
        if expected[name] != ours[name]
    )
    return Loading(title, tuple(sorted(missing)), tuple(sorted(unexpected)), tuple(mismatched))
