"""The choice of tensors that show whether an engine has loaded a checkpoint completely."""

import re
from collections.abc import Mapping, Sequence

_EXPERT = re.compile(r".*\.experts\.(\d+)\.")
_LAYER = re.compile(r"(.*?\.(?:layers|layer|h|blocks|block)\.)(\d+)\.")

Shapes = Mapping[str, tuple[int, ...]]


def choose_probes(shapes: Shapes) -> list[list[str]]:
    """Return the names of tensors to compare, in groups of a layer or a single tensor.

    These are all tensors outside layers, all of the first, the middle and the last layer of each
    stack, and from every other layer all vectors, one matrix and one expert, which vary with the
    layer. So a reload that left out a layer, or a kind of matrix, is detected, and little is read
    twice.

    Args:
        shapes: the shapes of all tensors, by name.
    """
    stacks: dict[str, dict[int, list[str]]] = {}
    groups = []
    for name in shapes:
        match = _LAYER.match(name)
        if match is None:
            groups.append([name])
        else:
            stacks.setdefault(match[1], {}).setdefault(int(match[2]), []).append(name)
    for layers in stacks.values():
        numbers = sorted(layers)
        whole = {numbers[0], numbers[len(numbers) // 2], numbers[-1]}
        groups += [
            layers[number] if number in whole else _sample(layers[number], number, shapes)
            for number in numbers
        ]
    return groups


def _sample(names: Sequence[str], number: int, shapes: Shapes) -> list[str]:
    """Return the vectors of a layer, and a matrix and an expert chosen by the layer's number."""
    experts: dict[int, list[str]] = {}
    matrices, chosen = list[str](), set[str]()
    for name in names:
        match = _EXPERT.match(name)
        if match is not None:
            experts.setdefault(int(match[1]), []).append(name)
        elif len(shapes[name]) > 1:
            matrices.append(name)
        else:
            chosen.add(name)
    if matrices:
        chosen.add(matrices[number % len(matrices)])
    if experts:
        chosen.update(experts[sorted(experts)[number % len(experts)]])
    return [name for name in names if name in chosen]
