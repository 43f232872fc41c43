"""Are these the tensors of the model? Asked of the config, where no base model says it."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from unshard.api.options import MergeOptions
from unshard.convert.expected.config_names import expected_by_config
from unshard.convert.expected.tensors import Expected, check_expected
from unshard.convert.outputs import Converted, selected
from unshard.read.beside.model_config import ModelConfig
from unshard.read.open import Checkpoint

__all__ = ["Checked", "check_names", "expected_names"]


@dataclass(frozen=True, slots=True)
class Checked:
    """By what the names were checked ("config", "base" or "none"), and what a user should know."""

    by: str = "none"
    notes: tuple[str, ...] = ()


def check_names(
    tensors: Sequence[Converted],
    config: ModelConfig | None,
    checkpoint: Checkpoint,
    options: MergeOptions,
) -> Checked:
    """Compare the names of an output with those that its config says there are.

    Where there is a base model, they were compared with its names.

    Raises:
        ConversionError: tensors are missing, or have no place in the model.
    """
    if checkpoint.base is not None:
        return Checked("base")
    recipes = {one.name: one.recipe for one in tensors}
    expected = expected_names(recipes, config, options)
    if expected is None:
        return Checked()
    notes = check_expected(
        recipes,
        replace(expected, name=str(checkpoint.companions.config)),
        allow_missing=options.allow_missing,
        allow_unexpected=options.allow_unexpected,
    )
    return Checked("config", tuple(notes))


def expected_names(
    names: Collection[str], config: ModelConfig | None, options: MergeOptions
) -> Expected | None:
    """Return what an output of these names has by its config; None if that is not known."""
    if config is None or options.names != "hub" or options.base is not None:
        return None

    def kept(known: Iterable[str]) -> list[str]:
        return selected(known, options.include, options.exclude)

    return expected_by_config(config.fields, names, kept, tied=config.may_be_tied)
