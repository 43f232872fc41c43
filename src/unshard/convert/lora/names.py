"""Separate a LoRA adapter's tensors from the model's, by PEFT's names.

    base_model.model.<module>.base_layer.weight             the weight that the adapter updates
    base_model.model.<module>.lora_A.<adapter>.weight       (rank, in)
    base_model.model.<module>.lora_B.<adapter>.weight       (out, rank)
    base_model.model.<module>.lora_embedding_A.<adapter>    (rank, count)
    base_model.model.<module>.lora_embedding_B.<adapter>    (width, rank)
    base_model.model.<module>.original_module.<rest>        a module trained whole: before …
    base_model.model.<module>.modules_to_save.<adapter>.<rest>      … and after

PEFT's files leave the adapter's name out. For a module trained whole they have only the trained
copy, under its plain name; for a resized embedding also the other two, which PEFT does not load.
Adapted embeddings and heads have their `base_layer.weight` there, too. An adapter that was injected
into a model does not have the front.
Source: peft/tuners/lora/layer.py, peft/utils/save_and_load.py, peft/utils/other.py (0.21).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from unshard.console import counted
from unshard.convert.heads import is_head
from unshard.convert.recipes import Recipe, Take, shape_of
from unshard.errors import ConversionError, raise_all

FRONT = "base_model.model."
"""The path of the model in PEFT's wrapper: all names in its files begin with it."""

_WRAPPER = "base_layer"
_LINEAR = ("lora_A", "lora_B")
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_TOKENS = frozenset({"token_adapter", "trainable_tokens_delta"})
_COPY, _ORIGINAL = "modules_to_save", "original_module"

_DORA = "DoRA, which normalises the updated weight"
_BIAS = "LoRA with its own bias (lora_bias)"
_NESTED = "LoRA inside a module that is trained whole (modules_to_save)"
_TRAINED_TOKENS = "trained tokens (trainable_token_indices)"
_UNKNOWN = "not plain LoRA"


class LoraPair(NamedTuple):
    """The two matrices of one adapted weight.

    Attributes:
        path: PEFT's name of the module, after `FRONT`: with a `base_layer` for each wrapper around
            it, one per adapted parameter of the module.
        module: the module's own name.
        a: (rank, in); (rank, count) for an embedding, (experts * rank, in) for experts.
        b: (out, rank); (width, rank) for an embedding, (out, rank * experts) for experts.
        is_embedding: whether the weight is an embedding's: (count, width).
    """

    path: str
    module: str
    a: Take
    b: Take
    is_embedding: bool = False


class Split(NamedTuple):
    """A checkpoint's tensors: the model's, and the adapter's.

    Attributes:
        base: the model's tensors under their own names, in the checkpoint's order; the trained copy
            of modules that were trained whole.
        pairs: the adapter, by `LoraPair.path`.
        saved: tensors that were trained whole, by their names in PEFT's files, after `FRONT`.
        saved_modules: the modules of `saved`, as far as the checkpoint's names show them.
        adapter_only: whether all weights that the adapter updates are missing.
    """

    base: Mapping[str, Recipe]
    pairs: Mapping[str, LoraPair] = {}
    saved: Mapping[str, Recipe] = {}
    saved_modules: tuple[str, ...] = ()
    adapter_only: bool = False


class _Matrix(NamedTuple):
    """A matrix of a pair, by its name in the checkpoint."""

    name: str
    path: str
    module: str
    word: str
    adapter: str | None


class _Weight(NamedTuple):
    """A tensor of the model: its name in the checkpoint, in PEFT's files, and in the model.

    In a module that was trained whole, it is the original or a copy that belongs to an `adapter`.
    """

    name: str
    path: str
    own: str
    is_original: bool = False
    adapter: str | None = None
    module: str = ""


