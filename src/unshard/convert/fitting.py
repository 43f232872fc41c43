"""What of a checkpoint goes where in a model in memory: names, ties and shapes compared. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unshard.convert.recipes import Recipe, shape_of
from unshard.errors import ConversionError

__all__ = ["Fit", "Slot", "fit", "misfits"]

_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or buffer of a model: all its names, of which tied weights have several."""

    names: tuple[str, ...]
    shape: _Shape


@dataclass(frozen=True, slots=True)
class Fit:
    """How the tensors of a checkpoint and the slots of a model go together.

    Attributes:
        sources: per slot the tensors that go there, by name: of tied weights there may be
            several; none, if it is missing.
        missing: names in the model without a tensor. Of tied weights one is enough.
        unexpected: names in the checkpoint without a slot.
    """

    sources: tuple[tuple[str, ...], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every name is there on both sides."""
        return not (self.missing or self.unexpected)


def fit(tensors: Mapping[str, Recipe], slots: Sequence[Slot]) -> Fit:
    """Find the tensors of every slot by name."""
    sources = tuple(tuple(name for name in slot.names if name in tensors) for slot in slots)
    pairs = list(zip(slots, sources, strict=True))
    wanted = {name for slot in slots for name in slot.names}
    return Fit(
        sources,
        tuple(name for slot, found in pairs if not found for name in slot.names),
        tuple(name for name in tensors if name not in wanted),
    )


def misfits(
    tensors: Mapping[str, Recipe], slots: Sequence[Slot], found: Fit
) -> list[ConversionError]:
    """Return an error for every tensor whose shape is not that of its slot."""
    return [
        ConversionError(
            f"tensor {name}: of another shape than in the model",
            expected=f"{list(slot.shape)}, as the model has it",
            found=str(list(shape_of(tensors[name]))),
        )
        for slot, names in zip(slots, found.sources, strict=True)
        for name in names
        if shape_of(tensors[name]) != slot.shape
    ]
