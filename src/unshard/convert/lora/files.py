"""The contents of PEFT's and diffusers' files of an adapter: tensors, ranks and targets. Pure."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from unshard.convert.lora.fuse import check_rank, check_saved_modules, check_targets, matched
from unshard.convert.lora.names import FRONT, LoraPair, Split
from unshard.convert.lora.weights import find_weights
from unshard.convert.recipes import Recipe, shape_of
from unshard.errors import ConversionError, raise_all
from unshard.read.beside.adapter_config import AdapterConfig
from unshard.read.model_config import ModelConfig

_ATTENTION = ".in_proj_weight"  # of torch's MultiheadAttention, which PEFT adapts as a module
_PIPELINE_PARTS = (("UNet", "unet."), ("Transformer", "transformer."), ("DiT", "transformer."))
_FUSE = "fuse the adapter: ⟦+--lora fuse⟧"


def adapter_tensors(split: Split) -> dict[str, Recipe]:
    """Return all tensors of PEFT's `adapter_model`, by their names there."""
    named: dict[str, Recipe] = {}
    for path, pair in split.pairs.items():
        middle, end = ("lora_embedding_", "") if pair.is_embedding else ("lora_", ".weight")
        named[f"{FRONT}{path}.{middle}A{end}"] = pair.a
        named[f"{FRONT}{path}.{middle}B{end}"] = pair.b
    return named | {FRONT + path: recipe for path, recipe in split.saved.items()}