def split_adapter(tensors: Mapping[str, Take]) -> Split:
    """Separate a checkpoint's adapter from its model; without PEFT's names, all is the model's.

    Raises:
        ConversionError: the adapter is not LoRA, or there are several, or matrices are missing.
    """
    if not any(_is_of_peft(name) for name in tensors):
        return Split(dict(tensors))
    matrices, weights = _parsed_names(_without_doubles(tensors))
    adapters = {matrix.adapter for matrix in matrices} | {weight.adapter for weight in weights}
    adapters -= {None}
    if len(adapters) > 1:
        raise ConversionError(
            f"the checkpoint has {len(adapters)} adapters",
            expected="one",
            found=", ".join(sorted(map(str, adapters))),
            hint="save the model with a single adapter",
        )
    pairs = _pairs(matrices, tensors)
    if not pairs:
        raise ConversionError(
            f"the tensors have PEFT's names ({next(filter(_is_of_peft, tensors))} …), but there "
            "is no LoRA pair",
            hint="merge adapters of other kinds into the model with peft, before saving",
        )
    by_name = _by_own_name(weights)
    base = {own: tensors[weight.name] for own, weight in by_name.items()}
    copies = [weight for weight in by_name.values() if weight.adapter is not None]
    adapter_only = _lacks_weights(base, pairs, is_file=not adapters)
    whole = by_name.values() if adapter_only else copies
    return Split(
        base,
        pairs,
        saved={weight.path: tensors[weight.name] for weight in whole},
        saved_modules=tuple(dict.fromkeys(weight.module for weight in copies)),
        adapter_only=adapter_only,
    )


def _is_of_peft(name: str) -> bool:
    parts = name.split(".")
    marked = any(part.startswith("lora_") or part in _TOKENS for part in parts)
    return marked or f".{FRONT}" in f".{name}"


def _without_doubles(names: Collection[str]) -> list[str]:
    """Return the names without the other two names of a resized embedding: see above."""
    repeated: set[str] = set()
    for name in names:
        module = name.removesuffix(f".{_COPY}.weight")
        others = {f"{module}.{_COPY}.weight", f"{module}.{_ORIGINAL}.weight"}
        if module != name and all(other in names for other in (f"{module}.weight", *others)):
            repeated |= others
    return [name for name in names if name not in repeated]


def _parsed_names(names: Iterable[str]) -> tuple[list[_Matrix], list[_Weight]]:
    """Return the adapter's matrices and the model's weights; raise all refusals in one error."""
    matrices, weights = [], []
    refused: dict[str, list[str]] = {}
    for name in names:
        match _parsed(name):
            case _Matrix() as matrix:
                matrices.append(matrix)
            case _Weight() as weight:
                weights.append(weight)
            case reason:
                refused.setdefault(reason, []).append(name)
    problems = [
        ConversionError(
            f"the adapter of {counted(len(own), 'tensor')} ({own[0]} …) is {reason}",
            hint="merge the adapter into the model with peft, before saving",
        )
        for reason, own in refused.items()
    ]
    raise_all(ConversionError, "adapters that can be neither fused nor written", problems)
    return matrices, weights


def _parsed(name: str) -> _Matrix | _Weight | str:
    """Return the matrix or weight with this name in the checkpoint, or why it is refused."""
    outside, _, inside = f".{name}".partition(f".{FRONT}")
    if not inside:
        outside, inside = "", name
    front, parts = f"{outside}.".removeprefix("."), inside.split(".")
    if _TOKENS & set(parts):
        return _TRAINED_TOKENS
    lora = next((at for at, part in enumerate(parts) if part.startswith("lora_")), None)
    if lora is not None:
        return _parsed_matrix(name, front, parts, lora)
    if _ORIGINAL in parts:
        path = ".".join(part for part in parts if part != _ORIGINAL)
        return _Weight(name, path, _own(front + path), is_original=True)
    if _COPY in parts[:-2]:  # the adapter's name and the tensor's follow
        at = parts.index(_COPY)
        path = ".".join(parts[:at] + parts[at + 2 :])
        module = _own(front + ".".join(parts[:at]))
        return _Weight(name, path, _own(front + path), adapter=parts[at + 1], module=module)
    return _Weight(name, inside, _own(front + inside))


