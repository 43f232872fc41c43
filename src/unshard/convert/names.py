"""Rename tensors from training to the hub's names, or to those of a base model.

Applies the table in `families`, checks the sizes of experts against config.json, and refuses two
tensors with the same name. Hub names stay as they are.
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
from unshard.convert.families import ADVICE, FAMILIES, VARIANTS, ExpertLayout, Experts, Rename
from unshard.convert.recipes import Recipe, shape_of, transpose
from unshard.errors import ConversionError, raise_all
from unshard.fronts import Text
from unshard.read.model_config import OF_TRANSFORMERS, ModelConfig
from unshard.with_notes import WithNotes

_NamedRecipe = tuple[str, Recipe]
_FAMILY_OF = {one: family for family in FAMILIES for one in family.model_types.split()}

Renamed = WithNotes[dict[str, Recipe]]
"""The tensors under their new names, in order."""


class _NamingRules(NamedTuple):
    """The rules for one model, from the table and config.json.

    Attributes:
        model_types: types of the config and its nested configs.
        unknown: why there are no rules, or "".
        renames: training to hub, in the order in which they are applied.
        back: hub to training.
        experts: layouts of experts.
        sizes: sizes of experts in the configs.
    """

    model_types: tuple[str, ...]
    unknown: str
    renames: tuple[Rename, ...]
    back: tuple[Rename, ...]
    experts: tuple[Experts, ...]
    sizes: tuple[Sizes, ...]


def hub_names(tensors: Mapping[str, Recipe], config: ModelConfig | None) -> Renamed:
    """Give tensors the names and the layout in which transformers saves a model.

    A tensor of stacked experts is replaced by the tensors of each expert. The names of a model type
    that is not in the table stay, with a note.

    Raises:
        ConversionError: the shapes of experts contradict the config, or two tensors get one name.
    """
    rules = _rules(config)
    pieces = ((name, _on_hub(name, recipe, rules)) for name, recipe in tensors.items())
    return _renamed(pieces, rules)


def training_names(
    tensors: Mapping[str, Recipe], config: ModelConfig | None, joined: Collection[str] = ()
) -> dict[str, Recipe]:
    """Give a model's tensors their training names, and join the experts of the modules `joined`."""
    rules = _rules(config)
    named = {_applied(name, rules.back): recipe for name, recipe in tensors.items()}
    for block, members in _blocks(named, rules).items():
        whole = join_experts(members) if block in joined else {}
        for tail, (recipe, names) in whole.items():
            if not any({*names} < {*more} for _, more in whole.values()):  # gate and up are one
                for name in names:
                    del named[name]
                named[f"{block}.{tail}"] = recipe
    return named