def pipeline_adapter(
    tensors: Mapping[str, Recipe], config: Mapping[str, object], model: ModelConfig
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Return the tensors under the names of a diffusers pipeline, and the metadata of their file.

    Pipelines load an adapter from one file, with its config in the metadata. Source:
    `save_lora_adapter` and `_load_lora_into_transformer` of diffusers 0.42.

    Args:
        tensors: the tensors of PEFT's file.
        config: the fields of PEFT's adapter_config.json, with rank and alpha for diffusers.
        model: the config of the adapted model: a UNet, or a transformer.

    Raises:
        ConversionError: modules were trained whole, which a pipeline does not load.
    """
    name = str(model.fields["_class_name"])
    part = next((prefix for key, prefix in _PIPELINE_PARTS if key in name), None)
    if part is None:
        raise ConversionError(
            f"pipelines load the adapters of transformers and UNets, but this is a {name}",
            hint=_FUSE,
        )
    if saved := config.get("modules_to_save"):
        raise ConversionError(
            "modules were trained whole next to the adapter, and diffusers does not load them",
            found=str(saved),
            hint=_FUSE,
        )
    named = {part + name.removeprefix(FRONT): recipe for name, recipe in tensors.items()}
    fields = {f"{part}{key}": value for key, value in config.items() if value is not None}
    return named, {"lora_adapter_metadata": json.dumps(fields, indent=2, sort_keys=True)}


def completed(split: Split, config: AdapterConfig, base: Collection[str] = ()) -> AdapterConfig:
    """Return an adapter's config with its targets and ranks.

    They come from the config, else from the names of the tensors and of a base: ends of names,
    whole names, or a pattern, the first of these that matches no other module.

    Raises:
        ConversionError: neither shows it; or the adapter's files would be incomplete.
    """
    check_saved_modules(split, config)
    check_targets(split, config)
    _refuse_biases(split, config)
    if config.rank and (config.target_modules or config.target_parameters):
        if not config.target_parameters:
            _check_ranks(((p.module, shape_of(p.a)[0]) for p in split.pairs.values()), config)
        return replace(
            config,
            modules_to_save=config.modules_to_save or _modules_to_save(split),
            fan_in_fan_out=bool(config.fan_in_fan_out),
            rank_pattern=_clear_ranks(split, config),
        )
    modules, parameters = _targets(split, config)
    ranks = modules | parameters
    rank = Counter(ranks.values()).most_common(1)[0][0]
    names = [*base] if split.adapter_only else [*split.base]
    others = _suffixes(_modules([*names, *split.pairs]) - modules.keys())
    targets: tuple[str, ...] | str = _ends(modules, others, parts=1) if names else (*modules,)
    # Without the model's names, a target such as "0" may match other modules, too.
    is_open = not names and any(target[0].isdecimal() for target in targets)
    if is_open or not others.isdisjoint(targets):
        targets = "|".join(map(re.escape, targets))
    return replace(
        config,
        rank=rank,
        rank_pattern=_ranks_but(rank, ranks),
        target_modules=targets,
        target_parameters=_ends(parameters, _suffixes({*names} - parameters.keys()), parts=2),
        modules_to_save=_modules_to_save(split),
        fan_in_fan_out=any(_is_turned(pair, split) for pair in split.pairs.values()),
    )


def _clear_ranks(split: Split, config: AdapterConfig) -> Mapping[str, int]:
    """Return the pattern of ranks, or the ranks by whole name if several patterns match a module.

    PEFT uses the first match, and sorts patterns when it saves.
    """
    ranks = {pair.module: shape_of(pair.a)[0] for pair in split.pairs.values()}
    if all(len({*matched(config.rank_pattern, name).values()}) < 2 for name in ranks):
        return config.rank_pattern
    return _ranks_but(config.rank, ranks)


def _ranks_but(rank: int | None, ranks: Mapping[str, int]) -> dict[str, int]:
    """Return the other ranks by patterns; ^ begins a name that is the end of another name."""
    ends = _suffixes(name.partition(".")[2] for name in ranks)
    others = {name: own for name, own in ranks.items() if own != rank}
    return {f"^{name}" if name in ends else name: own for name, own in others.items()}


def _refuse_biases(split: Split, config: AdapterConfig) -> None:
    """Refuse biases that were trained with the adapter and are among the model's own tensors."""
    bias = config.fields.get("bias") or "none"
    if bias != "none" and not split.adapter_only:
        raise ConversionError(
            f"{config.source}: biases were trained too (bias is {bias}), and an adapter written "
            "from this checkpoint would lack them",
            hint=_FUSE,
        )


def _targets(split: Split, config: AdapterConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Return the modules and the bare parameters that pairs adapt, with the ranks.

    Raises:
        ConversionError: a target is unknown, or its rank is not that of the config.
    """
    modules: dict[str, int] = {}
    parameters: dict[str, int] = {}
    bare: dict[str, LoraPair] = {}
    for path, pair in split.pairs.items():
        if split.adapter_only and "base_layer" in path.split("."):
            raise ConversionError(
                f"the LoRA pairs of {pair.module} belong to bare parameters with unknown names",
                expected="target_parameters in adapter_config.json",
                hint="put the adapter_config.json of the training run next to the checkpoint",
            )
        if split.adapter_only or f"{pair.module}.weight" in split.base:
            modules[pair.module] = shape_of(pair.a)[0]
        else:
            bare[path] = pair
    for adapted in find_weights(bare, split.base, config):
        if adapted.weight.endswith(_ATTENTION):
            modules[adapted.pair.module] = adapted.rank
        else:
            parameters[adapted.weight] = adapted.rank
    _check_ranks([*modules.items(), *parameters.items()], config)
    return modules, parameters


def _check_ranks(ranks: Iterable[tuple[str, int]], config: AdapterConfig) -> None:
    problems = []
    for name, rank in ranks:
        try:
            check_rank(name, rank, config)
        except ConversionError as error:
            problems.append(error)
    raise_all(ConversionError, "ranks of the LoRA adapter", problems)


def _modules_to_save(split: Split) -> tuple[str, ...]:
    """Return the modules that were trained whole; for adapted modules only biases are saved."""
    if split.saved_modules:
        return split.saved_modules
    adapted = {pair.module for pair in split.pairs.values()}
    owners = dict.fromkeys(path.rpartition(".")[0] for path in split.saved)
    plain = (owner.removesuffix(".base_layer") for owner in owners)
    return tuple(owner for owner in plain if owner not in adapted)


def _is_turned(pair: LoraPair, split: Split) -> bool:
    """Return whether the shapes prove that a matrix is stored as (in, out)."""
    weight = split.base.get(f"{pair.module}.weight")
    if weight is None or pair.is_embedding:
        return False
    inputs, outputs = shape_of(pair.a)[-1], shape_of(pair.b)[0]
    return inputs != outputs and shape_of(weight) == (inputs, outputs)


def list_absent(split: Split, names: Iterable[str]) -> list[str]:
    """Return the modules with pairs that are missing in a model with tensors of these names."""
    return sorted({pair.module for pair in split.pairs.values()} - _modules(names))


def _modules(names: Iterable[str]) -> set[str]:
    """Return the modules and containers of tensors with these names."""
    paths = (name.split(".") for name in names)
    return {".".join(path[:depth]) for path in paths for depth in range(1, len(path))}


def _suffixes(names: Iterable[str]) -> set[str]:
    """Return all ends of these names after a dot, and the names: PEFT's targets match them."""
    paths = (name.split(".") for name in names)
    return {".".join(path[depth:]) for path in paths for depth in range(len(path))}


def _ends(names: Iterable[str], others: set[str], *, parts: int) -> tuple[str, ...]:
    """Return the last `parts` of these names; whole names if other names have these ends, too.

    A number counts as such an end, because layers without an adapter have numbers, too.
    """
    whole = set(names)
    ends = {".".join(name.split(".")[-parts:]) for name in whole}
    is_unique = ends.isdisjoint(others) and not any(map(str.isdecimal, ends))
    return tuple(sorted(ends if is_unique else whole))
