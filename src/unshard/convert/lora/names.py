"""Tell a LoRA adapter's tensors from the model's, by the names that PEFT gives them.

    base_model.model.<module>.base_layer.weight             the weight that the adapter updates
    base_model.model.<module>.lora_A.<adapter>.weight       (rank, in)
    base_model.model.<module>.lora_B.<adapter>.weight       (out, rank)
    base_model.model.<module>.lora_embedding_A.<adapter>    (rank, count)
    base_model.model.<module>.lora_embedding_B.<adapter>    (width, rank)
    base_model.model.<module>.original_module.<rest>        of a module trained whole: before …
    base_model.model.<module>.modules_to_save.<adapter>.<rest>      … and after

In PEFT's files the adapter's name is left out, and of a module trained whole only the trained copy
stands there, under its plain name. The front is missing where an adapter was injected into a model.
Source: peft/tuners/lora/layer.py, peft/utils/save_and_load.py, peft/utils/other.py (0.21).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from unshard.convert.recipes import Recipe, shape_of
from unshard.errors import ConversionError, raise_all

__all__ = ["FRONT", "Pair", "Split", "split_adapter"]

FRONT = "base_model.model."
"""Where PEFT puts the model: every name in its files begins so."""

_WRAPPER = "base_layer"
_SIDES = {
    "lora_A": ("A", False),
    "lora_B": ("B", False),
    "lora_embedding_A": ("A", True),
    "lora_embedding_B": ("B", True),
}
_TOKENS = frozenset({"token_adapter", "trainable_tokens_delta"})
_COPY, _ORIGINAL = "modules_to_save", "original_module"

_DORA = "DoRA, which normalises the updated weight"
_BIAS = "LoRA with a bias of its own (lora_bias)"
_NESTED = "LoRA inside a module that is trained whole (modules_to_save)"
_TRAINED_TOKENS = "trained tokens (trainable_token_indices)"
_UNKNOWN = "not plain LoRA"


@dataclass(frozen=True, slots=True)
class Pair:
    """The two matrices of one adapted weight.

    Attributes:
        path: the module as PEFT names it, behind `FRONT`: with a `base_layer` for every wrapper
            around it, as there are where several parameters of one module are adapted.
        module: the module's own name.
        a: (rank, in); of an embedding (rank, count). Of experts, their ranks stand below one
            another: (experts * rank, in).
        b: (out, rank); of an embedding (width, rank), of experts (out, rank * experts).
        is_embedding: whether the weight is an embedding's: (count, width).
    """

    path: str
    module: str
    a: Recipe
    b: Recipe
    is_embedding: bool


@dataclass(frozen=True, slots=True)
class Split:
    """A checkpoint's tensors, told apart.

    Attributes:
        base: the model's tensors under their own names, in the checkpoint's order; of modules that
            were trained whole, the trained copy.
        pairs: the adapter, by `Pair.path`.
        saved: tensors that were trained whole, by their names in PEFT's files, behind `FRONT`.
        saved_modules: the modules they belong to, where the checkpoint's names tell.
        adapter_only: whether the weights that the adapter updates are missing, all of them.
    """

    base: Mapping[str, Recipe]
    pairs: Mapping[str, Pair] = field(default_factory=dict)
    saved: Mapping[str, Recipe] = field(default_factory=dict)
    saved_modules: tuple[str, ...] = ()
    adapter_only: bool = False


@dataclass(frozen=True, slots=True)
class _Side:
    """A matrix of a pair."""

    name: str
    path: str
    module: str
    word: str
    adapter: str | None


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor of the model: its name in the checkpoint, in PEFT's files, and in the model."""

    name: str
    path: str
    own: str


@dataclass(frozen=True, slots=True)
class _Original:
    """A tensor whose place a trained copy takes."""

    name: str
    path: str
    own: str


@dataclass(frozen=True, slots=True)
class _Copy:
    """A trained copy, and the module that was copied."""

    name: str
    path: str
    own: str
    module: str
    adapter: str


@dataclass(frozen=True, slots=True)
class _Refused:
    """A tensor of an adapter that is not LoRA as it is read here."""

    name: str
    reason: str


_OfModel = _Weight | _Original | _Copy
_Kind = _Side | _OfModel | _Refused


def split_adapter(tensors: Mapping[str, Recipe]) -> Split:
    """Tell a checkpoint's tensors apart; without PEFT's names in it, all are the model's.

    Raises:
        ConversionError: the adapter is not LoRA, or there are several, or matrices are missing.
    """
    if not any(_is_of_peft(name) for name in tensors):
        return Split(dict(tensors))
    kinds = [_kind_of(name) for name in tensors]
    _refuse([kind for kind in kinds if isinstance(kind, _Refused)])
    _check_one_adapter(kinds)
    pairs = _pairs([kind for kind in kinds if isinstance(kind, _Side)], tensors)
    if not pairs:
        raise ConversionError(
            f"the names are PEFT's ({next(filter(_is_of_peft, tensors))} …), and no LoRA pair is "
            "among them",
            hint="merge adapters of other kinds into the model with peft, before saving",
        )
    of_model = [kind for kind in kinds if isinstance(kind, _Weight | _Original | _Copy)]
    kept = _kept(of_model)
    base = {own: tensors[kind.name] for own, kind in kept.items()}
    copies = [kind for kind in kept.values() if isinstance(kind, _Copy)]
    adapter_only = _lacks_weights(base, pairs)
    whole = kept.values() if adapter_only else copies
    return Split(
        base,
        pairs,
        saved={kind.path: tensors[kind.name] for kind in whole},
        saved_modules=tuple(dict.fromkeys(kind.module for kind in copies)),
        adapter_only=adapter_only,
    )


