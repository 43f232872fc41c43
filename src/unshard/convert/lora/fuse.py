"""Fuse a LoRA adapter into its model: recipes of W + scale * B A, which use every pair. Pure.

The scale is never guessed. PEFT scales a pair's update by alpha / rank, or by alpha / sqrt(rank)
with rslora. Both numbers may differ by module: patterns are matched against the end of its name.
Source: LoraModel._create_and_replace, peft.utils.other.get_pattern_key (0.21).
"""

import math
import re
from collections.abc import Collection, Mapping
from itertools import count, takewhile
from typing import TypeVar, cast

from unshard.console import counted, listed
from unshard.convert.lora.names import LoraPair, Split
from unshard.convert.lora.patterns import ends_like
from unshard.convert.lora.weights import AdaptedWeight, find_weights
from unshard.convert.recipes import LowRank, Recipe, Stack, Take, pick, shape_of, transpose
from unshard.errors import ConversionError, UsageError, raise_all
from unshard.fronts import Text
from unshard.read.beside.adapter_config import AdapterConfig
from unshard.tensors.boxes import Box
from unshard.with_notes import WithNotes

_T = TypeVar("_T")

_VARIANTS = {
    "use_dora": "DoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "trainable_token_indices": "LoRA with trained tokens",
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MANY_PATTERNS = 10_000


def fuse(
    split: Split,
    config: AdapterConfig,
    alpha: float | None,
    base: Mapping[str, Recipe] | None,
    types: Collection[str] = (),
) -> WithNotes[dict[str, Recipe]]:
    """Return the model's tensors with the adapter fused into them, in the order of its weights.

    The user's `alpha` overrides that of the config. `base` has the model's weights by name, for a
    checkpoint of the adapter only. `types` are the model types of the config and nested configs.

    Raises:
        UsageError: the user's alpha is not a positive number.
        ConversionError: the adapter or a part of it cannot be fused.
    """
    _refuse_variants(config)
    check_targets(split, config)
    weights, notes = _weights(split, config, base)
    pairs = _of_single_experts(split.pairs, weights)
    adapted_weights = find_weights(pairs, weights, config, types)
    default_alpha = known_alpha(config, alpha)
    tensors, problems = dict(weights), []
    for adapted in adapted_weights:
        try:
            weight = weights[adapted.weight]
            tensors[adapted.weight] = _updated(weight, adapted, config, default_alpha)
        except ConversionError as error:
            problems.append(error)
    raise_all(ConversionError, "the LoRA adapter cannot be fused", problems)
    used = sum(isinstance(recipe, LowRank) for recipe in tensors.values())
    if used != len(pairs):  # two pairs of one weight: the second has replaced the first
        raise ConversionError(
            "several LoRA pairs update the same weight",
            expected=f"{len(pairs)} pairs used",
            found=f"{used}",
        )
    if alpha is not None and config.alpha not in {None, alpha}:
        notes += (Text(f"⟦--lora-alpha {alpha:g}⟧ replaces {config.alpha:g} in {config.source}"),)
    notes += tuple(
        f"the adapter is fused into {adapted.weight}, but not into output weights that were tied "
        "to it: if the model ties them (tie_word_embeddings), write them as a separate tensor"
        for adapted in adapted_weights
        if adapted.pair.is_embedding
    )
    return WithNotes(tensors, notes)


def check_targets(split: Split, config: AdapterConfig) -> None:
    """Check that `target_modules` matches a module with a LoRA pair.

    Raises:
        ConversionError: it does not.
    """
    if not config.target_modules or config.target_parameters:
        return
    targets = config.target_modules
    if isinstance(targets, str):
        names = patterns = [targets]
    else:
        names = list(targets)
        patterns = [re.escape(name.rpartition(".")[2]) for name in names]
    modules = [pair.module for pair in split.pairs.values()]
    try:
        is_match = any(ends_like(pattern, module) for pattern in patterns for module in modules)
    except ConversionError:
        return  # a pattern that `patterns` does not support
    if not is_match and patterns[0].lower() != "all-linear":
        raise ConversionError(
            f"{config.source}: target_modules has none of the modules with LoRA pairs",
            expected=modules[0],
            found=", ".join(names),
            hint="the file or the tensors belong to another run",
        )


def check_saved_modules(split: Split, config: AdapterConfig) -> None:
    """Check that a checkpoint has the modules that were trained whole.

    Raises:
        ConversionError: it does not; verl's `save_lora_only` leaves them out.
    """
    whole = config.modules_to_save
    if whole and not any(f"{module}." in path for module in whole for path in split.saved):
        raise ConversionError(
            "modules that were trained whole are not in the checkpoint",
            expected=f"{', '.join(whole)} (modules_to_save in {config.source})",
            found="the LoRA pairs only",
            hint="save the whole model, not the adapter only",
        )


def _check_biases(split: Split, config: AdapterConfig, base: Mapping[str, Recipe]) -> None:
    """Check that a checkpoint has the biases that were trained with the matrices."""
    trained = config.fields.get("bias")
    if trained not in ("all", "lora_only"):
        return
    pairs = {f"{pair.module}.bias" for pair in split.pairs.values()}
    biases = [
        name for name in base if name.endswith(".bias") and (trained == "all" or name in pairs)
    ]
    if biases and not any(name.endswith(".bias") for name in split.base):
        raise ConversionError(
            "biases that were trained are not in the checkpoint",
            expected=f"{listed(biases)} (bias in {config.source} is {trained})",
            found="the LoRA pairs only",
            hint="save the whole model, or the adapter by peft",
        )


def _refuse_variants(config: AdapterConfig) -> None:
    """Refuse adapters whose update is not scale * B A."""
    kind = config.fields.get("peft_type")
    variants = [name for key, name in _VARIANTS.items() if config.fields.get(key)]
    if kind not in {None, "LORA"}:
        variants.insert(0, str(kind))
    if config.fields.get("veomni_lora") and (config.alpha_pattern or config.rank_pattern):
        # PEFT's patterns match the end of a name, and apply to experts.
        variants.append("of VeOmni, whose patterns match any part of a name but no experts")
    if variants:
        raise ConversionError(
            f"{config.source}: the adapter is {', '.join(variants)}, which cannot be fused",
            expected="plain LoRA, or rslora",
            hint="merge the adapter into the model with peft, if it can",
        )


def _weights(
    split: Split, config: AdapterConfig, base: Mapping[str, Recipe] | None
) -> tuple[dict[str, Recipe], tuple[str, ...]]:
    """Return the weights to fuse into, and notes about them."""
    if not split.adapter_only or base is None:
        ignored = Text("the checkpoint has the model's own weights: ⟦--base⟧ is not used")
        return dict(split.base), (() if base is None else (ignored,))
    check_saved_modules(split, config)
    _check_biases(split, config, base)
    method = str(config.fields.get("init_lora_weights")).lower()
    if method.startswith(_CHANGES_BASE):
        raise ConversionError(
            f"the adapter was initialised with {method}, which changed the weights of its model: "
            "it does not fit the model of ⟦--base⟧",
            hint="save the whole model, or convert the adapter to plain LoRA with peft",
        )
    count = counted(len(split.base), "tensor")
    note = f"the checkpoint replaces {count} of the base"
    return {**base, **split.base}, ((note,) if split.base else ())


def _of_single_experts(
    pairs: Mapping[str, LoraPair], weights: Mapping[str, Recipe]
) -> Mapping[str, LoraPair]:
    """Replace a pair of all experts by a pair for each, if the model has a weight for each.

    VeOmni's A is (experts, rank, in), or one matrix for all. Source: veomni/lora/moe_layers.py.
    """
    single: dict[str, LoraPair] = {}
    for path, pair in pairs.items():
        block, _, name = path.rpartition(".")
        paths = (f"{block}.{number}.{name}" for number in count())
        experts = list(takewhile(lambda expert: f"{expert}.weight" in weights, paths))
        if not experts or not block.endswith(".experts"):
            single[path] = pair
            continue
        stacked = [half for half in (pair.a, pair.b) if len(shape_of(half)) == 3]
        if any(shape_of(half)[0] != len(experts) for half in stacked):
            raise ConversionError(
                f"the LoRA pairs of {path} do not fit the number of the model's experts",
                expected=counted(len(experts), "pair"),
                found=", ".join(f"{list(shape_of(half))}" for half in stacked),
            )
        for at, expert in enumerate(experts):
            a, b = (pick(half, at) if half in stacked else half for half in (pair.a, pair.b))
            single[expert] = LoraPair(expert, expert, cast("Take", a), cast("Take", b))
    return single


def _updated(
    weight: Recipe, adapted: AdaptedWeight, config: AdapterConfig, alpha: float
) -> LowRank:
    """Return weight + scale * (b @ a), with a and b divided and transposed like the weight."""
    # PEFT, up to 0.21 at least, may have added the update of the out_proj of a MultiheadAttention
    # twice, in training too (its pull request 3774 fixes that); a checkpoint does not record the
    # version that trained it.
    if adapted.weight.endswith(".in_proj_weight"):
        raise ConversionError(
            f"the LoRA pair {adapted.pair.path} belongs to a MultiheadAttention, for which some "
            "versions of PEFT add an update twice",
            hint="merge the adapter into the model with the peft that trained it",
        )
    target = adapted.target(config)
    check_rank(target, adapted.rank, config)
    scale = scale_of(target, adapted.rank, config, alpha)
    a: Recipe = adapted.pair.a
    b: Recipe = adapted.pair.b
    if adapted.is_stacked:
        a, b = _of_experts(adapted.pair, adapted.experts)
    if adapted.is_turned:
        a, b = transpose(b), transpose(a)
    return LowRank(weight, a, b, scale)


def _of_experts(pair: LoraPair, experts: int) -> tuple[Stack, Stack]:
    """Return a and b of all experts: (experts, rank, in) and (experts, out, rank).

    In A, the rows of an expert are contiguous. In B, the columns of a rank are, one per expert.
    """
    a, b = pair.a.entry, pair.b.entry
    (rows, inputs), outputs = a.shape, b.shape[0]
    rank, numbers = rows // experts, range(experts)
    of_a = [Take(a, Box((at * rank, 0), (rank, inputs))) for at in numbers]
    of_b = [Take(b, Box((0, at), (outputs, rank)), steps=(1, experts)) for at in numbers]
    return Stack(0, tuple(of_a)), Stack(0, tuple(of_b))


def known_alpha(config: AdapterConfig, alpha: float | None) -> float:
    """Return the adapter's alpha: the user's, else that of its config.

    Raises:
        UsageError: the user's alpha is not a positive number.
        ConversionError: there is neither.
    """
    if alpha is not None:
        if not math.isfinite(alpha) or alpha <= 0:
            raise UsageError(f"⟦--lora-alpha {alpha}⟧: not a positive number")
        return float(alpha)  # `int.is_integer` needs Python 3.12
    if config.alpha is not None:
        return config.alpha
    value = config.fields.get("lora_alpha")
    raise ConversionError(
        "the LoRA adapter's alpha is unknown; its updates are scaled by alpha / rank",
        expected="a positive lora_alpha",
        found=f"{config.source} has {'none' if value is None else value}"
        if config.source
        else "neither lora_train_meta.json nor adapter_config.json",
        hint="pass the alpha of the training: ⟦+--lora-alpha N⟧",
    )


def scale_of(name: str, rank: int, config: AdapterConfig, alpha: float) -> float:
    """Return the factor of a pair's update; `alpha` is used if no pattern matches the module.

    Raises:
        ConversionError: a pattern is not safe to match, or its alpha is 0.
    """
    own = _own_alpha(name, config) or alpha
    return own / math.sqrt(rank) if config.use_rslora else own / rank


def _own_alpha(name: str, config: AdapterConfig) -> float | None:
    """Return a module's alpha by alpha_pattern; None if no pattern matches."""
    alphas = matched(config.alpha_pattern, name)
    if len({*alphas.values()}) > 1:
        raise ConversionError(
            f"{config.source}: alpha_pattern has several alphas for {name}",
            expected="one",
            found=", ".join(f"{pattern}: {alpha:g}" for pattern, alpha in alphas.items()),
            hint="PEFT used one of them, and sorted them when it saved: write the alpha of each "
            "module under its whole name",
        )
    if 0 in alphas.values():
        raise ConversionError(f"{config.source}: alpha_pattern has 0 for {name}")
    return next(iter(alphas.values()), None)


def check_rank(name: str, rank: int, config: AdapterConfig) -> None:
    """Check that a pair has a rank of the config, and at most one alpha.

    Raises:
        ConversionError: it does not.
    """
    if len(config.alpha_pattern) > 1:
        _own_alpha(name, config)
    # PEFT sorts patterns when it saves. If several match, the matrices' own rank decides.
    ranks = tuple(matched(config.rank_pattern, name).values()) or (config.rank,)
    if rank not in ranks and ranks != (None,):
        raise ConversionError(
            f"the LoRA pair of {name} does not have the rank in {config.source}",
            expected=f"rank {' or '.join(map(str, dict.fromkeys(ranks)))}",
            found=f"rank {rank}",
            hint="the file or the tensors belong to another run",
        )


def matched(patterns: Mapping[str, _T], name: str) -> dict[str, _T]:
    """Return the patterns that match the end of a module's name, with their values."""
    if len(patterns) > _MANY_PATTERNS:
        raise ConversionError(
            f"rank_pattern or alpha_pattern has {len(patterns)} patterns",
            expected=f"at most {_MANY_PATTERNS}",
        )
    return {pattern: value for pattern, value in patterns.items() if ends_like(pattern, name)}
