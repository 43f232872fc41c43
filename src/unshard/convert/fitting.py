"""Which tensors of a checkpoint go where in a model in memory: names, ties and shapes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unshard.convert.recipes import Recipe, shape_of
from unshard.errors import ConversionError

__all__ = ["Matches", "Slot", "match_slots", "wrong_shapes"]

_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or buffer of a model: all its names, of which tied weights have several."""

    names: tuple[str, ...]
    shape: _Shape


@dataclass(frozen=True, slots=True)
class Matches:
    """Which tensors of a checkpoint match which slots of a model.

    Attributes:
        sources: per slot the names of its tensors: several of tied weights, none if it is missing.
        missing: names in the model without a tensor; for tied weights one tensor is enough.
        unexpected: names in the checkpoint without a slot.
    """

    sources: tuple[tuple[str, ...], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether both sides have all names."""
        return not (self.missing or self.unexpected)


def match_slots(tensors: Mapping[str, Recipe], slots: Sequence[Slot]) -> Matches:
    """Find the tensors of every slot by name."""
    sources = tuple(tuple(name for name in slot.names if name in tensors) for slot in slots)
    pairs = list(zip(slots, sources, strict=True))
    wanted = {name for slot in slots for name in slot.names}
    return Matches(
        sources,
        tuple(name for slot, found in pairs if not found for name in slot.names),
        tuple(name for name in tensors if name not in wanted),
    )


def wrong_shapes(
    tensors: Mapping[str, Recipe], slots: Sequence[Slot], found: Matches
) -> list[ConversionError]:
    """Return an error for every tensor whose shape is not that of its slot."""
    return [
        ConversionError(
            f"tensor {name} has another shape than in the model",
            expected=f"{list(slot.shape)}, as in the model",
            found=str(list(shape_of(tensors[name]))),
        )
        for slot, names in zip(slots, found.sources, strict=True)
        for name in names
        if shape_of(tensors[name]) != slot.shape
    ]
