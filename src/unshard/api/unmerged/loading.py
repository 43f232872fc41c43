"""Load an open checkpoint into a model of torch: under which names, and tensor by tensor."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unshard.api.adapters import fuse_adapter
from unshard.api.converting import find_stored_ties, is_stored
from unshard.api.options import MergeOptions
from unshard.containers.chunks import equal_tensors
from unshard.containers.open_files import OpenFiles
from unshard.convert.expected.tensors import Matches, Slot, match_slots, wrong_shapes
from unshard.convert.heads import without_trl_wrapper
from unshard.convert.megatron.names import without_megatron_names
from unshard.convert.names import names_of_base
from unshard.convert.outputs import Converted
from unshard.convert.recipes import Recipe, stored_dtype
from unshard.engines.arrays import TensorReader
from unshard.errors import ConversionError, raise_all
from unshard.plan.operations import Target
from unshard.plan.planner import make_operation
from unshard.read.model_config import ModelConfig
from unshard.read.open import Checkpoint

if TYPE_CHECKING:
    from unshard.engines.into_torch import Module

_SHOWN = 20

Recipes = Mapping[str, Recipe]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a model did not get.

    Attributes:
        missing: names in the model that the checkpoint does not have.
        unexpected: names in the checkpoint that the model does not have.
        on_meta: parameters and buffers that are still on the meta device, without values: buffers
            that checkpoints do not contain, if the model was made there.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    on_meta: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """What an open checkpoint consists of.

    Attributes:
        checkpoint: the checkpoint, nothing in it compressed any more.
        options: how it was opened.
        tensors: its tensors by the names that were asked for.
        reader: reads them.
    """

    checkpoint: Checkpoint
    options: MergeOptions
    tensors: Mapping[str, Converted]
    reader: TensorReader

    @property
    def path(self) -> str:
        """The directory of the weights, or the one file that is meant."""
        location = self.checkpoint.location
        return str(location.file or location.weights_dir)


def fill(model: "Module", opened: Opened, *, strict: bool) -> Loaded:
    """Copy a checkpoint's tensors into a model; see `OpenCheckpoint.load_into`."""
    from unshard.engines.into_torch import StoredTensor, model_tensors, need_torch, on_meta

    need_torch()
    targets = model_tensors(model)
    slots = [target.slot for target in targets]
    tensors, found = _fit_names(model, opened, slots)
    problems = wrong_shapes(tensors, slots, found)
    if strict and not found.is_complete:
        problems.insert(0, _describe_difference(model, opened, found))
    problems += _compare_tied(tensors, found)
    pairs = list(zip(targets, found.sources, strict=True))
    for target, names in pairs:
        try:
            target.check(stored_dtype(tensors[names[0]]) if names else None)
        except ConversionError as problem:
            problems.append(problem)
    raise_all(ConversionError, f"{opened.path}: does not fit the model", problems)
    for target, names in pairs:
        if names:
            recipe = tensors[names[0]]
            place = Target(0, 0, target.slot.shape)  # in no file
            operation = make_operation(place, recipe, stored_dtype(recipe))
            target.fill(StoredTensor(opened.reader, operation))
    return Loaded(found.missing, found.unexpected, tuple(on_meta(model)))


def _fit_names(model: "Module", opened: Opened, slots: Sequence[Slot]) -> tuple[Recipes, Matches]:
    """Return the tensors under the names that fit the model best, and how they do.

    First as the checkpoint was opened; then with its adapter fused, renamed to the model's names,
    whichever side has those of training and whichever those of the hub.
    """
    config = opened.checkpoint.config
    if config is None or not config.fields:
        config = _config_of(model)
    tensors: Recipes = {name: one.recipe for name, one in opened.tensors.items()}
    found = _without_ties(tensors, match_slots(tensors, slots), config)
    wrong = _problems(tensors, slots, found)
    if not wrong:
        return tensors, found
    shapes = {name: slot.shape for slot in slots for name in slot.names}
    try:
        options = opened.options
        adapted = fuse_adapter(opened.checkpoint, options)
        fused = without_trl_wrapper(adapted.value)
        recorded = opened.checkpoint.catalog.recorded
        trained = without_megatron_names(fused, config, recorded).value
        others = names_of_base(trained, shapes.keys(), config, shapes).value
    except ConversionError:
        if not any(found.sources):
            raise
        return tensors, found
    other = _without_ties(others, match_slots(others, slots), config)
    better = _problems(others, slots, other) < wrong
    return (others, other) if better else (tensors, found)


def _problems(tensors: Recipes, slots: Sequence[Slot], found: Matches) -> int:
    """Return how many names are on one side only, or have another shape on the other."""
    return len(found.missing) + len(found.unexpected) + len(wrong_shapes(tensors, slots, found))


def _without_ties(tensors: Recipes, found: Matches, config: ModelConfig | None) -> Matches:
    """Excuse unexpected tensors that are tied to tensors that the model has."""
    if not found.unexpected:
        return found
    stored = {name: one.entry for name, one in tensors.items() if is_stored(one)}
    repeated = find_stored_ties(stored, config).equal
    taken = {name for names in found.sources for name in names}
    left = tuple(name for name in found.unexpected if repeated.get(name) not in taken)
    return Matches(found.sources, found.missing, left)


def _compare_tied(tensors: Recipes, found: Matches) -> list[ConversionError]:
    """Return an error for each tensor that the model ties to another one of other values."""
    problems = []
    tied = [(names[0], name) for names in found.sources for name in names[1:]]
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        for first, name in tied:
            one, other = tensors[first], tensors[name]
            # Computed tensors are never equal.
            if is_stored(one) and is_stored(other) and equal_tensors(one.entry, other.entry, files):
                continue
            problems.append(
                ConversionError(
                    f"tensors {first} and {name}: one parameter in the model, but different values "
                    "in the checkpoint",
                    hint="build the model with tie_word_embeddings=False",
                )
            )
    return problems


def _describe_difference(model: "Module", opened: Opened, found: Matches) -> ConversionError:
    differing = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
        for what, names in (("missing", found.missing), ("unexpected", found.unexpected))
        if names
    ]
    return ConversionError(
        f"{opened.path}: its names are not those of the model",
        expected=f"the parameters and buffers of {type(model).__name__}",
        found="; ".join(differing),
        hint="is it the model's config? strict=False loads what fits and reports the rest",
    )


def _config_of(model: "Module") -> ModelConfig | None:
    """Return the config that a model of transformers carries."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    fields = to_dict() if callable(to_dict) else None
    return ModelConfig(fields) if isinstance(fields, dict) else None
