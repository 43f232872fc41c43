"""Names of the output: from those of training to those of the hub, or to those of a base model.

The table of names is `families`. Here it is applied and checked: the sizes of experts against
config.json, and that no two tensors get the same name. Hub names stay as they are.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from unshard.convert.experts import (
    ExpertPart,
    Sizes,
    find_part,
    find_sizes,
    join_experts,
    split_experts,
)
from unshard.convert.families import ADVICE, FAMILIES, VARIANTS, Experts, Rename, Stored
from unshard.convert.recipes import Recipe, shape_of, transpose
from unshard.errors import ConversionError, raise_all
from unshard.fronts import Text
from unshard.noted import Noted
from unshard.read.model_config import OF_TRANSFORMERS, ModelConfig

_Shape = tuple[int, ...]
_Config = ModelConfig | None
_NamedRecipe = tuple[str, Recipe]
_FAMILY_OF = {one: family for family in FAMILIES for one in family.model_types.split()}


Renamed = Noted[dict[str, Recipe]]
"""The tensors under their new names, in order."""


class _NamingRules(NamedTuple):
    """What the table and config.json state about one model.

    Attributes:
        model_types: of the config, and of the configs inside it.
        unknown: why there are no rules, or "".
        renames: in the order in which they are applied. back: the reverse, from hub to training.
        experts: their layouts. sizes: their sizes, by the configs.
    """

    model_types: tuple[str, ...]
    unknown: str
    renames: tuple[Rename, ...]
    back: tuple[Rename, ...]
    experts: tuple[Experts, ...]
    sizes: tuple[Sizes, ...]


def hub_names(tensors: Mapping[str, Recipe], config: _Config) -> Renamed:
    """Give tensors the names and the layout in which transformers saves a model.

    Experts that training stacked come one by one, in the place of the stacked tensor. All names of
    a model type that is not in the table stay, with a note.

    Raises:
        ConversionError: the shapes of experts contradict the config, or two tensors get one name.
    """
    rules = _rules(config)
    return _renamed(((name, _on_hub(name, one, rules)) for name, one in tensors.items()), rules)


def training_names(
    tensors: Mapping[str, Recipe], config: _Config, joined: Collection[str] = ()
) -> dict[str, Recipe]:
    """Give a model's tensors their names in training; in the modules `joined`, experts are one."""
    rules = _rules(config)
    named = {_applied(name, rules.back): recipe for name, recipe in tensors.items()}
    for block, members in _blocks(named, rules).items():
        made = join_experts(members) if block in joined else {}
        for tail, (recipe, names) in made.items():
            if not any({*names} < {*more} for _, more in made.values()):  # gate and up are one
                for name in names:
                    del named[name]
                named[f"{block}.{tail}"] = recipe
    return named


def names_of_base(
    tensors: Mapping[str, Recipe],
    base_names: Collection[str],
    config: _Config,
    shapes: Mapping[str, _Shape] = MappingProxyType({}),
) -> Renamed:
    """Give tensors the names and the layout of a base model, as far as the table leads to them.

    Experts are split or joined as the base has them. A tensor that matches no name of the base is
    named as by `hub_names`. Experts that are joined on both sides are turned as the base has them,
    as far as its `shapes` are known.

    Raises:
        ConversionError: as by `hub_names`; or experts cannot be joined.
    """
    rules, base = _rules(config), frozenset(base_names)
    straight = {name: found for name in tensors if (found := _in_base(name, base, rules))}
    rest = {name: one for name, one in tensors.items() if name not in straight}
    united = _united(rest, base, rules)
    spent = {name for _, names in united.values() for name in names}
    begun: dict[str, dict[str, Recipe]] = {}
    for new, (recipe, names) in united.items():
        begun.setdefault(names[0], {})[new] = recipe

    def pieces(name: str, recipe: Recipe) -> Iterable[_NamedRecipe]:
        if name in straight:
            return [(straight[name], recipe)]
        if name in spent:
            return begun.get(name, {}).items()
        return _split_for_base(name, recipe, base, rules)

    renamed = _renamed(((name, pieces(name, one)) for name, one in tensors.items()), rules, base)
    return Noted(_turned(renamed.value, shapes, rules), renamed.notes)


