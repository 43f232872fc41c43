"""EMA weights that lack some tensors: a run may average what is trained only, or a filter's choice.

What the EMA set lacks is taken from the regular weights of the same step, and counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from unshard.errors import NotMergeableError
from unshard.tensors.catalog import TensorEntry

__all__ = ["Filled", "filled"]

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Filled:
    """All tensors, in the order of the regular weights; and what was taken from those."""

    tensors: Mapping[str, TensorEntry]
    notes: tuple[str, ...]


def filled(ema: Mapping[str, TensorEntry], regular: Mapping[str, TensorEntry]) -> Filled:
    """Return the EMA tensors, completed by the regular ones.

    Raises:
        NotMergeableError: the EMA set has names that the regular weights lack: other words for the
            same tensors, perhaps, and nothing says which.
    """
    alone = [name for name in ema if name not in regular]
    if alone:
        raise NotMergeableError(
            f"the EMA set holds {len(alone)} tensors that the regular weights lack: {alone[0]} …",
            expected=f"names such as {next(iter(regular), 'none')}",
            hint="merge the EMA directory where no regular weights lie beside it",
        )
    missing = [name for name in regular if name not in ema]
    tensors = {name: ema.get(name, entry) for name, entry in regular.items()}
    if not missing:
        return Filled(tensors, ())
    listed = ", ".join(missing[:_SHOWN]) + (" …" if len(missing) > _SHOWN else "")
    note = f"{len(missing)} tensors are not in the EMA set, and were taken from the regular weights"
    return Filled(tensors, (f"{note}: {listed}",))
