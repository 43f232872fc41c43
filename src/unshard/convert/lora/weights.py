"""Find the weight that each pair of a LoRA adapter updates, by module and by shape.

A Linear's weight is (out, in), like the update b @ a. GPT-2's Conv1D stores (in, out), an embedding
(count, width): their updates are turned. The weight of experts in one parameter is (experts, out,
in), or (experts, in, out) in models such as gpt-oss; each expert has its own ranks.
Source: Linear, Embedding and ParamWrapper in peft/tuners/lora/layer.py (0.21).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from unshard.convert.lora.names import LoraPair
from unshard.convert.recipes import Recipe, dtype_of, shape_of
from unshard.errors import ConversionError, raise_all
from unshard.read.beside.adapter_config import AdapterConfig

_MOST_PAIRS, _MOST_WEIGHTS = 4, 8


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A pair and its weight.

    Attributes:
        pair: the pair.
        weight: name of the weight.
        experts: how many the weight has; 1 for a matrix.
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
        """The pair's rank, of each expert."""
        return shape_of(self.pair.a)[0] // self.experts

    def target(self, config: AdapterConfig | None) -> str:
        """Return the name that PEFT matches its patterns against: a module or bare parameter."""
        bare = () if config is None else config.target_parameters
        is_bare = any(f".{self.weight}".endswith(f".{name}") for name in bare)
        return self.weight if is_bare else self.pair.module


def find_weights(
    pairs: Mapping[str, LoraPair], weights: Mapping[str, Recipe], config: AdapterConfig | None
) -> list[AdaptedWeight]:
    """Return each pair with its weight, in the order of the pairs.

    Raises:
        ConversionError: a pair's weight is missing, has another shape, is quantised, or could be
            one of several, or could be turned or not.
    """
    problems: list[ConversionError] = []
    found: dict[str, list[AdaptedWeight]] = {}
    for group, candidates in _groups(pairs, weights):
        try:
            found |= _choices(group, candidates, weights)
        except ConversionError as error:
            problems.append(error)
    raise_all(ConversionError, f"not all of {len(pairs)} LoRA pairs have a weight", problems)
    usual = _usual_turn(found.values(), config)
    chosen: list[AdaptedWeight] = []
    for path in pairs:
        try:
            chosen.append(_only(found[path], usually_turned=usual))
        except ConversionError as error:
            problems.append(error)
    raise_all(ConversionError, "LoRA pairs whose weight is not clear", problems)
    return chosen


def _groups(
    pairs: Mapping[str, LoraPair], weights: Mapping[str, Recipe]
) -> Iterator[tuple[list[LoraPair], list[str]]]:
    """Yield the pairs of each module, with the names of the weights that they may update."""
    of_module: dict[str, list[LoraPair]] = {}
    for pair in pairs.values():
        of_module.setdefault(pair.module, []).append(pair)
    inside: dict[str, list[str]] = {}
    for name, recipe in weights.items():
        module = name.rpartition(".")[0]
        if module in of_module and len(shape_of(recipe)) > 1:
            inside.setdefault(module, []).append(name)
    for module, group in of_module.items():
        usual = f"{module}.weight"
        names = inside.get(module, [])
        yield group, [usual] if len(group) == 1 and usual in names else names


def _choices(
    group: Sequence[LoraPair], candidates: Sequence[str], weights: Mapping[str, Recipe]
) -> dict[str, list[AdaptedWeight]]:
    """Return all ways to assign a module's pairs to its weights, each weight at most once.

    Either all weights of a module are stored turned, or none is.
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
            expected=f"at most {_MOST_PAIRS} and {_MOST_WEIGHTS}, to tell which belong together",
        )
    # At most 2 * 8 * 7 * 6 * 5 ways: the limits above keep a hostile checkpoint from more.
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
        if pair.is_embedding and (stack or not is_turned):
            return None
        result.append(AdaptedWeight(pair, name, experts, bool(stack), is_turned))
    return result


def _usual_turn(
    found: Iterable[Sequence[AdaptedWeight]], config: AdapterConfig | None
) -> bool | None:
    """Return whether this model stores its matrices turned; None if only some of them.

    Matrices that are not square decide it, and only then fan_in_fan_out, because PEFT changes that
    from layer to layer and saves the last value.
    """
    turns = {
        ways[0].is_turned
        for ways in found
        if not ways[0].is_stacked
        and not ways[0].pair.is_embedding
        and len({way.is_turned for way in ways}) == 1
    }
    if len(turns) == 1:
        return turns.pop()
    if turns:
        return None
    return bool(config is not None and config.fan_in_fan_out)


def _only(ways: Sequence[AdaptedWeight], *, usually_turned: bool | None) -> AdaptedWeight:
    """Return the one way in which a pair fits; of a square matrix the usual one."""
    left = {(way.weight, way.is_turned): way for way in ways}
    one = ways[0]
    if not one.is_stacked and len({weight for weight, _ in left}) == 1 and len(left) > 1:
        left = {key: way for key, way in left.items() if way.is_turned is usually_turned}
    if len(left) == 1:
        return next(iter(left.values()))
    names = " or ".join(dict.fromkeys(weight for weight, _ in left)) or one.weight
    both = len({turn for _, turn in left}) != 1
    raise ConversionError(
        f"the LoRA pair {one.pair.path} may belong to {names}"
        + (", stored as (out, in) or as (in, out)" if both else ""),
        found=f"A {list(shape_of(one.pair.a))}, B {list(shape_of(one.pair.b))}",
        hint="merge the adapter into the model with peft",
    )


def _refuse_odd(
    group: Sequence[LoraPair], candidates: Sequence[str], weights: Mapping[str, Recipe]
) -> None:
    """Refuse what is not LoRA of matrices of floating point numbers."""
    for pair in group:
        for recipe in (pair.a, pair.b):
            if len(shape_of(recipe)) != 2 or not dtype_of(recipe).castable:
                raise ConversionError(
                    f"the LoRA pair {pair.path} is not of matrices (a convolution's?)",
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
        f"the weight {name} is quantised, and LoRA cannot be fused into it",
        expected="floating point of 16 bits or more",
        found=f"{dtype_of(weights[name])} {list(shape_of(weights[name]))}",
        hint="write the adapter by itself (--lora adapter), and put it on the model in full "
        "precision; a base in block FP8 becomes one by a merge of its own with --dtype bfloat16",
    )