def _parsed_matrix(name: str, front: str, parts: list[str], at: int) -> _Matrix | str:
    """Return the matrix whose kind is part `at` of the name, or why it is refused."""
    word, rest = parts[at], parts[at + 1 :]
    if word == "lora_magnitude_vector":
        return _DORA
    if rest[-1:] == ["bias"]:
        return _BIAS
    if {_COPY, _ORIGINAL} & set(parts[:at]):
        return _NESTED
    is_embedding = word in _EMBEDDING
    adapter = rest if is_embedding else rest[:-1]
    is_weight = is_embedding or rest[-1:] == ["weight"]
    if word not in _LINEAR + _EMBEDDING or at == 0 or not is_weight or len(adapter) > 1:
        return _UNKNOWN
    path = ".".join(parts[:at])
    return _Matrix(name, path, _own(front + path), word, adapter[0] if adapter else None)


def _own(name: str) -> str:
    """Return a name without PEFT's wrappers."""
    if _WRAPPER not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


def _pairs(matrices: Iterable[_Matrix], tensors: Mapping[str, Take]) -> dict[str, LoraPair]:
    """Return complete pairs, or raise a `ConversionError` that lists the incomplete pairs."""
    by_path: dict[str, dict[str, _Matrix]] = {}
    problems: list[ConversionError] = []
    for matrix in matrices:
        first = by_path.setdefault(matrix.path, {}).setdefault(matrix.word, matrix)
        if first is not matrix:
            names = f"tensors {first.name} and {matrix.name}"
            problems.append(
                ConversionError(f"{names} are one matrix, with and without the adapter's name")
            )
    pairs = {}
    for path, halves in by_path.items():
        is_embedding = _EMBEDDING[0] in halves
        a, b = _EMBEDDING if is_embedding else _LINEAR
        if halves.keys() == {a, b}:
            recipes = tensors[halves[a].name], tensors[halves[b].name]
            pairs[path] = LoraPair(path, halves[a].module, *recipes, is_embedding)
            continue
        problems.append(
            ConversionError(
                f"the pair of {next(iter(halves.values())).name} is incomplete",
                expected=f"{a} and {b}",
                found=" and ".join(halves),
            )
        )
    raise_all(ConversionError, f"LoRA pairs are damaged: {len(by_path)} in all", problems)
    return pairs


def _by_own_name(weights: Iterable[_Weight]) -> dict[str, _Weight]:
    """Return the model's tensors by their own names, with trained copies instead of originals."""
    by_name: dict[str, _Weight] = {}
    problems: list[ConversionError] = []
    for weight in weights:
        first = by_name.setdefault(weight.own, weight)
        if first.is_original and weight.adapter is not None:
            by_name[weight.own] = weight
        elif first is not weight and not (weight.is_original and first.adapter is not None):
            names = f"{first.name} and {weight.name}"
            problems.append(
                ConversionError(f"{names} have the same name without PEFT's parts, {weight.own}")
            )
    problems += (
        ConversionError(f"tensor {weight.name}: the trained copy ({_COPY}) is missing")
        for weight in by_name.values()
        if weight.is_original
    )
    raise_all(ConversionError, "tensors next to the adapter's", problems)
    return by_name


def _lacks_weights(
    base: Mapping[str, Recipe], pairs: Mapping[str, LoraPair], *, is_file: bool
) -> bool:
    """Return whether a checkpoint has an adapter only, perhaps with biases, modules, embeddings.

    If only heads and embeddings are adapted, other modules make a model, except in PEFT's files.
    """
    owners = {name.rpartition(".")[0] for name in base}
    matrices = {name.rpartition(".")[0] for name, one in base.items() if len(shape_of(one)) > 1}
    adapted = {pair.module for pair in pairs.values()}
    modules = {pair.module for pair in pairs.values() if not pair.is_embedding}
    modules = {name for name in modules if not is_head(f"{name}.weight")}
    return modules.isdisjoint(matrices) if modules else is_file or owners <= adapted
