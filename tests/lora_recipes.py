"""Recipes of adapters, as a checkpoint of LoRA has them."""

from collections.abc import Mapping

from unshard.convert.lora.names import FRONT
from unshard.convert.recipes import Take, take
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME

Shapes = Mapping[str, tuple[int, ...]]


def entry(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorEntry:
    return TensorEntry(name, BY_NAME[dtype], shape, ChunkRows(len(shape)).table(()))


def recipes(shapes: Shapes, dtype: str = "float32") -> dict[str, Take]:
    """Recipes of tensors of which nothing but names, shapes and dtypes is looked at."""
    return {name: take(entry(name, shape, dtype)) for name, shape in shapes.items()}


def linear(
    module: str, out: int = 6, inside: int = 5, rank: int = 2, adapter: str = ".default"
) -> dict[str, tuple[int, ...]]:
    return {
        f"{FRONT}{module}.base_layer.weight": (out, inside),
        f"{FRONT}{module}.lora_A{adapter}.weight": (rank, inside),
        f"{FRONT}{module}.lora_B{adapter}.weight": (out, rank),
    }


EXPERTS = {
    f"{FRONT}m.experts.base_layer.base_layer.gate_up_proj": (3, 10, 7),
    f"{FRONT}m.experts.base_layer.base_layer.down_proj": (3, 7, 5),
    f"{FRONT}m.experts.base_layer.lora_A.default.weight": (3 * 2, 7),
    f"{FRONT}m.experts.base_layer.lora_B.default.weight": (10, 3 * 2),
    f"{FRONT}m.experts.lora_A.default.weight": (3 * 2, 5),
    f"{FRONT}m.experts.lora_B.default.weight": (7, 3 * 2),
}


def lora_only(*modules: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for module in modules:
        shapes |= linear(module)
        del shapes[f"{FRONT}{module}.base_layer.weight"]
    return shapes
