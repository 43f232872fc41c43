"""LoRA adapters in a checkpoint: fused into the weights, or written by themselves."""

from collections.abc import Mapping, Sequence

from unshard.api.options import MergeOptions
from unshard.convert.lora.files import adapter_tensors
from unshard.convert.lora.fuse import fuse
from unshard.convert.lora.names import Split, split_adapter
from unshard.convert.names import training_names
from unshard.convert.outputs import Converted, finish
from unshard.convert.precision import Precision
from unshard.convert.recipes import Recipe, take
from unshard.errors import UsageError
from unshard.noted import Noted
from unshard.read.beside.adapter_config import read_adapter_config
from unshard.read.open import Checkpoint
from unshard.write.adapter import ADAPTER_CONFIG_NAME, adapter_config_json

__all__ = ["fuse_adapter", "separate_adapter"]


def fuse_adapter(checkpoint: Checkpoint, options: MergeOptions) -> Noted[Mapping[str, Recipe]]:
    """Return a checkpoint's tensors, its adapter fused into them.

    Raises:
        ConversionError: it cannot be fused, or not all of it.
        UsageError: `--lora both` was given, and there is no adapter.
    """
    split = _split(checkpoint)
    if not split.pairs:
        if options.lora == "both":
            raise _no_adapter(checkpoint, options)
        return Noted({**split.base, **split.saved})
    base: dict[str, Recipe] | None = None
    if split.adapter_only and checkpoint.base is not None:
        base = {name: take(entry) for name, entry in checkpoint.base.tensors.items()}
        if not all(path in base or f"{path}.weight" in base for path in split.pairs):
            base = training_names(base, checkpoint.config)
    config = read_adapter_config(checkpoint.location)
    fused = fuse(split, config, options.lora_alpha, base)
    note = f"{len(split.pairs)} LoRA pairs were fused into the weights"
    return Noted(fused.value, (note, *fused.notes))


def separate_adapter(
    checkpoint: Checkpoint, options: MergeOptions
) -> tuple[Sequence[Converted], Mapping[str, bytes]]:
    """Return an adapter as PEFT loads it: its tensors, whose dtypes stay, and its small files.

    Raises:
        UsageError: there is no adapter.
        ConversionError: PEFT needs something that neither the files nor the options say.
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
    return tensors, {ADAPTER_CONFIG_NAME: text}


def _refuse_unused(options: MergeOptions) -> None:
    """Refuse options that do not apply to an adapter by itself, rather than ignore them."""
    never = ("dtype", "keep_fp32", "include", "exclude", "max_shard_size")
    unused = [name.replace("_", "-") for name in never if name in options.chosen]
    if unused:
        raise UsageError(
            f"--lora adapter writes the adapter as it is: --{unused[0]} does not apply",
            hint="leave it out, or write the fused model",
        )


def _split(checkpoint: Checkpoint) -> Split:
    entries = checkpoint.catalog.tensors.items()
    return split_adapter({name: take(entry) for name, entry in entries})


def _no_adapter(checkpoint: Checkpoint, options: MergeOptions) -> UsageError:
    where = checkpoint.location.weights_dir
    return UsageError(f"--lora {options.lora}: {where} has no LoRA adapter")
