"""Which tensors show that an engine holds a checkpoint, and nothing of the one before."""

import re
from collections.abc import Mapping, Sequence

__all__ = ["choose_probes"]

_LAYER = re.compile(r"(.*?\.(?:layers|layer|h|blocks|block)\.)(\d+)\.")

Shapes = Mapping[str, tuple[int, ...]]


def choose_probes(shapes: Shapes) -> list[list[str]]:
    """Return names of tensors to compare, in groups that belong together.

    All of the tensors outside layers, and of the first, the middle and the last layer of each
    stack; of every other layer all vectors and one matrix, another one in each. So a reload that
    left out a layer, or one kind of matrix, is seen, and little is read twice.

    Args:
        shapes: the shapes of all tensors, by name.
    """
    stacks: dict[str, dict[int, list[str]]] = {}
    outside = []
    for name in shapes:
        found = _LAYER.match(name)
        if found is None:
            outside.append(name)
        else:
            stacks.setdefault(found[1], {}).setdefault(int(found[2]), []).append(name)
    groups = [[name] for name in outside]
    for layers in stacks.values():
        numbers = sorted(layers)
        whole = {numbers[0], numbers[len(numbers) // 2], numbers[-1]}
        groups += [
            layers[one] if one in whole else _sample(layers[one], one, shapes) for one in numbers
        ]
    return groups


def _sample(names: Sequence[str], number: int, shapes: Shapes) -> list[str]:
    """Return the vectors of a layer and one of its matrices, by the layer's number."""
    matrices = [name for name in names if len(shapes[name]) > 1]
    chosen = matrices[number % len(matrices)] if matrices else None
    return [name for name in names if len(shapes[name]) < 2 or name == chosen]
