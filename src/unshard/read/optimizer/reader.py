"""Reads the optimizer's state that was saved with a model, of any format.

Requires the model's catalog: its names, order, shapes and placements map and validate the state.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from unshard.console import counted
from unshard.containers.torch_files.writer import Plain
from unshard.errors import CorruptError, NotMergeableError, raise_all
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
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.tensors.dtypes import DTypeKind
from unshard.with_notes import WithNotes

_OPTIMIZER = re.compile(r"optim(izer)?([._].*)?|.*_optim_states\.pt")
_ADAPTER = re.compile(r"\.modules_to_save\.[^.]+(?=\.)|(\.\w+)\.[^.]+(\.weight|\.bias)?$")
_PEFT_PREFIX = "base_model."  # begins the names in a model of any method of PEFT


def find_optimizer(
    checkpoint: Checkpoint, options: ReadOptions, numbers: Mapping[str, int] = MappingProxyType({})
) -> OptimizerState | None:
    """Return the state of a checkpoint's optimizer; None if there is none that can be read.

    `numbers` are those of the parameters by name, if they are known from elsewhere.

    Raises:
        CheckpointError: it cannot be read; see `read_optimizer`.
    """
    if checkpoint.location.weights != "model":
        return None
    saved = _saved(checkpoint, options)
    if saved is None:
        return None
    model = checkpoint.catalog
    saved = without_fused(saved, model, checkpoint.config)
    by_number: dict[Key, str] = {number: name for name, number in numbers.items()}
    names = WithNotes(by_number) if by_number else _names(saved, model)
    state = _renamed(saved, names.value, model)
    state = replace(state, names=", ".join(names.notes) or "recorded", steps=steps_of(state))
    _check_shapes(state, model)
    check_coverage(state.catalog)
    return state


def find_kept(checkpoint: Checkpoint, options: ReadOptions) -> OptimizerState | None:
    """Return the state by the keys of its files, for a format that keeps them; None without state.

    The parameters of numbers need not be known then, so frozen parameters, adapters and groups in
    any order are allowed.

    Raises:
        CheckpointError: it cannot be read; or it is not the model's: it has other names, or more
            moments of a shape and placements than the model has parameters.
    """
    saved = _saved(checkpoint, options)
    if saved is None:
        return None
    if not all(isinstance(key, int) for params, _ in saved.groups for key in params):
        return _with_names(checkpoint, options, saved)
    _check_listed(saved)
    _refuse_flat(saved, checkpoint.catalog)
    _check_forms(saved, checkpoint.catalog)
    catalog = replace(saved.catalog, roots=checkpoint.catalog.roots)
    check_coverage(catalog)
    numbers = {str(key): int(key) for params, _ in saved.groups for key in params}
    groups = tuple(ParamGroup(tuple(map(str, params)), own) for params, own in saved.groups)
    values = {str(key): fields for key, fields in saved.values.items()}
    return OptimizerState(catalog, groups, values, {}, "numbers", numbers, saved.notes)


def _with_names(
    checkpoint: Checkpoint, options: ReadOptions, saved: SavedState
) -> OptimizerState | None:
    """Return a state whose files have names, which will be written again."""
    every = (*(key for params, _ in saved.groups for key in params), *saved.keys)
    others = [str(key) for key in every if key not in checkpoint.catalog.tensors]
    if others:
        raise NotMergeableError(
            f"{saved.where}: has its parameters by other names than the model: {others[0]}",
            hint="pass --to FORMAT, which writes the names of the model",
        )
    state = find_optimizer(checkpoint, options)
    # Groups are kept as saved, so the note about inferred groups does not apply.
    return None if state is None else replace(state, notes=saved.notes)


def _saved(checkpoint: Checkpoint, options: ReadOptions) -> SavedState | None:
    """Read the optimizer's own files; None without any."""
    location = checkpoint.location
    return location.format.optimizer(location, checkpoint.catalog.world_size, options)


def steps_of(state: OptimizerState) -> dict[str, float]:
    """Return the steps of each parameter, from tensors that are not compressed and from values."""
    tensors = state.catalog.tensors.items()
    entries = {split_name(name)[0]: step for name, step in tensors if split_name(name)[1] == "step"}
    steps = numbers_of(entries)
    for name, fields in state.values.items():
        step = fields.get("step")
        if isinstance(step, int | float):
            steps[name] = step
    return steps


