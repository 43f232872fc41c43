"""Find the weight that each pair of a LoRA adapter updates, by module and by shape.

A Linear's weight is (out, in), like the update b @ a. GPT-2's Conv1D stores (in, out), an embedding
(count, width): their updates are transposed. The weight of experts in one parameter is (experts,
out, in), or (experts, in, out) in models such as gpt-oss; each expert has its own ranks.
Source: Linear, Embedding and ParamWrapper in peft/tuners/lora/layer.py (0.21).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from unshard.convert.heads import is_head
from unshard.convert.lora.names import LoraPair
from unshard.convert.recipes import Recipe, Take, dtype_of, shape_of
from unshard.errors import ConversionError, raise_all
from unshard.read.beside.adapter_config import AdapterConfig

_MOST_PAIRS, _MOST_WEIGHTS = 4, 8
# Transformers' models with Conv1D, and its modules there. Other families have Linear modules with
# these names (gpt_bigcode, starcoder2).
_OF_CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
_CONV1D = (["c_attn"], ["q_attn"], ["c_fc"], ["c_proj"])


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A pair and its weight.

    Attributes:
        pair: the pair.
        weight: name of the weight.
        experts: number of experts in the weight; 1 for a matrix.
        is_stacked: whether the weight is (experts, …).
        is_turned: whether the weight is stored as (in, out).
    """

    pair: LoraPair
    weight: str
    experts: int
    is_stacked: bool
    is_turned: bool

    @property
    def rank(self) -> int:
        """The pair's rank per expert."""
        return shape_of(self.pair.a)[0] // self.experts

    def target(self, config: AdapterConfig) -> str:
        """Return the name that PEFT matches its patterns against: a module or bare parameter."""
        bare = config.target_parameters
        is_bare = any(f".{self.weight}".endswith(f".{name}") for name in bare)
        return self.weight if is_bare else self.pair.module


def find_weights(
    pairs: Mapping[str, LoraPair],
    weights: Mapping[str, Recipe],
    config: AdapterConfig,
    types: Collection[str] = (),
) -> list[AdaptedWeight]:
    """Return each pair with its weight, in the order of the pairs; `types` are the model's types.

    Raises:
        ConversionError: a pair's weight is missing, has another shape, is quantised, is one of
            several candidates, or may be stored as (out, in) or (in, out).
    """
    problems: list[ConversionError] = []
    by_path: dict[str, list[AdaptedWeight]] = {}
    for group, candidates in _groups(pairs, weights):
        try:
            by_path |= _choices(group, candidates, weights)
        except ConversionError as error:
            problems.append(error)
    raise_all(ConversionError, f"not all of {len(pairs)} LoRA pairs have a weight", problems)
    usual = {
        like: _usual_turn(by_path.values(), weights, config, types, like_conv1d=like)
        for like in (False, True)
    }
    adapted: list[AdaptedWeight] = []
    for path in pairs:
        choices = by_path[path]
        name = choices[0].weight
        try:
            turn = not is_head(name) and usual[_is_like_conv1d(name)]
            adapted.append(_only(choices, usually_turned=turn))
        except ConversionError as error:
            problems.append(error)
    raise_all(ConversionError, "LoRA pairs with an ambiguous weight", problems)
    return adapted


def _groups(
    pairs: Mapping[str, LoraPair], weights: Mapping[str, Recipe]
) -> Iterator[tuple[list[LoraPair], list[str]]]:
    """Yield the pairs of each module, with the names of the weights that they may update."""
    by_module: dict[str, list[LoraPair]] = {}
    for pair in pairs.values():
        by_module.setdefault(pair.module, []).append(pair)
    candidates: dict[str, list[str]] = {}
    for name, recipe in weights.items():
        module = name.rpartition(".")[0]
        if module in by_module and len(shape_of(recipe)) > 1:
            candidates.setdefault(module, []).append(name)
    for module, group in by_module.items():
        usual = f"{module}.weight"
        names = candidates.get(module, [])
        yield group, [usual] if len(group) == 1 and usual in names else names


