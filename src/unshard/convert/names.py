"""Names of the output: from those of training to those of the hub, or to those of a base model.

What a family's names are stands in `families`; here they are applied, and checked: the sizes of
experts against config.json, and that no two tensors get one name. Hub names stay.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from unshard.convert.experts import (
    Part,
    Sizes,
    find_part,
    find_sizes,
    fused,
    one_by_one,
)
from unshard.convert.families import ADVICE, FAMILIES, VARIANTS, Experts, Rename, Stored
from unshard.convert.recipes import Recipe, shape_of, transposed
from unshard.errors import ConversionError, raise_all
from unshard.noted import Noted
from unshard.read.beside.model_config import ModelConfig

__all__ = ["Renamed", "hub_names", "names_of_base", "training_names"]

_Shape = tuple[int, ...]
_Config = ModelConfig | None
_Piece = tuple[str, Recipe]
_FAMILY_OF = {one: family for family in FAMILIES for one in family.model_types.split()}


Renamed = Noted[dict[str, Recipe]]
"""The tensors under their new names, in order."""


@dataclass(frozen=True, slots=True)
class _Rules:
    """What the table and config.json say of one model.

    Attributes:
        model_types: of the config, and of the configs inside it.
        unknown: why there are no rules, or "".
        renames: in the order in which they are applied.
        experts: how they are laid out. sizes: what the configs say of their sizes.
    """

    model_types: tuple[str, ...]
    unknown: str
    renames: tuple[Rename, ...]
    experts: tuple[Experts, ...]
    sizes: tuple[Sizes, ...]


def hub_names(tensors: Mapping[str, Recipe], config: _Config) -> Renamed:
    """Give tensors the names and the layout in which transformers saves a model.

    Experts that training stacked come one by one, in the place of the tensor that held them. Of a
    model type that the table does not know all names stay, and a note says so.

    Args:
        tensors: by their names in training, or on the hub.
        config: config.json.

    Raises:
        ConversionError: the shapes of experts contradict the config, or two tensors get one name.
    """
    rules = _rules(config)
    return _renamed(((name, _on_hub(name, one, rules)) for name, one in tensors.items()), rules)


def training_names(tensors: Mapping[str, Recipe], config: _Config) -> dict[str, Recipe]:
    """Give a model's tensors the names that they have in training; experts stay as they are."""
    back = _back(_rules(config).renames)
    return {_applied(name, back): recipe for name, recipe in tensors.items()}


def names_of_base(
    tensors: Mapping[str, Recipe],
    base_names: Collection[str],
    config: _Config,
    shapes: Mapping[str, _Shape] = MappingProxyType({}),
) -> Renamed:
    """Give tensors the names and the layout of a base model, wherever the table leads there.

    Experts are split or fused as the base has them. What matches no name of the base is named as
    by `hub_names`.

    Args:
        tensors: by their names in training, or on the hub.
        base_names: the names of the base's tensors.
        config: config.json.
        shapes: shapes in the base, elements, as far as they are known: experts that are fused on
            both sides are turned as the base has them.

    Raises:
        ConversionError: as by `hub_names`; or experts cannot be fused.
    """
    rules, base = _rules(config), frozenset(base_names)
    straight = {name: found for name in tensors if (found := _in_base(name, base, rules))}
    rest = {name: one for name, one in tensors.items() if name not in straight}
    united = _united(rest, base, rules)
    spent = {name for _, names in united.values() for name in names}
    begun: dict[str, dict[str, Recipe]] = {}
    for new, (recipe, names) in united.items():
        begun.setdefault(names[0], {})[new] = recipe

    def pieces(name: str, recipe: Recipe) -> Iterable[_Piece]:
        if name in straight:
            return [(straight[name], recipe)]
        if name in spent:
            return begun.get(name, {}).items()
        return _split_for_base(name, recipe, base, rules)

    renamed = _renamed(((name, pieces(name, one)) for name, one in tensors.items()), rules, base)
    return Noted(_turned(renamed.value, shapes, rules), renamed.notes)


def _rules(config: _Config) -> _Rules:
    """Gather what applies: of configs inside the config all but what is tied to a name's start."""
    known = config or ModelConfig({})
    model_types = known.types
    families = [_FAMILY_OF[name] for name in model_types if name in _FAMILY_OF]
    unknown = ""
    if config is None:
        unknown = "without a config.json their family is not known"
    elif model_types[0] not in _FAMILY_OF:
        unknown = f"model type {model_types[0] or '(none)'} is not known"
    outer = () if unknown else families[0].renames
    inner = (rename for family in families for rename in family.renames)
    nested = (rename for rename in inner if not rename.training.startswith("^"))
    renames = tuple(dict.fromkeys((*nested, *outer)))
    experts = tuple(dict.fromkeys(one for family in families for one in family.experts))
    return _Rules(model_types, unknown, renames, experts, find_sizes(known.nested))


def _on_hub(name: str, recipe: Recipe, rules: _Rules) -> Iterator[_Piece]:
    """Yield a tensor under its hub name, or the tensors of the single experts that it holds."""
    part = _part(name, recipe, rules)
    if part is None or part.index is not None or part.experts.stored is Stored.FUSED:
        yield _to_hub(name, rules), recipe
        return
    for new, one in one_by_one(name, recipe, part, rules.sizes):
        yield _to_hub(new, rules), one


