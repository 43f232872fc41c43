"""Load an open checkpoint into a model of torch: match names, then copy tensor by tensor."""

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
from unshard.convert.outputs import ConvertedTensor
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
    """The names that were not loaded.

    Attributes:
        missing: names in the model that the checkpoint does not have.
        unexpected: names in the checkpoint that the model does not have.
        on_meta: parameters and buffers that are still on the meta device, without values, such as
            buffers that checkpoints do not contain.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    on_meta: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """The parts of an open checkpoint.

    Attributes:
        checkpoint: the checkpoint, decompressed.
        options: the options of `open_checkpoint`.
        tensors: its tensors by the requested names.
        reader: reads them.
    """

    checkpoint: Checkpoint
    options: MergeOptions
    tensors: Mapping[str, ConvertedTensor]
    reader: TensorReader

    @property
    def path(self) -> str:
        """The directory of the weights, or the single file."""
        location = self.checkpoint.location
        return str(location.file or location.weights_dir)


def fill(model: "Module", opened: Opened, *, strict: bool) -> Loaded:
    """Copy a checkpoint's tensors into a model; see `OpenCheckpoint.load_into`."""
    from unshard.engines.into_torch import ReadableTensor, model_tensors, need_torch, on_meta

    need_torch()
    targets = model_tensors(model)
    slots = [target.slot for target in targets]
    tensors, matches = _fit_names(model, opened, slots)
    problems = wrong_shapes(tensors, slots, matches)
    if strict and not matches.is_complete:
        problems.insert(0, _describe_difference(model, opened, matches))
    problems += _compare_tied(tensors, matches)
    pairs = list(zip(targets, matches.sources, strict=True))
    for target, names in pairs:
        try:
            target.check(stored_dtype(tensors[names[0]]) if names else None)
        except ConversionError as problem:
            problems.append(problem)
    raise_all(ConversionError, f"{opened.path}: does not fit the model", problems)
    for target, names in pairs:
        if names:
            recipe = tensors[names[0]]
            nowhere = Target(0, 0, target.slot.shape)  # in memory, not in a file
            operation = make_operation(nowhere, recipe, stored_dtype(recipe))
            target.fill(ReadableTensor(opened.reader, operation))
    return Loaded(matches.missing, matches.unexpected, tuple(on_meta(model)))


def _fit_names(model: "Module", opened: Opened, slots: Sequence[Slot]) -> tuple[Recipes, Matches]:
    """Return the tensors under the names that fit the model best, and their matches.

    The names of the open checkpoint come first. If they do not fit, adapters are fused, and names
    of training or the hub are converted to those of the model.
    """
    config = opened.checkpoint.config
    if config is None or not config.fields:
        config = _config_of(model)
    tensors: Recipes = {name: tensor.recipe for name, tensor in opened.tensors.items()}
    matches = _without_ties(tensors, match_slots(tensors, slots), config)
    wrong = _count_problems(tensors, slots, matches)
    if not wrong:
        return tensors, matches
    shapes = {name: slot.shape for slot in slots for name in slot.names}
    try:
        adapted = fuse_adapter(opened.checkpoint, opened.options)
        fused = without_trl_wrapper(adapted.value)
        recorded = opened.checkpoint.catalog.recorded
        trained = without_megatron_names(fused, config, recorded).value
        renamed = names_of_base(trained, shapes.keys(), config, shapes).value
    except ConversionError:
        if not any(matches.sources):
            raise
        return tensors, matches
    others = _without_ties(renamed, match_slots(renamed, slots), config)
    is_better = _count_problems(renamed, slots, others) < wrong
    return (renamed, others) if is_better else (tensors, matches)


def _count_problems(tensors: Recipes, slots: Sequence[Slot], matches: Matches) -> int:
    """Return the number of names that are missing, unexpected, or of another shape."""
    wrong = wrong_shapes(tensors, slots, matches)
    return len(matches.missing) + len(matches.unexpected) + len(wrong)


def _without_ties(tensors: Recipes, matches: Matches, config: ModelConfig | None) -> Matches:
    """Remove unexpected tensors that are tied to tensors of the model."""
    if not matches.unexpected:
        return matches
    stored = {name: recipe.entry for name, recipe in tensors.items() if is_stored(recipe)}
    original = find_stored_ties(stored, config).equal
    used = {name for names in matches.sources for name in names}
    unexpected = tuple(name for name in matches.unexpected if original.get(name) not in used)
    return Matches(matches.sources, matches.missing, unexpected)


def _compare_tied(tensors: Recipes, matches: Matches) -> list[ConversionError]:
    """Return an error for each pair of tensors that the model ties, but whose values differ."""
    problems = []
    tied = [(names[0], name) for names in matches.sources for name in names[1:]]
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


def _describe_difference(model: "Module", opened: Opened, matches: Matches) -> ConversionError:
    differing = [
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
        for what, names in (("missing", matches.missing), ("unexpected", matches.unexpected))
        if names
    ]
    return ConversionError(
        f"{opened.path}: its names are not those of the model",
        expected=f"the parameters and buffers of {type(model).__name__}",
        found="; ".join(differing),
        hint="check the model's config; strict=False loads matching tensors and reports the rest",
    )


def _config_of(model: "Module") -> ModelConfig | None:
    """Return the config of a model of transformers."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    fields = to_dict() if callable(to_dict) else None
    return ModelConfig(fields) if isinstance(fields, dict) else None
