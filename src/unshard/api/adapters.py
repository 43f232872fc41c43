"""Fuse an adapter in or next to a checkpoint, write it separately, or refuse it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from unshard.api.options import MergeOptions
from unshard.api.sources import adapter_beside, stored_recipes
from unshard.console import counted, listed
from unshard.containers.json_file import json_object
from unshard.convert.expected.tensors import check_plain
from unshard.convert.heads import left_out_heads
from unshard.convert.lora.names import Split, split_adapter
from unshard.convert.names import training_names
from unshard.convert.outputs import ConvertedTensor, Precision, finish
from unshard.convert.recipes import Recipe
from unshard.errors import ConversionError, UnshardError, UsageError
from unshard.keywords import Lora
from unshard.read.beside.adapter_config import AdapterConfig, read_adapter_config
from unshard.read.hub_files import MODULES
from unshard.read.model_config import ModelConfig, config_at
from unshard.read.open import Checkpoint
from unshard.with_notes import WithNotes
from unshard.write.companions import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    PIPELINE_ADAPTER,
    adapter_config_json,
)


class AdapterFile(NamedTuple):
    """The file of an adapter: its name, and the metadata in its header besides the format."""

    name: str = ADAPTER_NAME
    metadata: Mapping[str, str] = MappingProxyType({})


PEFT_FILE = AdapterFile()


class SeparateAdapter(NamedTuple):
    """An adapter without its base; `files` has its config, if that is another file."""

    tensors: Sequence[ConvertedTensor]
    written: AdapterFile
    files: Mapping[str, bytes]
    notes: tuple[str, ...] = ()
    names_checked: str = "none"


def fuse_adapter(checkpoint: Checkpoint, options: MergeOptions) -> WithNotes[Mapping[str, Recipe]]:
    """Return a checkpoint's tensors, with its adapter fused unless `lora` keeps it."""
    lora = options.lora
    if lora == "keep":
        return WithNotes(stored_recipes(checkpoint.catalog.tensors))
    source = checkpoint.adapter or checkpoint
    split = split_adapter(stored_recipes(source.catalog.tensors))
    if not split.pairs:
        if options.names != "training" and _is_of_megatron(split.base):
            raise _of_megatron(checkpoint)
        if lora == "both" or checkpoint.adapter is not None:
            raise no_adapter(checkpoint, lora)
        if lora is None and (beside := adapter_beside(checkpoint)) is not None:
            raise _adapter_next_to(checkpoint, beside)
        return WithNotes({**split.base, **split.saved})
    if lora == "ignore":
        raise UsageError(
            f"⟦--lora ignore⟧: the adapter is among the weights of {checkpoint.location.place}",
            hint="⟦--lora ignore⟧ leaves out an adapter in a file next to them",
        )
    from unshard.convert.lora.fuse import fuse

    config = read_adapter_config(source.location)
    base: Mapping[str, Recipe] | None = None
    model = checkpoint.base if checkpoint.adapter is None else checkpoint.catalog
    if split.adapter_only:
        if model is None:
            raise _without_base(checkpoint, split, config, options)
        base = stored_recipes(model.tensors)
        if not all(path in base or f"{path}.weight" in base for path in split.pairs):
            modules = {pair.module for pair in split.pairs.values()}
            base = training_names(base, checkpoint.config, modules)
        base = {**base, **_own_heads(base, split, config, _config_of_model(checkpoint))}
    types = () if checkpoint.config is None else checkpoint.config.types
    fused = fuse(split, config or AdapterConfig(), options.lora_alpha, base, types)
    pairs = counted(len(split.pairs), "LoRA pair")
    note = f"{pairs} {'was' if len(split.pairs) == 1 else 'were'} fused into the weights"
    return WithNotes(fused.value, (note, *fused.notes))


def _config_of_model(checkpoint: Checkpoint) -> ModelConfig | None:
    """Return the config of the model that an adapter is fused into, not that of the output."""
    if checkpoint.base is not None:
        return checkpoint.base.companions.model or checkpoint.config
    own = checkpoint.own_config
    return (own and config_at(own, None)) or checkpoint.config


def _own_heads(
    base: Mapping[str, Recipe],
    split: Split,
    config: AdapterConfig | None,
    model: ModelConfig | None,
) -> dict[str, Recipe]:
    """Return the head that a base omits as tied, if training has untied it from the embedding.

    PEFT updates one of the two and leaves the other as it was, unless its config keeps the tie.
    """
    changed = {*split.base, *(f"{pair.module}.weight" for pair in split.pairs.values())}
    keeps = config is not None and config.fields.get("ensure_weight_tying")
    return {
        head: base[embedding]
        for head, embedding in left_out_heads(base, model).items()
        if head in changed or (embedding in changed and not keeps)
    }