def names_of_base(
    tensors: Mapping[str, Recipe],
    base_names: Collection[str],
    config: ModelConfig | None,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Renamed:
    """Give tensors the names and the layout of a base model, as far as the table leads to them.

    Experts are split or joined as in the base. A tensor that matches no name of the base gets its
    name from `hub_names`. Experts that are joined on both sides are transposed where `shapes`, the
    known shapes of the base, require it.

    Raises:
        ConversionError: as by `hub_names`; or experts cannot be joined.
    """
    rules, base = _rules(config), frozenset(base_names)
    direct = {name: new for name in tensors if (new := _in_base(name, base, rules))}
    rest = {name: recipe for name, recipe in tensors.items() if name not in direct}
    joined = _joined_for_base(rest, base, rules)

    def pieces(name: str, recipe: Recipe) -> Iterable[_NamedRecipe]:
        if name in direct:
            return [(direct[name], recipe)]
        if name in joined:
            return joined[name].items()
        return _split_for_base(name, recipe, base, rules)

    renamed = _renamed(((name, pieces(name, one)) for name, one in tensors.items()), rules, base)
    return WithNotes(_turned(renamed.value, shapes, rules), renamed.notes)


def _rules(config: ModelConfig | None) -> _NamingRules:
    """Gather the rules of a model.

    Only renames of the outermost config apply at the start of a name: a nested model's names
    begin with the path of its module.
    """
    nonempty = config or ModelConfig({})
    model_types = nonempty.types
    families = [_FAMILY_OF[name] for name in model_types if name in _FAMILY_OF]
    unknown = ""
    if config is None:
        unknown = "there is no config.json, so the model family is unknown"
    elif model_types[0] not in _FAMILY_OF and config.library.name in ("", *OF_TRANSFORMERS):
        unknown = f"model type {model_types[0] or '(none)'} is unknown"
    outer = families[0].renames if model_types[0] in _FAMILY_OF else ()
    inner = (rename for family in families for rename in family.renames)
    nested = (rename for rename in inner if not rename.training.startswith("^"))
    renames = tuple(dict.fromkeys((*nested, *outer)))
    experts = tuple(dict.fromkeys(one for family in families for one in family.experts))
    return _NamingRules(
        model_types, unknown, renames, _back(renames), experts, find_sizes(nonempty.nested)
    )


def _on_hub(name: str, recipe: Recipe, rules: _NamingRules) -> Iterator[_NamedRecipe]:
    """Yield a tensor under its hub name, or the tensors of the single experts in it."""
    part = _part(name, recipe, rules)
    if part is None or part.index is not None or part.experts.layout is ExpertLayout.FUSED:
        yield _applied(name, rules.renames), recipe
        return
    for new, one in split_experts(name, recipe, part, rules.sizes):
        yield _applied(new, rules.renames), one


def _split_for_base(
    name: str, recipe: Recipe, base: frozenset[str], rules: _NamingRules
) -> Iterator[_NamedRecipe]:
    """Yield a tensor as single experts if the base has those, else as `_on_hub` does."""
    part = _part(name, recipe, rules)
    pieces = _on_hub(name, recipe, rules)
    if part is not None and part.index is None and part.experts.layout is ExpertLayout.FUSED:
        on_hub = dict(part.experts.parts)["down_proj"]
        if _in_base(f"{part.block}.0.{on_hub}.weight", base, rules):
            pieces = split_experts(name, recipe, part, rules.sizes)
    for new, one in pieces:
        yield _in_base(new, base, rules) or _applied(new, rules.renames), one


def _joined_for_base(
    tensors: Mapping[str, Recipe], base: frozenset[str], rules: _NamingRules
) -> dict[str, dict[str, Recipe]]:
    """Return the base's tensors that join several, by the first of these; the others have none."""
    joined: dict[str, dict[str, Recipe]] = {}
    for block, members in _blocks(tensors, rules).items():
        for tail, (recipe, names) in join_experts(members).items():
            if new := _in_base(f"{block}.{tail}", base, rules):
                for name in names:
                    joined.setdefault(name, {})
                joined[names[0]][new] = recipe
    return joined


def _blocks(
    tensors: Mapping[str, Recipe], rules: _NamingRules
) -> dict[str, dict[str, tuple[ExpertPart, Recipe]]]:
    """Return the tensors of experts by module, then by name."""
    blocks: dict[str, dict[str, tuple[ExpertPart, Recipe]]] = {}
    for name, recipe in tensors.items():
        part = _part(name, recipe, rules)
        if part is not None:
            blocks.setdefault(part.block, {})[name] = part, recipe
    return blocks


def _turned(
    tensors: dict[str, Recipe], shapes: Mapping[str, tuple[int, ...]], rules: _NamingRules
) -> dict[str, Recipe]:
    """Transpose joined experts if that gives them the base's shapes.

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
            f"tensor {first} is transposed in the base, but {other} is not",
            expected=f"{list(shapes[first])} in the base",
            found=str(list(shape_of(tensors[first]))),
        )
    return {name: transpose(one) if name in experts else one for name, one in tensors.items()}


def _part(name: str, recipe: Recipe, rules: _NamingRules) -> ExpertPart | None:
    # Experts are found by their training names, at any depth of a model.
    inside = [rename for rename in rules.back if not rename.training.startswith("^")]
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
    """Return the base's name of a tensor; None if no rule leads to one."""
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
    """Collect the renamed tensors; raise all problems in one error."""
    tensors: dict[str, Recipe] = {}
    sources: dict[str, str] = {}
    problems: list[ConversionError] = []
    for source, pieces in named:
        try:
            renamed = dict(pieces)
        except ConversionError as problem:
            problems.append(problem)
            continue
        for name in tensors.keys() & renamed.keys():
            message = f"tensors {sources[name]} and {source} would both be named {name}"
            problems.append(ConversionError(message))
        tensors |= renamed
        sources |= dict.fromkeys(renamed, source)
    raise_all(ConversionError, "names of the output", problems)
    return WithNotes(tensors, tuple(_notes(tensors, rules, base)))


def _notes(
    tensors: Mapping[str, Recipe], rules: _NamingRules, base: frozenset[str] | None
) -> Iterator[str]:
    if base is None and rules.unknown:
        # Without a config these names may be intended, so the note has no line to paste.
        option = "⟦+--base MODEL⟧" if any(rules.model_types) else "⟦--base MODEL⟧"
        advice = f"tensor names are kept as trained; for the names of a model on the hub: {option}"
        yield Text(f"{rules.unknown}: {advice}")
    for note in ADVICE if base is None else ():
        if not set(rules.model_types).isdisjoint(note.model_types.split()):
            is_present = any(note.present in name for name in tensors)
            if is_present and not any(note.absent in name for name in tensors):
                yield Text(note.text)
