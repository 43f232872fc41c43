"""Reads the state of the optimizer that was saved with a model: one entrance for all formats.

The model must have been read before: its names, order, shapes and placements say what the state
belongs to, or whether what the files say of that is true.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from unshard.containers.torch_files.writer import Plain
from unshard.errors import CorruptError, NotMergeableError, raise_all
from unshard.noted import Noted
from unshard.read.format import ReadOptions, shortened
from unshard.read.open import Checkpoint, check_coverage
from unshard.read.optimizer.fused import without_fused
from unshard.read.optimizer.matching import Form, Parameter, match_by_order
from unshard.read.optimizer_state import (
    LIKE_PARAMETER,
    Group,
    Key,
    OptimizerState,
    ParamGroup,
    SavedState,
    flat_name,
    flat_parameters,
    joined_groups,
    numbers_of,
    split_name,
)
from unshard.read.wrapper_names import names_without_wrappers, without_wrapper_module
from unshard.showing import counted
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.tensors.dtypes import DTypeKind

_OPTIMIZER = re.compile(r"optim(izer)?([._].*)?|.*_optim_states\.pt")
_ADAPTER = re.compile(r"\.modules_to_save\.[^.]+(?=\.)|(\.\w+)\.[^.]+(\.weight|\.bias)?$")
_OF_PEFT = "base_model."  # begins the names in a model of any of its methods


def find_optimizer(
    checkpoint: Checkpoint, options: ReadOptions, known: Mapping[str, int] = MappingProxyType({})
) -> OptimizerState | None:
    """Return the state of a checkpoint's optimizer; None if there is none that can be read.

    `known` are the numbers of the parameters, where the files are known to have these.

    Raises:
        CheckpointError: it cannot be read; see `read_optimizer`.
    """
    if checkpoint.location.weights != "model":
        return None
    found = _saved(checkpoint, options)
    if found is None:
        return None
    model = checkpoint.catalog
    found = without_fused(found, model, checkpoint.config)
    numbered: dict[Key, str] = {number: name for name, number in known.items()}
    names = Noted(numbered) if numbered else _names(found, model)
    state = _named(found, names.value, model)
    state = replace(state, names=", ".join(names.notes) or "recorded", steps=steps_of(state))
    _check_shapes(state, model)
    check_coverage(state.catalog)
    return state


def find_kept(checkpoint: Checkpoint, options: ReadOptions) -> OptimizerState | None:
    """Return the state by the keys that the files have; None if there is none.

    It is for what keeps them. Which parameter a number is need not be known then, so frozen
    parameters, adapters and groups in any order are allowed.

    Raises:
        CheckpointError: it cannot be read; or it is not the model's: it has other names, or more
            moments of a shape and placements than the model has parameters.
    """
    found = _saved(checkpoint, options)
    if found is None:
        return None
    if not all(isinstance(key, int) for params, _ in found.groups for key in params):
        return _kept_names(checkpoint, options, found)
    _check_listed(found)
    _refuse_flat(found, checkpoint.catalog)
    _check_forms(found, checkpoint.catalog)
    catalog = replace(found.catalog, roots=checkpoint.catalog.roots)
    check_coverage(catalog)
    numbers = {str(key): int(key) for params, _ in found.groups for key in params}
    groups = tuple(ParamGroup(tuple(map(str, params)), own) for params, own in found.groups)
    values = {str(key): fields for key, fields in found.values.items()}
    return OptimizerState(catalog, groups, values, {}, "numbers", numbers, found.notes)


def _kept_names(
    checkpoint: Checkpoint, options: ReadOptions, found: SavedState
) -> OptimizerState | None:
    """Return a state that has names, which are written again."""
    every = (*(key for params, _ in found.groups for key in params), *found.keys)
    others = [str(key) for key in every if key not in checkpoint.catalog.tensors]
    if others:
        raise NotMergeableError(
            f"{found.where}: has its parameters by other names than the model: {others[0]}",
            hint="give --to FORMAT, which writes the names of the model",
        )
    state = find_optimizer(checkpoint, options)
    return None if state is None else replace(state, notes=found.notes)  # no group is concluded


def _saved(checkpoint: Checkpoint, options: ReadOptions) -> SavedState | None:
    """Return what the optimizer's own files say; None without any."""
    location = checkpoint.location
    return location.format.optimizer(location, checkpoint.catalog.world_size, options)


def steps_of(state: OptimizerState) -> dict[str, float]:
    """Return how many steps each parameter was trained; read from files of tensors.

    Of compressed tensors nothing can be read, and nothing is returned.
    """
    tensors = state.catalog.tensors.items()
    entries = {split_name(name)[0]: one for name, one in tensors if split_name(name)[1] == "step"}
    steps = numbers_of(entries)
    for name, fields in state.values.items():
        step = fields.get("step")
        if isinstance(step, int | float):
            steps[name] = step
    return steps