def _choices(
    group: Sequence[LoraPair], candidates: Sequence[str], weights: Mapping[str, Recipe]
) -> dict[str, list[AdaptedWeight]]:
    """Return all ways to assign a module's pairs to its weights, each weight at most once.

    All weights of a module have the same orientation.
    """
    module = group[0].module
    if not candidates:
        raise ConversionError(
            f"the weight of the LoRA pair {module} is missing",
            expected=f"{module}.weight",
            found="no weight in this module",
            hint="the names of the adapter and of the model must agree",
        )
    _refuse_odd(group, candidates, weights)
    if len(group) > _MOST_PAIRS or len(candidates) > _MOST_WEIGHTS:
        raise ConversionError(
            f"module {module} has {len(group)} LoRA pairs and {len(candidates)} weights",
            expected=f"at most {_MOST_PAIRS} and {_MOST_WEIGHTS}, so that they can be matched",
        )
    # The limits bound the work for a hostile checkpoint: at most 2 * 8 * 7 * 6 * 5 assignments.
    ways = [
        fitted
        for is_turned in (False, True)
        for names in permutations(candidates, len(group))
        if (fitted := _fitted(group, names, weights, is_turned=is_turned)) is not None
    ]
    if not ways:
        raise _misfit(group, candidates, weights)
    return {pair.path: [way[at] for way in ways] for at, pair in enumerate(group)}


def _fitted(
    group: Sequence[LoraPair],
    names: Sequence[str],
    weights: Mapping[str, Recipe],
    *,
    is_turned: bool,
) -> list[AdaptedWeight] | None:
    """Return the pairs with these weights, or None if shapes do not fit."""
    result = []
    for pair, name in zip(group, names, strict=True):
        (ranks, inputs), (outputs, _) = shape_of(pair.a), shape_of(pair.b)
        *stack, rows, columns = shape_of(weights[name])
        experts = stack[0] if stack else 1
        wanted = (inputs, outputs) if is_turned else (outputs, inputs)
        if (rows, columns) != wanted or len(stack) > 1 or ranks % max(experts, 1) or not experts:
            return None
        is_joined = stack and not isinstance(weights[name], Take)  # experts: (out, in) each
        if (pair.is_embedding and (stack or not is_turned)) or (is_joined and is_turned):
            return None
        result.append(AdaptedWeight(pair, name, experts, bool(stack), is_turned))
    return result


def _usual_turn(
    choices: Collection[Sequence[AdaptedWeight]],
    weights: Mapping[str, Recipe],
    config: AdapterConfig,
    types: Collection[str],
    *,
    like_conv1d: bool,
) -> bool | None:
    """Return whether matrices of modules with or without Conv1D's names are stored as (in, out).

    None if it is unclear. Matrices that are not square decide, by their pairs and their biases;
    heads and embeddings do not count. fan_in_fan_out comes last, because PEFT changes it from layer
    to layer and saves the last value: false proves nothing about a Conv1D.
    """
    turns = {
        ways[0].is_turned
        for ways in choices
        if not ways[0].is_stacked
        and not ways[0].pair.is_embedding
        and len({way.is_turned for way in ways}) == 1
        and not is_head(ways[0].weight)
        and _is_like_conv1d(ways[0].weight) is like_conv1d
    }
    for name, weight in weights.items():
        bias = weights.get(f"{name.removesuffix('.weight')}.bias")
        if bias is None or is_head(name) or _is_like_conv1d(name) is not like_conv1d:
            continue
        sizes = shape_of(weight)
        if len(sizes) == 2 and sizes[0] != sizes[1] and shape_of(bias) in {sizes[:1], sizes[1:]}:
            turns.add(shape_of(bias) == sizes[1:])
    if turns:
        return turns.pop() if len(turns) == 1 else None
    is_of_conv1d = not _OF_CONV1D.isdisjoint(types)
    if like_conv1d and is_of_conv1d:
        return True
    if config.fan_in_fan_out:
        if not like_conv1d and types and not is_of_conv1d:
            return False  # PEFT resets it for a Linear, and the family has no other modules
        is_mixed = len({_is_like_conv1d(ways[0].weight) for ways in choices}) > 1
        return None if is_mixed else True
    return None if like_conv1d else False