def _split_for_base(
    name: str, recipe: Recipe, base: frozenset[str], rules: _Rules
) -> Iterator[_Piece]:
    """Yield what a tensor is in the base: single experts if it has them, else as on the hub."""
    part = _part(name, recipe, rules)
    pieces = _on_hub(name, recipe, rules)
    if part is not None and part.index is None and part.experts.stored is Stored.FUSED:
        on_hub = dict(part.experts.parts)["down_proj"]
        if _in_base(f"{part.block}.0.{on_hub}.weight", base, rules):
            pieces = one_by_one(name, recipe, part, rules.sizes)
    for new, one in pieces:
        yield _in_base(new, base, rules) or _to_hub(new, rules), one


def _united(
    tensors: Mapping[str, Recipe], base: frozenset[str], rules: _Rules
) -> dict[str, tuple[Recipe, tuple[str, ...]]]:
    """Return the base's tensors that several make together, with their names in the checkpoint."""
    blocks: dict[str, dict[str, tuple[Part, Recipe]]] = {}
    for name, recipe in tensors.items():
        part = _part(name, recipe, rules)
        if part is not None:
            blocks.setdefault(part.block, {})[name] = part, recipe
    return {
        found: made
        for block, members in blocks.items()
        for tail, made in fused(members).items()
        if (found := _in_base(f"{block}.{tail}", base, rules))
    }


def _turned(
    tensors: dict[str, Recipe], shapes: Mapping[str, _Shape], rules: _Rules
) -> dict[str, Recipe]:
    """Exchange rows and columns of fused experts, if that makes them the base's.

    The base's square matrices follow the others, which tell how it was saved.
    """
    experts = {
        name: recipe
        for name, recipe in tensors.items()
        if name in shapes and len(shapes[name]) == 3 and _part(name, recipe, rules) is not None
    }
    differ = {name for name, recipe in experts.items() if shape_of(recipe) != shapes[name]}
    turned = {name for name in differ if shape_of(transposed(experts[name])) == shapes[name]}
    if not turned or turned != differ:
        return tensors  # the same, or another model: the shapes will be compared
    square = {name for name in experts if len(set(shapes[name][1:])) == 1}
    if differ | square != set(experts):
        first, other = min(differ), min(set(experts) - differ - square)
        raise ConversionError(
            f"tensor {first}: turned in the base, and {other} is not",
            expected=f"{list(shapes[first])} in the base",
            found=str(list(shape_of(tensors[first]))),
        )
    return {name: transposed(one) if name in experts else one for name, one in tensors.items()}


def _part(name: str, recipe: Recipe, rules: _Rules) -> Part | None:
    return find_part(_to_training(name, rules), shape_of(recipe), rules.experts)


def _to_hub(name: str, rules: _Rules) -> str:
    return _applied(name, [(rename.training, rename.hub) for rename in rules.renames])


def _to_training(name: str, rules: _Rules) -> str:
    """Return a hub name as it is in training: of the parts inside a name only."""
    return _applied(name, [(old, new) for old, new in _back(rules.renames) if old[0] != "^"])


def _back(renames: Sequence[Rename]) -> list[tuple[str, str]]:
    """Return renames the other way round, in reverse order; an anchor stays on the left."""
    return [
        ("^" + one.hub, one.training[1:])
        if one.training.startswith("^")
        else (one.hub, one.training)
        for one in reversed(renames)
    ]


def _applied(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Replace parts of a name, one after another; it has one start, which is replaced once."""
    started = False
    for old, new in pairs:
        if not old.startswith("^"):
            name = name.replace(old, new, 1)
        elif not started and name.startswith(old[1:]):
            name, started = new + name[len(old) - 1 :], True
    return name


def _in_base(name: str, base: frozenset[str], rules: _Rules) -> str | None:
    """Return the base's name of a tensor; None if no rule leads there."""
    return next((form for form in _forms(name, rules) if form in base), None)


def _forms(name: str, rules: _Rules) -> Iterator[str]:
    """Yield the names that a tensor may have: likeliest first."""
    forms = (name, _to_hub(name, rules), _applied(name, _back(rules.renames)))
    yield from forms
    for other in VARIANTS:
        for pair in ((other.training, other.hub), *_back([other])):
            yield from (_applied(form, [pair]) for form in forms)


def _renamed(
    named: Iterable[tuple[str, Iterable[_Piece]]],
    rules: _Rules,
    base: frozenset[str] | None = None,
) -> Renamed:
    """Gather the tensors; all problems together."""
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
            what = f"tensors {sources[name]} and {source}: both would be {name}"
            problems.append(ConversionError(what))
        tensors |= made
        sources |= dict.fromkeys(made, source)
    raise_all(ConversionError, "names of the output", problems)
    return Noted(tensors, tuple(_notes(tensors, rules, base)))


def _notes(
    tensors: Mapping[str, Recipe], rules: _Rules, base: frozenset[str] | None
) -> Iterator[str]:
    if base is None and rules.unknown:
        yield (
            f"{rules.unknown}: tensor names are kept as trained; "
            "for those of a model on the hub: --base MODEL"
        )
    for advice in ADVICE if base is None else ():
        if not set(rules.model_types).isdisjoint(advice.model_types.split()):
            there = any(advice.present in name for name in tensors)
            if there and not any(advice.absent in name for name in tensors):
                yield advice.text