def read_optimizer(checkpoint: Checkpoint, options: ReadOptions) -> OptimizerState:
    """Return the state of a checkpoint's optimizer.

    Raises:
        NotMergeableError: there is none; it cannot be known which parameter some state belongs to;
            or it does not fit the model.
        CheckpointError: a file is missing or damaged, or ranks disagree.
    """
    location = checkpoint.location
    state = find_optimizer(checkpoint, options)
    if state is not None:
        return state
    raise NotMergeableError(
        f"{location.weights_dir}: no state of an optimizer that can be read was saved with it",
        expected="that of FSDP rank files, torch DCP or DeepSpeed ZeRO, next to the model's files",
        found=shortened(unread_files(checkpoint), 5) or "none",
        hint="merge the model alone, or take a checkpoint that was saved with its optimizer",
    )


def unread_files(checkpoint: Checkpoint) -> list[str]:
    """Return the names of what may be the state of an optimizer in a form that is not read."""
    location = checkpoint.location
    folders = [one for one in dict.fromkeys((*location.roots, location.step_dir)) if one.is_dir()]
    names = sorted({path.name for folder in folders for path in folder.iterdir()})
    return [name for name in names if _OPTIMIZER.match(name)]


def _names(found: SavedState, model: Catalog) -> Noted[dict[Key, str]]:
    """Return the name of every parameter; the note says how it is known if no file records it."""
    groups = found.groups
    every = [key for params, _ in groups for key in params]
    if not any(isinstance(key, int) for key in (*every, *found.keys)):
        return Noted(_recorded([str(key) for key in (every or found.keys)], model))
    recorded = [values.get("param_names") for _, values in groups]
    if groups and all(isinstance(names, list) for names in recorded):
        listed = [str(name) for names in recorded if isinstance(names, list) for name in names]
        if len(listed) == len(every):
            known = _recorded(listed, model)
            return Noted({key: known[name] for key, name in zip(every, listed, strict=True)})
    _check_listed(found)
    _refuse_flat(found, model)
    return Noted(_by_order(found, model), ("by order",))


def _check_listed(found: SavedState) -> None:
    """Raise if a parameter with state is in no group, or one has a name and others numbers."""
    every = [key for params, _ in found.groups for key in params]
    unknown = (found.keys.keys() | found.values.keys()) - set(every)
    if unknown or not all(isinstance(key, int) for key in every):
        raise CorruptError(
            f"{found.where}: outside all groups: {counted(len(unknown), 'parameter')} with state",
            found=", ".join(sorted(map(str, unknown))[:5]),
        )


def _refuse_flat(found: SavedState, model: Catalog) -> None:
    """Refuse the flat parameters of FSDP1 on one rank: fewer vectors than parameters."""
    parameters, forms = _parameters(model), _forms(found)
    have = {one.form for one in parameters}
    vectors = [one for one in forms.values() if len(one[0]) == 1 and one[1] is None]
    if vectors and len(vectors) == len(forms) < len(parameters) and not have.issuperset(vectors):
        raise flat_parameters(found.where, f"{len(vectors)} plain vectors")


def _forms(found: SavedState) -> dict[int, Form]:
    """Return shape and placements of the parameters that have moments like them."""
    forms: dict[int, Form] = {}
    for parameter, keys in found.keys.items():
        like = [key for key in keys if key in LIKE_PARAMETER]
        entries = [found.catalog.tensors[flat_name(parameter, key)] for key in like]
        shaped = [_form(entry) for entry in entries if entry.shape or "step" not in keys]
        if len(set(shaped)) > 1:
            raise CorruptError(
                f"{found.where}: moments of parameter {parameter} have several shapes"
            )
        if shaped:
            forms[int(parameter)] = shaped[0]
    return forms


def _by_order(found: SavedState, model: Catalog) -> dict[Key, str]:
    """Return the name of every number by the order of the model's parameters."""
    forms = _forms(found)
    groups = [[int(key) for key in params] for params, _ in found.groups]
    given = _parameters(model)
    sharded = [one for one in given if one.form[1] is not None]
    if sharded and all(form[1] is not None for form in forms.values()):
        given = sharded  # the others are buffers
    if sum(map(len, groups)) > len(given):  # of an adapter only what is trained was saved
        groups = [[key for key in keys if key in found.keys] for keys in groups]
    groups = [keys for keys in groups if keys]
    matched = match_by_order(found.where, groups, forms, given) if groups else {}
    return dict(matched.items())