def _is_like_conv1d(weight: str) -> bool:
    """Return whether a weight's module has the name of a Conv1D module of transformers."""
    return weight.split(".")[-2:-1] in _CONV1D


def _only(choices: Sequence[AdaptedWeight], *, usually_turned: bool | None) -> AdaptedWeight:
    """Return the only weight that fits a pair, with the usual orientation for a square matrix."""
    fits = {(choice.weight, choice.is_turned): choice for choice in choices}
    first = choices[0]
    if not first.is_stacked and len({weight for weight, _ in fits}) == 1 and len(fits) > 1:
        fits = {key: choice for key, choice in fits.items() if choice.is_turned is usually_turned}
    if len(fits) == 1:
        return next(iter(fits.values()))
    names = " or ".join(dict.fromkeys(weight for weight, _ in fits)) or first.weight
    both = len({turn for _, turn in fits}) != 1
    raise ConversionError(
        f"the LoRA pair {first.pair.path} may belong to {names}"
        + (", stored as (out, in) or as (in, out)" if both else ""),
        found=f"A {list(shape_of(first.pair.a))}, B {list(shape_of(first.pair.b))}",
        hint="merge the adapter into the model with peft",
    )


def _refuse_odd(
    group: Sequence[LoraPair], candidates: Sequence[str], weights: Mapping[str, Recipe]
) -> None:
    """Refuse pairs that are not floating point matrices or do not fit, and quantised weights."""
    for pair in group:
        for recipe in (pair.a, pair.b):
            if len(shape_of(recipe)) != 2 or not dtype_of(recipe).castable:
                raise ConversionError(
                    f"the LoRA pair {pair.path} is not a pair of matrices (a convolution's?)",
                    expected="A (rank, in) and B (out, rank), floating point",
                    found=f"{dtype_of(recipe)} {list(shape_of(recipe))}",
                    hint="merge the adapter into the model with peft",
                )
        ranks, of_b = shape_of(pair.a)[0], shape_of(pair.b)[1]
        if ranks != of_b or ranks == 0:
            raise ConversionError(
                f"the matrices of the LoRA pair {pair.path} do not fit each other",
                expected="A (rank, in) and B (out, rank)",
                found=f"A {list(shape_of(pair.a))}, B {list(shape_of(pair.b))}",
            )
    for name in candidates:
        if not dtype_of(weights[name]).castable:
            raise _quantised(name, weights)


def _misfit(
    group: Sequence[LoraPair], candidates: Sequence[str], weights: Mapping[str, Recipe]
) -> ConversionError:
    """Return the error for shapes that do not fit; bitsandbytes packs 4-bit weights as (n, 1)."""
    for name in candidates:
        packed = shape_of(weights[name])[-1] == 1
        if packed or any(other.startswith(f"{name}.") for other in weights):
            return _quantised(name, weights)
    pairs = ", ".join(f"A {list(shape_of(p.a))} with B {list(shape_of(p.b))}" for p in group)
    found = ", ".join(f"{name} {list(shape_of(weights[name]))}" for name in candidates)
    return ConversionError(
        f"the LoRA pair {group[0].path} does not fit its weight",
        expected=f"a weight for {pairs}",
        found=found,
    )


def _quantised(name: str, weights: Mapping[str, Recipe]) -> ConversionError:
    return ConversionError(
        f"tensor {name}: is quantised, and LoRA cannot be fused into it",
        expected="floating point of 16 bits or more",
        found=f"{dtype_of(weights[name])}",
        hint="write the adapter by itself (⟦+--lora adapter⟧), and use it with the model in full "
        "precision; to dequantise a base in block FP8, merge it with ⟦--dtype bfloat16⟧",
    )