def _without_base(
    checkpoint: Checkpoint, split: Split, config: AdapterConfig | None, options: MergeOptions
) -> ConversionError:
    from unshard.read.beside.base_name import advice, find_base_names

    named, give = advice(find_base_names(checkpoint.location), what="its weights are")
    hint = f"give that model: {give}; or write the adapter by itself: ⟦--lora adapter⟧"
    if options.lora_alpha is None and (config is None or config.alpha is None):
        hint = f"give that model and the adapter's alpha: {give} ⟦+--lora-alpha N⟧"
    if options.names == "training":
        named, hint = "", "keep its matrices unchanged: ⟦+--lora keep⟧"
    return ConversionError(
        f"the checkpoint has a LoRA adapter only ({counted(len(split.pairs), 'pair')}), "
        "not the model that it was trained on",
        found=named,
        hint=hint,
    )


def _adapter_next_to(checkpoint: Checkpoint, adapter: Path) -> ConversionError:
    config = adapter.with_name(ADAPTER_CONFIG_NAME)
    kind = json_object(config).get("peft_type", "LORA") if config.is_file() else "LORA"
    return ConversionError(
        f"{checkpoint.location.place}: the weights have no LoRA adapter, but {adapter} is next to "
        "them",
        hint="merge them with ⟦+--lora fuse⟧, or leave the adapter out with ⟦--lora ignore⟧"
        if kind == "LORA"
        else f"it is {kind}, which PEFT itself merges; leave it out with ⟦+--lora ignore⟧",
    )


def _is_of_megatron(names: Iterable[str]) -> bool:
    return any(".adapter.linear_" in name for name in names)


def _of_megatron(checkpoint: Checkpoint) -> ConversionError:
    # verl writes it next to `dist_ckpt`, with Megatron-Bridge.
    exported = checkpoint.location.weights_dir.with_name("huggingface") / "adapter"
    exported /= "adapter_model.safetensors"
    return ConversionError(
        f"{checkpoint.location.place} has a LoRA adapter under Megatron's names, which are not "
        "converted",
        expected="an adapter under PEFT's names",
        hint=f"training exported it for PEFT: give {exported} as the checkpoint, and for fused "
        "weights ⟦--base MODEL⟧"
        if exported.is_file()
        else "export it for PEFT by Megatron-Bridge's save_hf_adapter",
    )


def no_adapter(checkpoint: Checkpoint, lora: Lora | None) -> UnshardError:
    """Return the error for `--lora` without an adapter."""
    if _is_of_megatron(checkpoint.catalog.tensors):
        return _of_megatron(checkpoint)
    where = checkpoint.location.weights_dir
    return UsageError(f"⟦--lora {lora}⟧: {where} has no LoRA adapter")


def separate_adapter(checkpoint: Checkpoint, options: MergeOptions) -> SeparateAdapter:
    """Return an adapter as PEFT or diffusers loads it: its tensors with their dtypes, its config.

    Raises:
        UsageError: an option does not apply to an adapter.
        ConversionError: there is no adapter, or its config is unknown.
    """
    from unshard.convert.lora.files import adapter_tensors, list_absent, pipeline_adapter

    source = checkpoint.adapter or checkpoint
    split = split_adapter(stored_recipes(source.catalog.tensors))
    if not split.pairs:
        raise no_adapter(checkpoint, options.lora)
    never = ("dtype", "keep_fp32", "include", "exclude", "max_shard_size", "quantize")
    unused = [name.replace("_", "-") for name in never if name in options.chosen]
    if options.lora == "adapter" and unused:
        raise UsageError(
            f"⟦--lora adapter⟧ writes the adapter as it is: ⟦--{unused[0]}⟧ does not apply",
            hint="leave it out, or write the fused model",
        )
    named, model, base = adapter_tensors(split), checkpoint.config, checkpoint.base
    if MODULES in checkpoint.companions.files:
        raise ConversionError(
            "sentence-transformers does not load an adapter under the names of this checkpoint",
            hint="fuse the adapter: ⟦+--lora fuse⟧",
        )
    config = read_adapter_config(source.location)
    fields = None if model is None else model.fields
    text = adapter_config_json(split, config, options.lora_alpha, fields, base=base)
    files, file = {ADAPTER_CONFIG_NAME: text}, PEFT_FILE
    if model is not None and model.library.name == "diffusers":
        named, metadata = pipeline_adapter(named, json.loads(text), model)
        files, file = {}, AdapterFile(PIPELINE_ADAPTER, metadata)
    check_plain(named, (), selects=True)
    adapter = SeparateAdapter(finish(named, Precision()), file, files)
    if base is None:
        return adapter
    trained = training_names(stored_recipes(base.tensors), checkpoint.config)
    if absent := list_absent(split, [*base.files, *trained]):
        number = counted(len(absent), "module")
        note = f"{base.name} lacks {number} that the adapter adapts: {listed(absent)}"
        adapter = adapter._replace(notes=(note,))
    return adapter._replace(names_checked="base")
