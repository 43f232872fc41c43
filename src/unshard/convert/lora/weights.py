"""Find the weight that each pair of a LoRA adapter updates, by module and by shape.

A Linear's weight is (out, in), like the update b @ a. GPT-2's Conv1D stores (in, out), an embedding
(count, width): their updates are turned. The weight of experts in one parameter is (experts, out,
in), or (experts, in, out) in models such as gpt-oss; each expert has its own ranks.
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
# Transformers' models with Conv1D, and its modules there. Other families have Linear modules that
# are called so (gpt_bigcode, starcoder2).
_OF_CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
_CONV1D = (["c_attn"], ["q_attn"], ["c_fc"], ["c_proj"])


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
    pairs: Mapping[str, LoraPair],
    weights: Mapping[str, Recipe],
    config: AdapterConfig | None,
    types: Collection[str] = (),
) -> list[AdaptedWeight]:
    """Return each pair with its weight, in the order of the pairs; `types` are the model's.

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
    usual = {
        like: _usual_turn(found.values(), weights, config, types, like_conv1d=like)
        for like in (False, True)
    }
    chosen: list[AdaptedWeight] = []
    for path in pairs:
        ways = found[path]
        name = ways[0].weight
        try:
            turn = not is_head(name) and usual[_is_like_conv1d(name)]
            chosen.append(_only(ways, usually_turned=turn))
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
        is_joined = stack and not isinstance(weights[name], Take)  # experts: (out, in) each
        if (pair.is_embedding and (stack or not is_turned)) or (is_joined and is_turned):
            return None
        result.append(AdaptedWeight(pair, name, experts, bool(stack), is_turned))
    return result


def _usual_turn(
    found: Collection[Sequence[AdaptedWeight]],
    weights: Mapping[str, Recipe],
    config: AdapterConfig | None,
    types: Collection[str],
    *,
    like_conv1d: bool,
) -> bool | None:
    """Return whether matrices of modules with or without Conv1D's names are stored turned.

    None if that is not clear. The matrices that are not square decide it, by their pairs and their
    biases; heads and embeddings have no vote. fan_in_fan_out is the last resort, because PEFT
    changes it from layer to layer and saves the last value: false shows nothing about a Conv1D.
    """
    turns = {
        ways[0].is_turned
        for ways in found
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
    if like_conv1d and _OF_CONV1D.intersection(types):
        return True
    if config is not None and config.fan_in_fan_out:
        if not like_conv1d and types and not _OF_CONV1D.intersection(types):
            return False  # PEFT resets it for a Linear, and the family has nothing else
        is_mixed = len({_is_like_conv1d(ways[0].weight) for ways in found}) > 1
        return None if is_mixed else True
    return None if like_conv1d else False


def _is_like_conv1d(weight: str) -> bool:
    """Return whether a weight's module has a name that transformers' Conv1D modules have."""
    return weight.split(".")[-2:-1] in _CONV1D


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
        f"tensor {name}: is quantised, and LoRA cannot be fused into it",
        expected="floating point of 16 bits or more",
        found=f"{dtype_of(weights[name])}",
        hint="write the adapter by itself (⟦+--lora adapter⟧), and put it on the model in full "
        "precision; a base in block FP8 becomes one by a merge of its own with ⟦--dtype bfloat16⟧",
    )
