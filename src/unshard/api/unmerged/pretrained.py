"""Load a checkpoint into a model of transformers from the shards, by transformers' own loader."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from unshard.api.converting import Conversion, convert
from unshard.api.making import kept_dtype
from unshard.api.merging import open_given
from unshard.api.options import MergeOptions, accepting
from unshard.api.sources import Sources, no_config
from unshard.api.unmerged.opening import LazyTensor
from unshard.console import listener_or_default
from unshard.convert.outputs import ConvertedTensor, main_dtype
from unshard.engines.arrays import TensorReader
from unshard.engines.into_torch import ReadableTensor, torch_memory
from unshard.engines.into_transformers import (
    GENERATION_NAME,
    Unread,
    choose_loader,
    config_object,
    load_pretrained,
    need_lazy_loading,
    refuse_differences,
    set_generation,
)
from unshard.errors import UnshardError, UsageError
from unshard.keywords import MergeKeywords, PretrainedKeywords
from unshard.plan.operations import Tiled
from unshard.progress import Warned, ignore, warn
from unshard.read.beside.companions import Companions
from unshard.read.model_config import ConfigFile, ModelConfig
from unshard.read.open import Checkpoint
from unshard.stores.nodes.connection import disconnecting
from unshard.stores.remote_path import RemotePath
from unshard.tensors.selection import Selection
from unshard.write.companions import write_files
from unshard.write.stage import scratch_directory

if TYPE_CHECKING:
    from unshard.engines.into_transformers import PreTrainedConfig, PreTrainedModel

_OWN = tuple(PretrainedKeywords.__annotations__)
_REFUSED = (MergeKeywords.__annotations__.keys() - {*_OWN, "dtype"}) | {
    "pretrained_model_name_or_path",
    "state_dict",
    "output_loading_info",
}


@accepting(PretrainedKeywords, others=True)
@disconnecting()
def from_pretrained(
    checkpoint: str | Path, auto_class: type | None = None, **kwargs: object
) -> "PreTrainedModel":
    """Load a checkpoint into a model of transformers (extra `torch`, transformers 5), unmerged.

    transformers' own `from_pretrained` builds the model, and reads each tensor from the shards on
    demand. The model is the same, bit for bit, as from the output of `merge`. No tensor is written
    to disk, except that the items of a compressed checkpoint are decompressed into a temporary
    directory. Memory is the model plus a few buffers.

    For a config of diffusers, the model is of the diffusers class in the config, and `dtype` is the
    only other keyword.

    Config and generation config are those of the checkpoint, or of `base`. As after a merge, the
    model has the dtype of the weights unless `dtype` is given. Remote code in a config runs only
    with `trust_remote_code=True`. Notes (adapters that were fused) are `UnshardWarning`s.

    Args:
        checkpoint: any level of its tree; any format that `merge` reads. RUN@last=5 is the average
            of the last 5 steps of a run, as for `merge`.
        auto_class: a class of transformers with `from_pretrained`: a model class or an Auto class.
            Default: the class in the config (`architectures`), or else `AutoModelForCausalLM`.
        kwargs: options for reading, as for `merge`: weights, role, step, also, ep_size,
            assume_dim0, allow_globals, base, lora_alpha, config, allow_missing, allow_unexpected.
            `config` may also be a config object of transformers, which is used unchanged. All
            other keywords (device_map, dtype, quantization_config, attn_implementation, …) are
            those of transformers' `from_pretrained`.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConversionError: names cannot be resolved; or tensors are missing or unexpected, or have
            other shapes than those of the model.
        UsageError: an option is not valid, there is no config, the class does not fit it, or torch
            or transformers 5 is not installed.
        Exception: any error of transformers about its own keywords.
    """
    for name in kwargs:
        if name in _REFUSED:
            raise TypeError(f"from_pretrained() got an unexpected keyword argument {name!r}")
    with ExitStack() as stack:
        need_lazy_loading()
        ours = {name: kwargs.pop(name) for name in _OWN if name in kwargs}
        own_config = config_object(ours.get("config"))
        if own_config is not None:
            folder = _temporary(stack)
            own_config.save_pretrained(folder)
            ours["config"] = folder / "config.json"
        options = MergeOptions(**cast("MergeKeywords", ours))
        sources = _with_local_config(_read_sources(checkpoint, options, stack), stack)
        source = sources.last
        output = convert(sources, options, all_shapes=False)  # transformers compares shapes
        if output.config is not None and output.config.library.name == "diffusers":
            return _load_diffusers(sources, output, kwargs, options)
        config = _choose_config(source, output, own_config, kwargs)
        loader, built, rest = choose_loader(auto_class, config, kwargs)
        with _reading(sources, output.tensors) as tensors:
            model, differences = load_pretrained(loader, tensors, built, rest)
        refuse_differences(model, differences, **options.allowed)
        default = source.companions.config if own_config is None else None
        generation = source.companions.files.get(GENERATION_NAME, default)
        if kwargs.get("generation_config") is None and generation is not None:
            set_generation(model, generation)
    place = source.location.place if len(sources.checkpoints) == 1 else checkpoint
    model.name_or_path = model.config.name_or_path = str(place)
    return model


def _load_diffusers(
    sources: Sources, output: Conversion, kwargs: dict[str, object], options: MergeOptions
) -> "PreTrainedModel":
    """Load a model of diffusers; see `engines.libraries`."""
    from unshard.engines.libraries import load_diffusers

    with listener_or_default(None) as heard:
        warn(heard, output.notes)
    config = cast("ModelConfig", output.config)
    with _reading(sources, output.tensors) as tensors:
        # Models of diffusers and of transformers have only torch's base class in common.
        return cast("PreTrainedModel", load_diffusers(config, tensors, kwargs, options.allowed))


def _temporary(stack: ExitStack) -> Path:
    return Path(stack.enter_context(TemporaryDirectory(prefix="_unshard-")))


def _read_sources(path: str | Path, options: MergeOptions, stack: ExitStack) -> Sources:
    """Read a checkpoint or an average, warn of its notes, and decompress it."""
    sources = open_given(path, replace(options, extra_state=False), ignore)
    with listener_or_default(None) as heard:
        warn(heard, sources.notes)
    if not sources.compressed_bytes:
        return sources
    return sources.decompressed(scratch_directory(stack))


def _with_local_config(sources: Sources, stack: ExitStack) -> Sources:
    """Return the sources with companions on disk, from which transformers reads them."""
    *others, source = sources.checkpoints
    file, files = source.companions.config_file, source.companions.files
    if file is None or (file.made is None and not isinstance(file.path, RemotePath)):
        return sources
    folder = _temporary(stack)
    config = file.path if file.made is None else json.dumps(dict(file.made.fields)).encode()
    write_files({**files, "config.json": config}, folder)
    local = Companions(ConfigFile(folder / "config.json"), {name: folder / name for name in files})
    return replace(sources, checkpoints=(*others, replace(source, companions=local)))


def _choose_config(
    source: Checkpoint,
    output: Conversion,
    own: "PreTrainedConfig | None",
    kwargs: dict[str, object],
) -> "ModelConfig | PreTrainedConfig":
    """Return the config from which the model is built; warn of notes.

    The caller's `own` config is used unchanged. If neither it nor the keywords have a dtype, that
    of the weights is added to the keywords.
    """
    if output.config is None:
        raise no_config(source, UsageError)
    written, notes = main_dtype(output.tensors), list(output.notes)
    has_dtype = not kwargs.keys().isdisjoint(("dtype", "torch_dtype"))
    if own is None and not has_dtype and (note := kept_dtype(output.config, written)) is not None:
        notes.append(f"{note}; to cast them, give dtype")
    with listener_or_default(None) as heard:
        for note in notes:
            heard(Warned(note))
    if own is None:
        return output.config.as_written(written)
    if not has_dtype and own.dtype is None:
        kwargs["dtype"] = written  # otherwise transformers would inspect the tensors
    return own


@contextmanager
def _reading(
    sources: Sources, tensors: Sequence[ConvertedTensor]
) -> Iterator[dict[str, LazyTensor[Unread]]]:
    """Yield tensors by name, which are only read when transformers moves a part of them.

    Errors of reads are raised at the end, because transformers would report them as conversion
    errors.
    """
    reader = TensorReader(sources.last.location.weights_dir, torch_memory, sources.states)
    failures: list[UnshardError] = []

    def unread(operation: Tiled, selection: Selection) -> Unread:
        return Unread(ReadableTensor(reader, operation), selection, failures)

    try:
        yield {tensor.name: LazyTensor(tensor, unread) for tensor in tensors}
    finally:
        reader.close()
        if failures:
            raise failures[0]