def _is_of_peft(name: str) -> bool:
    parts = name.split(".")
    marked = any(part.startswith("lora_") or part in _TOKENS for part in parts)
    return marked or f".{FRONT}" in f".{name}"


def _kind_of(name: str) -> _Kind:
    outside, _, inside = f".{name}".partition(f".{FRONT}")
    if not inside:
        outside, inside = "", name
    front, parts = f"{outside}.".removeprefix("."), inside.split(".")
    if _TOKENS & set(parts):
        return _Refused(name, _TRAINED_TOKENS)
    lora = next((at for at, part in enumerate(parts) if part.startswith("lora_")), None)
    if lora is not None:
        return _side_of(name, front, parts, lora)
    if _ORIGINAL in parts:
        path = ".".join(part for part in parts if part != _ORIGINAL)
        return _Original(name, path, _own(front + path))
    if _COPY in parts[:-2]:
        at = parts.index(_COPY)
        path = ".".join(parts[:at] + parts[at + 2 :])
        module = _own(front + ".".join(parts[:at]))
        return _Copy(name, path, _own(front + path), module, parts[at + 1])
    return _Weight(name, inside, _own(front + inside))


def _side_of(name: str, front: str, parts: list[str], at: int) -> _Side | _Refused:
    """Return the matrix whose name says so in its part `at`."""
    word, rest = parts[at], parts[at + 1 :]
    if word == "lora_magnitude_vector":
        return _Refused(name, _DORA)
    if rest[-1:] == ["bias"]:
        return _Refused(name, _BIAS)
    if {_COPY, _ORIGINAL} & set(parts[:at]):
        return _Refused(name, _NESTED)
    _, is_embedding = _SIDES.get(word, ("", False))
    adapter = rest if is_embedding else rest[:-1]
    is_weight = is_embedding or rest[-1:] == ["weight"]
    if word not in _SIDES or at == 0 or not is_weight or len(adapter) > 1:
        return _Refused(name, _UNKNOWN)
    path = ".".join(parts[:at])
    return _Side(name, path, _own(front + path), word, adapter[0] if adapter else None)


def _own(name: str) -> str:
    """Return a name without PEFT's wrappers."""
    if _WRAPPER not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


def _refuse(refused: list[_Refused]) -> None:
    """Say, once per reason, what cannot be read."""
    problems = []
    for reason in dict.fromkeys(kind.reason for kind in refused):
        names = [kind.name for kind in refused if kind.reason == reason]
        what = f"{len(names)} tensors ({names[0]} …) belong to an adapter that is {reason}"
        hint = "merge the adapter into the model with peft, before saving"
        problems.append(ConversionError(what, hint=hint))
    raise_all(ConversionError, "adapters that can be neither fused nor written", problems)


def _check_one_adapter(kinds: Iterable[_Kind]) -> None:
    adapters = {kind.adapter for kind in kinds if isinstance(kind, _Side | _Copy)} - {None}
    if len(adapters) > 1:
        raise ConversionError(
            f"the checkpoint holds {len(adapters)} adapters",
            expected="one",
            found=", ".join(sorted(map(str, adapters))),
            hint="save the model with the adapter that is wanted, and no other",
        )


def _pairs(sides: Iterable[_Side], tensors: Mapping[str, Recipe]) -> dict[str, Pair]:
    """Put matrices together, or raise a `ConversionError` that says which have no partner."""
    found: dict[str, dict[str, _Side]] = {}
    problems: list[ConversionError] = []
    for side in sides:
        first = found.setdefault(side.path, {}).setdefault(side.word, side)
        if first is not side:
            what = f"tensors {first.name} and {side.name} are one matrix, with the adapter's name "
            problems.append(ConversionError(f"{what}and without it"))
    pairs = {}
    for path, halves in found.items():
        is_embedding = "lora_embedding_A" in halves
        a, b = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
        if halves.keys() == {a, b}:
            recipes = tensors[halves[a].name], tensors[halves[b].name]
            pairs[path] = Pair(path, halves[a].module, *recipes, is_embedding)
        else:
            one = next(iter(halves.values())).name
            expected, there = f"{a} and {b}", " and ".join(halves)
            what = f"the pair of {one} is not whole"
            problems.append(ConversionError(what, expected=expected, found=there))
    raise_all(ConversionError, f"LoRA pairs are damaged: {len(found)} in all", problems)
    return pairs


def _kept(of_model: list[_OfModel]) -> dict[str, _OfModel]:
    """Return the model's tensors by their own names: trained copies where there are any."""
    kept: dict[str, _OfModel] = {}
    problems: list[ConversionError] = []
    for kind in of_model:
        first = kept.setdefault(kind.own, kind)
        match first, kind:
            case _Original(), _Copy():
                kept[kind.own] = kind
            case _Copy(), _Original():
                pass
            case _ if first is not kind:
                what = f"{first.name} and {kind.name} have one name without PEFT's, {kind.own}"
                problems.append(ConversionError(what))
    for kind in kept.values():
        if isinstance(kind, _Original):
            what = f"tensor {kind.name}: the copy that was trained ({_COPY}) is missing"
            problems.append(ConversionError(what))
    raise_all(ConversionError, "tensors beside the adapter's", problems)
    return kept


def _lacks_weights(base: Mapping[str, Recipe], pairs: Mapping[str, Pair]) -> bool:
    """Tell whether all this is an adapter's: it may have biases, whole modules, and embeddings."""
    owners = {name.rpartition(".")[0] for name in base}
    matrices = {name.rpartition(".")[0] for name, one in base.items() if len(shape_of(one)) > 1}
    modules = {pair.module for pair in pairs.values() if not pair.is_embedding}
    if modules:
        return not modules & matrices
    return owners <= {pair.module for pair in pairs.values()}
