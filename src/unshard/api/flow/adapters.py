"""LoRA adapters in a checkpoint: fused into the weights, or written by themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unshard.api.options import MergeOptions
from unshard.convert.lora.files import adapter_tensors
from unshard.convert.lora.fuse import fuse
from unshard.convert.lora.names import Split, split_adapter
from unshard.convert.names import training_names
from unshard.convert.outputs import Converted, finish
from unshard.convert.precision import Precision
from unshard.convert.recipes import Recipe, take
from unshard.errors import UsageError
from unshard.read.beside.adapter_config import read_adapter_config
from unshard.read.open import Checkpoint
from unshard.write.adapter import ADAPTER_CONFIG_NAME, adapter_config_json

__all__ = ["Adapted", "AdapterPart", "adapter_part", "fuse_adapter"]


@dataclass(frozen=True, slots=True)
class Adapted:
    """The model's tensors, an adapter fused into them if there was one; and what to say."""

    tensors: Mapping[str, Recipe]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPart:
    """An adapter as a directory that PEFT loads: its tensors and its small files."""

    tensors: Sequence[Converted]
    files: Mapping[str, bytes]


def fuse_adapter(checkpoint: Checkpoint, options: MergeOptions) -> Adapted:
    """Fuse a checkpoint's adapter; without one, return its tensors as they are.

    Raises:
        ConversionError: it cannot be fused, or not all of it.
        UsageError: `--lora both` was asked for, and there is no adapter.
    """
    split = _split(checkpoint)
    if not split.pairs:
        if options.lora == "both":
            raise _no_adapter(checkpoint, options)
        return Adapted({**split.base, **split.saved}, ())
    base: dict[str, Recipe] | None = None
    if split.adapter_only and checkpoint.base is not None:
        base = {name: take(entry) for name, entry in checkpoint.base.tensors.items()}
        if not all(_has_weight(path, base) for path in split.pairs):
            base = training_names(base, checkpoint.config)
    config = read_adapter_config(checkpoint.location)
    fused = fuse(split, config, options.lora_alpha, base)
    note = f"{fused.pairs_used} LoRA pairs were fused into the weights"
    return Adapted(fused.tensors, (note, *fused.notes))


def adapter_part(checkpoint: Checkpoint, options: MergeOptions) -> AdapterPart:
    """Return a checkpoint's adapter as a directory that PEFT loads; its dtypes stay.

    Raises:
        UsageError: there is no adapter.
        ConversionError: what PEFT must know of it is not known.
    """
    split = _split(checkpoint)
    if not split.pairs:
        raise _no_adapter(checkpoint, options)
    if options.lora == "adapter":
        _refuse_unused(options)
    tensors = finish(adapter_tensors(split), Precision())
    config = read_adapter_config(checkpoint.location)
    fields = None if checkpoint.config is None else checkpoint.config.fields
    text = adapter_config_json(split, config, options.lora_alpha, fields)
    return AdapterPart(tensors, {ADAPTER_CONFIG_NAME: text})


def _refuse_unused(options: MergeOptions) -> None:
    """Refuse options that an adapter by itself cannot follow, rather than ignore them."""
    unused = {
        "dtype": options.dtype != "keep",
        "keep-fp32": options.keep_fp32 is not None,
        "include": options.include is not None,
        "exclude": options.exclude is not None,
        "max-shard-size": options.max_shard_size is not None,
    }
    names = [name for name, is_given in unused.items() if is_given]
    if names:
        raise UsageError(
            f"--lora adapter writes the adapter as it is: --{names[0]} does not apply",
            hint="leave it out, or write the fused model",
        )


def _has_weight(path: str, tensors: Mapping[str, Recipe]) -> bool:
    """Tell whether a module, or a parameter, of this name is among some tensors."""
    return path in tensors or f"{path}.weight" in tensors


def _split(checkpoint: Checkpoint) -> Split:
    entries = checkpoint.catalog.tensors.items()
    return split_adapter({name: take(entry) for name, entry in entries})


def _no_adapter(checkpoint: Checkpoint, options: MergeOptions) -> UsageError:
    where = checkpoint.location.weights_dir
    return UsageError(f"--lora {options.lora}: {where} has no LoRA adapter")