def _check_forms(found: SavedState, model: Catalog) -> None:
    """Raise if there are more moments of a shape and placements than the model has parameters."""
    counts = Counter(one.form for one in _parameters(model))
    for form, count in Counter(_forms(found).values()).items():
        if count > counts[form]:
            where = "on no mesh" if form[1] is None else f"({', '.join(map(str, form[1]))})"
            raise NotMergeableError(
                f"{found.where}: the optimizer's state does not fit the model",
                expected=f"at most {counts[form]} parameters of shape {list(form[0])}, placed "
                f"{where}, as the model has",
                found=f"moments of {count}",
                hint="are the optimizer and the model of the same checkpoint?",
            )


def _form(entry: TensorEntry) -> Form:
    return entry.shape, None if entry.sharding is None else entry.sharding.placements


def _parameters(model: Catalog) -> list[Parameter]:
    """Return what may be a parameter, in order: of tied weights, stored once, the first."""
    found: dict[tuple[int, int, int] | str, Parameter] = {}
    for name, entry in model.tensors.items():
        if entry.dtype.kind is DTypeKind.FLOAT:
            found.setdefault(entry.place or name, Parameter(name, _form(entry)))
    return list(found.values())


def _recorded(names: Sequence[str], model: Catalog) -> dict[Key, str]:
    """Return the model's name of every recorded one."""
    found = names_without_wrappers(names)
    if not all(name in model.tensors for name in found.values()):
        shorter = without_wrapper_module(found)
        if all(name in model.tensors for name in shorter.values()):
            found = shorter
    bare = {key: _without_adapter(name, model) for key, name in found.items()}
    if len({*bare.values()}) == len(bare):  # else several adapters were trained
        found = bare
    lost = [name for name in found.values() if name not in model.tensors]
    if lost:
        raise NotMergeableError(
            f"{model.roots[0]}: the optimizer has {counted(len(lost), 'parameter')} that the model "
            f"lacks: {lost[0]}",
            expected=f"names such as {next(iter(model.tensors))}",
            hint="are the optimizer and the model of the same checkpoint?",
        )
    return dict(found.items())


def _without_adapter(name: str, model: Catalog) -> str:
    """Return the name under which PEFT saves a parameter: without that of its adapter."""
    if name in model.tensors or not name.startswith(_OF_PEFT):
        return name
    forms = (*(_ADAPTER.sub(kept, name) for kept in (r"\1\2", r"\1")), name.rpartition(".")[0])
    return next(filter(model.tensors.__contains__, forms), name)


def _named(found: SavedState, names: Mapping[Key, str], model: Catalog) -> OptimizerState:
    """Return the state under the names of the parameters."""
    order = {name: at for at, name in enumerate(model.tensors)}
    keys = sorted(found.keys.items(), key=lambda one: order[names[one[0]]])
    tensors: dict[str, TensorEntry] = {}
    for parameter, own in keys:
        for key in own:
            name = flat_name(names[parameter], key)
            stored = flat_name(parameter, key)
            tensors[name] = replace(found.catalog.tensors[stored], fqn=name)
    values = {names[key]: fields for key, fields in found.values.items() if key in names}
    catalog = replace(found.catalog, tensors=tensors, roots=model.roots, format=model.format)
    groups, notes = found.groups, found.notes
    if found.flattened:
        groups = joined_groups(groups, {key: order[name] for key, name in names.items()})
        notes = (*notes, _flattened_note(found.where, len(groups)))
    numbers = {name: key for key, name in names.items() if isinstance(key, int)}
    every = tuple(_groups(groups, names))
    return OptimizerState(catalog, every, values, {}, "", numbers, notes, found.flattened)


def _flattened_note(where: str, count: int) -> str:
    """Return what a user should know of the groups of a flattened state."""
    return (
        f"{where}: the optimizer was saved flattened, without its parameter groups: where values "
        f"or the order of the model divide its parameters, they are {counted(count, 'group')}; "
        "groups with equal values that follow one another may have been several"
    )


def _groups(groups: Iterable[Group], names: Mapping[Key, str]) -> Iterable[ParamGroup]:
    for params, values in groups:
        own: dict[str, Plain] = {key: one for key, one in values.items() if key != "param_names"}
        yield ParamGroup(tuple(names[key] for key in params if key in names), own)


def _check_shapes(state: OptimizerState, model: Catalog) -> None:
    """Raise if a moment that is like its parameter has another shape."""
    problems = []
    for name, entry in state.catalog.tensors.items():
        parameter, key = split_name(name)
        expected = model.tensors[parameter].shape
        if key in LIKE_PARAMETER and entry.shape not in (expected, ()):
            problems.append(
                CorruptError(
                    f"tensor {name}: its shape {list(entry.shape)} is not that of the parameter",
                    expected=f"{list(expected)}",
                )
            )
    raise_all(CorruptError, "the optimizer's state does not fit the model", problems)