def _rules(config: _Config) -> _NamingRules:
    """Gather the rules of a model; renames at a name's start only from the outermost config."""
    known = config or ModelConfig({})
    model_types = known.types
    families = [_FAMILY_OF[name] for name in model_types if name in _FAMILY_OF]
    unknown = ""
    if config is None:
        unknown = "there is no config.json, so the model family is not known"
    elif model_types[0] not in _FAMILY_OF and config.library.name in ("", *OF_TRANSFORMERS):
        unknown = f"model type {model_types[0] or '(none)'} is not known"
    outer = families[0].renames if model_types[0] in _FAMILY_OF else ()
    inner = (rename for family in families for rename in family.renames)
    nested = (rename for rename in inner if not rename.training.startswith("^"))
    renames = tuple(dict.fromkeys((*nested, *outer)))
    experts = tuple(dict.fromkeys(one for family in families for one in family.experts))
    return _NamingRules(
        model_types, unknown, renames, _back(renames), experts, find_sizes(known.nested)
    )


def _on_hub(name: str, recipe: Recipe, rules: _NamingRules) -> Iterator[_NamedRecipe]:
    """Yield a tensor under its hub name, or the tensors of the single experts in it."""
    part = _part(name, recipe, rules)
    if part is None or part.index is not None or part.experts.stored is Stored.FUSED:
        yield _applied(name, rules.renames), recipe
        return
    for new, one in split_experts(name, recipe, part, rules.sizes):
        yield _applied(new, rules.renames), one


def _split_for_base(
    name: str, recipe: Recipe, base: frozenset[str], rules: _NamingRules
) -> Iterator[_NamedRecipe]:
    """Yield a tensor as the base has it: as single experts if it does, else as on the hub."""
    part = _part(name, recipe, rules)
    pieces = _on_hub(name, recipe, rules)
    if part is not None and part.index is None and part.experts.stored is Stored.FUSED:
        on_hub = dict(part.experts.parts)["down_proj"]
        if _in_base(f"{part.block}.0.{on_hub}.weight", base, rules):
            pieces = split_experts(name, recipe, part, rules.sizes)
    for new, one in pieces:
        yield _in_base(new, base, rules) or _applied(new, rules.renames), one


def _united(
    tensors: Mapping[str, Recipe], base: frozenset[str], rules: _NamingRules
) -> dict[str, tuple[Recipe, tuple[str, ...]]]:
    """Return the base's tensors that join several, with the names of those in the checkpoint."""
    return {
        found: made
        for block, members in _blocks(tensors, rules).items()
        for tail, made in join_experts(members).items()
        if (found := _in_base(f"{block}.{tail}", base, rules))
    }


def _blocks(
    tensors: Mapping[str, Recipe], rules: _NamingRules
) -> dict[str, dict[str, tuple[ExpertPart, Recipe]]]:
    """Return the tensors of experts by the module of their layer, and by name."""
    blocks: dict[str, dict[str, tuple[ExpertPart, Recipe]]] = {}
    for name, recipe in tensors.items():
        part = _part(name, recipe, rules)
        if part is not None:
            blocks.setdefault(part.block, {})[name] = part, recipe
    return blocks


