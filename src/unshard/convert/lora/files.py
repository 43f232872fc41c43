"""What PEFT's files have of an adapter: its tensors, its ranks, what it adapts. Pure."""

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

_ATTENTION = ".in_proj_weight"  # of torch's MultiheadAttention, which PEFT adapts as a module


def adapter_tensors(split: Split) -> dict[str, Recipe]:
    """Return the adapter under the names of PEFT's files: all that `adapter_model` has."""
    named: dict[str, Recipe] = {}
    for path, pair in split.pairs.items():
        middle, end = ("lora_embedding_", "") if pair.is_embedding else ("lora_", ".weight")
        named[f"{FRONT}{path}.{middle}A{end}"] = pair.a
        named[f"{FRONT}{path}.{middle}B{end}"] = pair.b
    return named | {FRONT + path: recipe for path, recipe in split.saved.items()}


def completed(
    split: Split, config: AdapterConfig | None, base: Collection[str] = ()
) -> AdapterConfig:
    """Return an adapter's config with what it adapts, and its ranks.

    As the config states them, else by the names of the tensors, and those of a base: ends of names,
    whole names, or a pattern, whichever is the first that targets nothing else.

    Raises:
        ConversionError: neither shows it; or the adapter's files would not have all of it.
    """
    check_saved_modules(split, config)
    check_targets(split, config)
    _refuse_biases(split, config)
    if config is not None and config.rank and (config.target_modules or config.target_parameters):
        if not config.target_parameters:
            _check_ranks(((p.module, shape_of(p.a)[0]) for p in split.pairs.values()), config)
        saved = config.modules_to_save or _modules_to_save(split)
        turned = bool(config.fan_in_fan_out)
        patterns = _clear_ranks(split, config)
        return replace(config, modules_to_save=saved, fan_in_fan_out=turned, rank_pattern=patterns)
    modules, parameters = _targets(split, config)
    ranks = modules | parameters
    rank = Counter(ranks.values()).most_common(1)[0][0]
    known = [*base] if split.adapter_only else [*split.base]
    others = _suffixes(_modules([*known, *split.pairs]) - modules.keys())
    targets: tuple[str, ...] | str = _ends(modules, others, parts=1) if known else (*modules,)
    is_open = not known and any(one[0].isdecimal() for one in targets)  # may end other names
    if is_open or not others.isdisjoint(targets):
        targets = "|".join(map(re.escape, targets))
    return replace(
        config or AdapterConfig(),
        rank=rank,
        rank_pattern=_ranks_but(rank, ranks),
        target_modules=targets,
        target_parameters=_ends(parameters, _suffixes({*known} - parameters.keys()), parts=2),
        modules_to_save=_modules_to_save(split),
        fan_in_fan_out=any(_is_turned(pair, split) for pair in split.pairs.values()),
    )


def _clear_ranks(split: Split, config: AdapterConfig) -> Mapping[str, int]:
    """Return the pattern of ranks; the ranks of whole names if several patterns match one.

    PEFT takes the first, and sorts them when it saves.
    """
    ranks = {pair.module: shape_of(pair.a)[0] for pair in split.pairs.values()}
    if all(len({*matched(config.rank_pattern, name).values()}) < 2 for name in ranks):
        return config.rank_pattern
    return _ranks_but(config.rank, ranks)


def _ranks_but(rank: int | None, ranks: Mapping[str, int]) -> dict[str, int]:
    """Return the other ranks by patterns; a name that is the end of another one begins with ^."""
    ends = _suffixes(name.partition(".")[2] for name in ranks)
    others = {name: own for name, own in ranks.items() if own != rank}
    return {f"^{name}" if name in ends else name: own for name, own in others.items()}


def _refuse_biases(split: Split, config: AdapterConfig | None) -> None:
    """Refuse biases that were trained with the adapter and are among the model's own tensors."""
    bias = "none" if config is None else config.fields.get("bias") or "none"
    if config is not None and bias != "none" and not split.adapter_only:
        raise ConversionError(
            f"{config.source}: biases were trained too (bias is {bias}), and an adapter written "
            "from this checkpoint would lack them",
            hint="fuse the adapter: ⟦+--lora fuse⟧",
        )


def _targets(split: Split, config: AdapterConfig | None) -> tuple[dict[str, int], dict[str, int]]:
    """Return the modules and the bare parameters that pairs adapt, with the ranks.

    Raises:
        ConversionError: it is not known, or its rank is not that of the config.
    """
    modules: dict[str, int] = {}
    parameters: dict[str, int] = {}
    bare: dict[str, LoraPair] = {}
    for path, pair in split.pairs.items():
        if split.adapter_only and "base_layer" in path.split("."):
            raise ConversionError(
                f"the LoRA pairs of {pair.module} belong to bare parameters, and nothing states "
                "which",
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


def _check_ranks(ranks: Iterable[tuple[str, int]], config: AdapterConfig | None) -> None:
    problems = []
    for name, rank in ranks:
        try:
            check_rank(name, rank, config)
        except ConversionError as error:
            problems.append(error)
    raise_all(ConversionError, "ranks of the LoRA adapter", problems)


def _modules_to_save(split: Split) -> tuple[str, ...]:
    """Return the modules that were trained whole; of an adapted one only biases are saved."""
    if split.saved_modules:
        return split.saved_modules
    adapted = {pair.module for pair in split.pairs.values()}
    owners = dict.fromkeys(path.rpartition(".")[0] for path in split.saved)
    plain = (owner.removesuffix(".base_layer") for owner in owners)
    return tuple(owner for owner in plain if owner not in adapted)


def _is_turned(pair: LoraPair, split: Split) -> bool:
    """Return whether a matrix is certainly stored as (in, out)."""
    weight = split.base.get(f"{pair.module}.weight")
    if weight is None or pair.is_embedding:
        return False
    inputs, outputs = shape_of(pair.a)[-1], shape_of(pair.b)[0]
    return inputs != outputs and shape_of(weight) == (inputs, outputs)


def list_absent(split: Split, names: Iterable[str]) -> list[str]:
    """Return the modules with pairs that a model with tensors of these names does not have."""
    there = _modules(names)
    return sorted({pair.module for pair in split.pairs.values()} - there)


def _modules(names: Iterable[str]) -> set[str]:
    """Return the modules and containers that tensors of these names are in."""
    parts = (name.split(".") for name in names)
    return {".".join(one[:depth]) for one in parts for depth in range(1, len(one))}


def _suffixes(names: Iterable[str]) -> set[str]:
    """Return all that ends these names after a dot, and the names: PEFT would target them."""
    parts = (name.split(".") for name in names)
    return {".".join(one[depth:]) for one in parts for depth in range(len(one))}


def _ends(names: Iterable[str], others: set[str], *, parts: int) -> tuple[str, ...]:
    """Return the last `parts` of these names; whole names if those are ends of others, too.

    A number always may be: layers have numbers that no tensor of an adapter need show.
    """
    wanted = set(names)
    ends = {".".join(name.split(".")[-parts:]) for name in wanted}
    is_plain = ends.isdisjoint(others) and not any(map(str.isdecimal, ends))
    return tuple(sorted(ends if is_plain else wanted))