def read_optimizer(checkpoint: Checkpoint, options: ReadOptions) -> OptimizerState:
    """Return the state of a checkpoint's optimizer.

    Raises:
        NotMergeableError: there is none; the parameters of some state are unknown; or it does not
            fit the model.
        CheckpointError: a file is missing or damaged, or ranks disagree.
    """
    location = checkpoint.location
    state = find_optimizer(checkpoint, options)
    if state is not None:
        return state
    raise NotMergeableError(
        f"{location.weights_dir}: no state of an optimizer was saved with it in a supported form",
        expected="that of FSDP rank files, torch DCP or DeepSpeed ZeRO, next to the model's files",
        found=shortened(unread_files(checkpoint), 5) or "none",
        hint="merge the model alone, or take a checkpoint that was saved with its optimizer",
    )


def unread_files(checkpoint: Checkpoint) -> list[str]:
    """Return the names of files that may be an optimizer's state in an unsupported form."""
    location = checkpoint.location
    folders = [path for path in (*location.roots, location.step_dir) if path.is_dir()]
    names = {path.name for folder in folders for path in folder.iterdir()}
    return sorted(name for name in names if _OPTIMIZER.match(name))


def _names(saved: SavedState, model: Catalog) -> WithNotes[dict[Key, str]]:
    """Return the name of every parameter, with a note if no file records it."""
    groups = saved.groups
    every = [key for params, _ in groups for key in params]
    if not any(isinstance(key, int) for key in (*every, *saved.keys)):
        return WithNotes(_recorded([str(key) for key in (every or saved.keys)], model))
    recorded = [values.get("param_names") for _, values in groups]
    if groups and all(isinstance(names, list) for names in recorded):
        listed = [str(name) for names in recorded if isinstance(names, list) for name in names]
        if len(listed) == len(every):
            by_stored = _recorded(listed, model)
            return WithNotes(
                {key: by_stored[name] for key, name in zip(every, listed, strict=True)}
            )
    _check_listed(saved)
    _refuse_flat(saved, model)
    return WithNotes(_by_order(saved, model), ("by order",))


def _check_listed(saved: SavedState) -> None:
    """Raise if a parameter with state is in no group, or if names and numbers are mixed."""
    every = [key for params, _ in saved.groups for key in params]
    unknown = (saved.keys.keys() | saved.values.keys()) - set(every)
    if unknown or not all(isinstance(key, int) for key in every):
        raise CorruptError(
            f"{saved.where}: outside all groups: {counted(len(unknown), 'parameter')} with state",
            found=", ".join(sorted(map(str, unknown))[:5]),
        )


def _refuse_flat(saved: SavedState, model: Catalog) -> None:
    """Refuse the flat parameters of FSDP1 on one rank: fewer vectors than parameters."""
    parameters, forms = _parameters(model), _forms(saved)
    own_forms = {parameter.form for parameter in parameters}
    vectors = [form for form in forms.values() if len(form[0]) == 1 and form[1] is None]
    is_all = len(vectors) == len(forms) < len(parameters)
    if vectors and is_all and not own_forms.issuperset(vectors):
        raise flat_parameters(saved.where, f"{len(vectors)} plain vectors")


def _forms(saved: SavedState) -> dict[int, Form]:
    """Return shape and placements of the parameters that have moments like them."""
    forms: dict[int, Form] = {}
    for parameter, keys in saved.keys.items():
        like = [key for key in keys if key in LIKE_PARAMETER]
        entries = [saved.catalog.tensors[flat_name(parameter, key)] for key in like]
        shaped = [_form(entry) for entry in entries if entry.shape or "step" not in keys]
        if len(set(shaped)) > 1:
            raise CorruptError(
                f"{saved.where}: moments of parameter {parameter} have several shapes"
            )
        if shaped:
            forms[int(parameter)] = shaped[0]
    return forms


def _by_order(saved: SavedState, model: Catalog) -> dict[Key, str]:
    """Return the name of every number by the order of the model's parameters."""
    forms = _forms(saved)
    groups = [[int(key) for key in params] for params, _ in saved.groups]
    parameters = _parameters(model)
    sharded = [parameter for parameter in parameters if parameter.form[1] is not None]
    if sharded and all(form[1] is not None for form in forms.values()):
        parameters = sharded  # the others are buffers
    if sum(map(len, groups)) > len(parameters):  # of an adapter only trained weights were saved
        groups = [[key for key in keys if key in saved.keys] for keys in groups]
    groups = [keys for keys in groups if keys]
    matched = match_by_order(saved.where, groups, forms, parameters) if groups else {}
    return dict(matched.items())