def _turned(
    tensors: dict[str, Recipe], shapes: Mapping[str, _Shape], rules: _NamingRules
) -> dict[str, Recipe]:
    """Exchange rows and columns of joined experts, if that gives them the base's shapes.

    Square matrices follow the others, which show how the base was saved.
    """
    experts = {
        name: recipe
        for name, recipe in tensors.items()
        if name in shapes and len(shapes[name]) == 3 and _part(name, recipe, rules) is not None
    }
    differ = {name for name, recipe in experts.items() if shape_of(recipe) != shapes[name]}
    turned = {name for name in differ if shape_of(transpose(experts[name])) == shapes[name]}
    if not turned or turned != differ:
        return tensors  # the same, or another model: the shapes will be compared
    square = {name for name in experts if len(set(shapes[name][1:])) == 1}
    if differ | square != set(experts):
        first, other = min(differ), min(set(experts) - differ - square)
        raise ConversionError(
            f"tensor {first} is turned in the base, and {other} is not",
            expected=f"{list(shapes[first])} in the base",
            found=str(list(shape_of(tensors[first]))),
        )
    return {name: transpose(one) if name in experts else one for name, one in tensors.items()}


def _part(name: str, recipe: Recipe, rules: _NamingRules) -> ExpertPart | None:
    # Experts are known by their names in training, wherever in a model they are.
    inside = [one for one in rules.back if not one.training.startswith("^")]
    return find_part(_applied(name, inside), shape_of(recipe), rules.experts)


def _back(renames: Sequence[Rename]) -> tuple[Rename, ...]:
    """Return the reverse renames in reverse order; the anchor stays on the left."""
    return tuple(
        Rename("^" + hub, training[1:]) if training.startswith("^") else Rename(hub, training)
        for training, hub in reversed(renames)
    )


def _applied(name: str, renames: Sequence[Rename]) -> str:
    """Replace parts of a name, one after another; its start is replaced only once."""
    started = False
    for old, new in renames:
        if not old.startswith("^"):
            name = name.replace(old, new, 1)
        elif not started and name.startswith(old[1:]):
            name, started = new + name[len(old) - 1 :], True
    return name


def _in_base(name: str, base: frozenset[str], rules: _NamingRules) -> str | None:
    """Return the base's name of a tensor; None if no rule leads there."""
    return next((form for form in _forms(name, rules) if form in base), None)


def _forms(name: str, rules: _NamingRules) -> Iterator[str]:
    """Yield the names that a tensor may have, the likeliest first."""
    forms = (name, _applied(name, rules.renames), _applied(name, rules.back))
    yield from forms
    for other in VARIANTS:
        for rename in (other, *_back([other])):
            yield from (_applied(form, [rename]) for form in forms)


def _renamed(
    named: Iterable[tuple[str, Iterable[_NamedRecipe]]],
    rules: _NamingRules,
    base: frozenset[str] | None = None,
) -> Renamed:
    """Gather the tensors; raise all problems together."""
    tensors: dict[str, Recipe] = {}
    sources: dict[str, str] = {}
    problems: list[ConversionError] = []
    for source, pieces in named:
        try:
            made = dict(pieces)
        except ConversionError as problem:
            problems.append(problem)
            continue
        for name in tensors.keys() & made.keys():
            what = f"tensors {sources[name]} and {source} would both be {name}"
            problems.append(ConversionError(what))
        tensors |= made
        sources |= dict.fromkeys(made, source)
    raise_all(ConversionError, "names of the output", problems)
    return Noted(tensors, tuple(_notes(tensors, rules, base)))


def _notes(
    tensors: Mapping[str, Recipe], rules: _NamingRules, base: frozenset[str] | None
) -> Iterator[str]:
    if base is None and rules.unknown:
        give = "⟦--base MODEL⟧"  # without a config, names are so on purpose
        give = "⟦+--base MODEL⟧" if any(rules.model_types) else give
        what = "tensor names are kept as trained; to get the names of a model on the hub"
        yield Text(f"{rules.unknown}: {what}: {give}")
    for advice in ADVICE if base is None else ():
        if not set(rules.model_types).isdisjoint(advice.model_types.split()):
            there = any(advice.present in name for name in tensors)
            if there and not any(advice.absent in name for name in tensors):
                yield Text(advice.text)
