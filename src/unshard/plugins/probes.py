"""Which tensors show that an engine holds a checkpoint, and nothing of the one before."""

import re
from collections.abc import Mapping, Sequence

_EXPERT = re.compile(r".*\.experts\.(\d+)\.")
_LAYER = re.compile(r"(.*?\.(?:layers|layer|h|blocks|block)\.)(\d+)\.")

Shapes = Mapping[str, tuple[int, ...]]


def choose_probes(shapes: Shapes) -> list[list[str]]:
    """Return names of tensors to compare, in groups that belong together.

    All of the tensors outside layers, and of the first, the middle and the last layer of each
    stack; of every other layer all vectors, one matrix and one expert, another one in each. So a
    reload that left out a layer, or one kind of matrix, is seen, and little is read twice.

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
    """Return the vectors of a layer, one of its matrices and one expert, by the layer's number."""
    experts: dict[int, list[str]] = {}
    matrices, chosen = list[str](), set[str]()
    for name in names:
        found = _EXPERT.match(name)
        if found is not None:
            experts.setdefault(int(found[1]), []).append(name)
        elif len(shapes[name]) > 1:
            matrices.append(name)
        else:
            chosen.add(name)
    if matrices:
        chosen.add(matrices[number % len(matrices)])
    if experts:
        chosen.update(experts[sorted(experts)[number % len(experts)]])
    return [name for name in names if name in chosen]