def _check_forms(saved: SavedState, model: Catalog) -> None:
    """Raise if there are more moments of a shape and placements than the model has parameters."""
    counts = Counter(parameter.form for parameter in _parameters(model))
    for form, count in Counter(_forms(saved).values()).items():
        if count > counts[form]:
            where = "on no mesh" if form[1] is None else f"({', '.join(map(str, form[1]))})"
            raise NotMergeableError(
                f"{saved.where}: the optimizer's state does not fit the model",
                expected=f"at most {counts[form]} parameters of shape {list(form[0])}, placed "
                f"{where}, as the model has",
                found=f"moments of {count}",
                hint="are the optimizer and the model of the same checkpoint?",
            )


def _form(entry: TensorEntry) -> Form:
    return entry.shape, None if entry.sharding is None else entry.sharding.placements


def _parameters(model: Catalog) -> list[Parameter]:
    """Return the possible parameters, in order; of tied weights, stored once, only the first."""
    parameters: dict[tuple[int, int, int] | str, Parameter] = {}
    for name, entry in model.tensors.items():
        if entry.dtype.kind is DTypeKind.FLOAT:
            parameters.setdefault(entry.place or name, Parameter(name, _form(entry)))
    return list(parameters.values())


def _recorded(names: Sequence[str], model: Catalog) -> dict[Key, str]:
    """Return the model's name of every recorded name."""
    by_stored = names_without_wrappers(names)
    if not all(name in model.tensors for name in by_stored.values()):
        shorter = without_wrapper_module(by_stored)
        if all(name in model.tensors for name in shorter.values()):
            by_stored = shorter
    bare = {key: _without_adapter(name, model) for key, name in by_stored.items()}
    if len({*bare.values()}) == len(bare):  # else several adapters were trained
        by_stored = bare
    missing = [name for name in by_stored.values() if name not in model.tensors]
    if missing:
        raise NotMergeableError(
            f"{model.roots[0]}: the optimizer has {counted(len(missing), 'parameter')} that the "
            f"model lacks: {missing[0]}",
            expected=f"names such as {next(iter(model.tensors))}",
            hint="are the optimizer and the model of the same checkpoint?",
        )
    return dict(by_stored.items())


def _without_adapter(name: str, model: Catalog) -> str:
    """Return the name under which PEFT saves a parameter: without the name of its adapter."""
    if name in model.tensors or not name.startswith(_PEFT_PREFIX):
        return name
    forms = (*(_ADAPTER.sub(rest, name) for rest in (r"\1\2", r"\1")), name.rpartition(".")[0])
    return next(filter(model.tensors.__contains__, forms), name)


def _renamed(saved: SavedState, names: Mapping[Key, str], model: Catalog) -> OptimizerState:
    """Return the state under the names of the parameters."""
    order = {name: at for at, name in enumerate(model.tensors)}
    tensors: dict[str, TensorEntry] = {}
    for parameter in sorted(saved.keys, key=lambda key: order[names[key]]):
        for key in saved.keys[parameter]:
            name = flat_name(names[parameter], key)
            stored = saved.catalog.tensors[flat_name(parameter, key)]
            tensors[name] = replace(stored, fqn=name)
    values = {names[key]: fields for key, fields in saved.values.items() if key in names}
    catalog = replace(saved.catalog, tensors=tensors, roots=model.roots, format=model.format)
    groups, notes = saved.groups, saved.notes
    if saved.flattened:
        groups = joined_groups(groups, {key: order[name] for key, name in names.items()})
        note = (
            f"{saved.where}: the optimizer was saved flattened, without its parameter groups: "
            "where values or the order of the model divide its parameters, they are "
            f"{counted(len(groups), 'group')}; groups with equal values that follow one another "
            "may have been several"
        )
        notes = (*notes, note)
    numbers = {name: key for key, name in names.items() if isinstance(key, int)}
    own = tuple(_groups(groups, names))
    return OptimizerState(catalog, own, values, {}, "", numbers, notes, saved.flattened)


def _groups(groups: Iterable[Group], names: Mapping[Key, str]) -> Iterable[ParamGroup]:
    for params, values in groups:
        own: dict[str, Plain] = {key: own for key, own in values.items() if key != "param_names"}
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
