"""Finds the model in a DCP checkpoint: tensors by name, or one pickled object.

`dcp.save` takes a nested dict and stores it flat; the metadata keeps every value's path. The model
is below a key `model` (or another of a few words): `("model", "model.norm.weight")` is the tensor
`model.norm.weight` of accelerate, while `("model.norm.weight",)` is that of a flat dict, as
torchtitan saves it. No prefix is guessed from the names themselves. Lightning saves the
LightningModule and Composer the ComposerModel, whose attribute is the model; this first part of
every name (`model.model.norm.weight`) is removed.

An optimizer's state that was flattened (`torch.distributed.checkpoint.state_dict` does it:
`state.<name>.exp_avg`, `….step`, `param_groups.<name>.lr`) is recognised by its groups, or by the
ends of its names.

With `flatten_state_dict=False` every dict is pickled as one object, and torch keeps rank 0's copy
only. It has all plain tensors, but only rank 0's parts of DTensors.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from unshard.containers.torch_files.reader import read_torch_file
from unshard.errors import CorruptError, IncompleteError, NotMergeableError, raise_all
from unshard.read.dcp.metadata import DcpMetadata, read_metadata
from unshard.read.dcp.names import ACCELERATE, MODEL_KEYS, OTHER_KEYS
from unshard.read.dcp.tensors import metadata_files, read_catalog
from unshard.read.format import Location, ReadOptions, find_file
from unshard.read.torch_save.gathering import Gathering
from unshard.read.torch_save.state_dict import tensors_of
from unshard.read.torch_save.values import is_lightning, is_tensor, items_of
from unshard.read.wrapper_names import without_wrapper_module
from unshard.tensors.catalog import ByteRange, Catalog, Skipped

_BY_PREFIX = {  # the tools, by the keys under which they save the model
    ("state", "model"): "Composer",
    ("app", "model"): "prime-rl",
    ("fsdp_checkpoint", "model"): "RLinf",
}
_TRAINING_STATE = """
    optimizer_* optim scheduler.bin scheduler.pt random_states_*.pkl rng_state*.pth sampler*.bin
    trainer_state.json meta.pt train
""".split()
_MOMENTS = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_avg_sq_row exp_avg_sq_col momentum_buffer".split()
)
_LISTED = 8

_KeyPath = tuple[str, ...]
"""The keys that lead to a value in the saved dict."""


def read(location: Location, options: ReadOptions) -> Catalog:
    """Read the model of a checkpoint."""
    metadata = read_metadata(metadata_files(location))
    is_object = not metadata.paths and any(name in metadata.objects for name in MODEL_KEYS)
    if is_object or not metadata.tensors:
        return _read_object(metadata, location, options)
    model = model_names(metadata, str(location.weights_dir))
    writer = _writer(location, metadata, model.prefix)
    names = model.names
    if writer in {"Lightning", "Composer"}:  # they save a module around the model
        names = without_wrapper_module(names)
    step = location.step_dir
    return replace(
        read_catalog(metadata, names, location),
        writer=writer,
        skipped=model.skipped,
        training_state=tuple(sorted({p for glob in _TRAINING_STATE for p in step.glob(glob)})),
    )


def _writer(location: Location, metadata: DcpMetadata, prefix: tuple[str, ...]) -> str:
    """Return the tool that wrote a checkpoint, as far as its files and paths show."""
    folder, step = location.weights_dir, location.step_dir
    if folder.name.startswith(ACCELERATE):
        trainer = (step / "trainer_state.json").is_file()
        return "HF Trainer (accelerate)" if trainer else "accelerate"
    meta = folder / "meta.pt"
    if meta.exists() or meta.is_symlink():  # a broken link is an error, not a sign of Fabric
        value = read_torch_file(meta).value
        if items_of(value) is None:
            raise CorruptError(f"{meta}: not what Lightning saves there", expected="a dict")
        return "Lightning" if is_lightning(value) else "Lightning Fabric"
    if prefix in _BY_PREFIX:
        return _BY_PREFIX[prefix]
    if folder.name == "model_and_optim":
        return "OLMo-core"
    roots = {path[0] for path in metadata.paths.values() if path}
    return "torchtitan" if not prefix and "train_state" in roots else "torch"


class ModelNames(NamedTuple):
    """The model among the values of a checkpoint.

    Attributes:
        prefix: the path of the model: ("model",), or () for a flat dict.
        names: flat name -> the tensor's name in the model's own state dict, in order.
        skipped: everything else, many values of one kind as one.
    """

    prefix: _KeyPath
    names: Mapping[str, str]
    skipped: tuple[Skipped, ...]


def model_names(metadata: DcpMetadata, where: str) -> ModelNames:
    """Return the names of the model's tensors; `where` names the checkpoint in messages.

    Raises:
        NotMergeableError: several sets of tensors may be the model; or they are an optimizer's.
    """
    paths = {name: metadata.paths.get(name, (name,)) for name in metadata.tensors}
    moments = _of_optimizer(metadata, paths)
    prefixes = {name: _prefix(path) for name, path in paths.items()}
    flattened = sorted(name for name in moments if prefixes[name] is not None)
    prefixes |= dict.fromkeys(moments)
    prefix = _choose(metadata, prefixes, where)
    if prefix is None and flattened:
        raise NotMergeableError(
            f"{where}: an optimizer's state, not a model",
            expected="the weights of a model",
            found=f"{len(flattened)} values, such as {flattened[-1]}",
            hint="the model is in another directory: pass that one, or the step above both",
        )
    if prefix is None:
        return ModelNames((), {}, tuple(_skipped(metadata, {})))
    names = {
        name: ".".join(paths[name][len(prefix) :]) for name, at in prefixes.items() if at == prefix
    }
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise NotMergeableError(
            f"{where}: {len(twice)} names each belong to several tensors: {twice[0]}",
            found=", ".join(flat for flat, name in names.items() if name == twice[0]),
            hint="the saved dict has keys with dots that equal nested keys; rename one of them",
        )
    return ModelNames(prefix, names, tuple(_skipped(metadata, names)))


def _of_optimizer(metadata: DcpMetadata, paths: Mapping[str, _KeyPath]) -> frozenset[str]:
    """Return the names that belong to an optimizer's state; the model's keys are never its own."""
    outside = {name: path for name, path in paths.items() if not {*MODEL_KEYS} & {*path[:-1]}}
    flat = {name: ".".join(path) for name, path in outside.items()}
    owners = {owner for name in flat.values() if (owner := name.rpartition("."))[2] in _MOMENTS}
    stems = {stem for stem, _, _ in owners}
    for name in metadata.objects:  # where a group lists the parameter, its moments have any names
        before, is_group, rest = ".".join(metadata.paths.get(name, ())).partition("param_groups.")
        stems |= {f"{before}state.{rest.rpartition('.')[0]}"} if is_group else set()
    return frozenset(
        name
        for name, whole in flat.items()
        if whole.rpartition(".")[0] in stems
        or _is_of_group(whole, stems, is_number=not metadata.tensors[name].shape)
    )


def _is_of_group(name: str, stems: Collection[str], *, is_number: bool) -> bool:
    """Return whether a tensor is a setting of the optimizer, `param_groups.NAME.lr`.

    A parameter may have such a name, too. `stems` are `state.NAME` of parameters with moments;
    `is_number` means no dimensions, as numbers of a group have none.
    """
    start, _, rest = name.partition(".")
    if start != "param_groups" or f"state.{name}" in stems:
        return False
    return f"state.{rest.rpartition('.')[0]}" in stems or (bool(stems) and is_number)


def _prefix(path: _KeyPath) -> _KeyPath | None:
    """Return the path of the set of tensors that a tensor belongs to; None for training state."""
    container = path[:-1]
    for depth, word in enumerate(container):
        if word in OTHER_KEYS or word.startswith("optim"):
            return None
        if word in MODEL_KEYS:
            inner = container[depth + 1 :]
            return None if any(part in OTHER_KEYS for part in inner) else container[: depth + 1]
    return container[:1]


def _choose(
    metadata: DcpMetadata, prefixes: Mapping[str, _KeyPath | None], where: str
) -> _KeyPath | None:
    """Return the prefix of the model; None if there is none."""
    counts = Counter([at for at in prefixes.values() if at is not None])
    named = [at for at in counts if at and at[-1] in MODEL_KEYS]
    top = [metadata.tensors[name] for name, at in prefixes.items() if at == ()]
    if not any(tensor.shape for tensor in top):
        del counts[()]  # counters next to the state dict
    candidates = named or list(counts)
    if len(candidates) > 1:
        sets = [(".".join(at) or "the top level", counts[at]) for at in candidates]
        raise NotMergeableError(
            f"{where}: several sets of tensors; it is unclear which is the model",
            expected="one, under `model` or at the top level",
            found=", ".join(f"{name} ({count})" for name, count in sets),
            hint="save the model alone, or under `model`",
        )
    return candidates[0] if candidates else None


def _skipped(metadata: DcpMetadata, names: Mapping[str, str]) -> Iterable[Skipped]:
    """Yield the values that are left out; those of one container together, if there are many."""
    groups: dict[str, list[tuple[str, str]]] = {}
    others = [(name, "tensor") for name in metadata.tensors if name not in names]
    others += [(name, "object") for name in metadata.objects]
    for name, kind in others:
        path = metadata.paths.get(name, (name,))
        depth = 2 if path[0] in ("state", "app") and len(path) > 2 else 1
        groups.setdefault(".".join(path[:depth]), []).append((name, kind))
    for group, values in groups.items():
        if len(values) <= _LISTED:
            yield from (Skipped(name, f"not model weights: {kind}") for name, kind in values)
        else:
            counts = Counter(kind for _, kind in values)
            shown = " and ".join(f"{count} {kind}s" for kind, count in counts.items())
            yield Skipped(f"{group}.*", f"not model weights: {shown}")


def _read_object(metadata: DcpMetadata, location: Location, options: ReadOptions) -> Catalog:
    """Read the model's state dict from a pickled object."""
    where = location.weights_dir
    names = [name for name in MODEL_KEYS if name in metadata.objects]
    if not names:
        raise NotMergeableError(
            f"{where}: has no tensors, only {len(metadata.objects)} pickled objects",
            found=", ".join(list(metadata.objects)[:8]),
            hint="if this is the optimizer's directory, pass its parent",
        )
    (name, *_) = names
    window = _window(metadata, location, name)
    archive = read_torch_file(window.path, offset=window.offset, length=window.length)
    items = items_of(archive.value)
    if items is None or not any(is_tensor(value) for value in items.values()):
        raise NotMergeableError(f"{window.path}: {name} is not a state dict")
    table = tensors_of(archive, items, rank=0, file_number=0, allowed=options.allowed_globals)
    gathered = Gathering()
    gathered.add(table)
    raise_all(NotMergeableError, f"{where}: {name} cannot be merged", gathered.problems)
    if table.world_size > 1:
        raise NotMergeableError(
            f"{where}: {name} was saved as one object (flatten_state_dict=False)",
            expected="the parts of all ranks",
            found=f"rank 0's part of {table.world_size} ranks; torch kept no other part",
            hint="save it again with the default planner",
        )
    others = [Skipped(other, "not model weights: object") for other in metadata.objects]
    others += [Skipped(other, "not model weights: tensor") for other in metadata.tensors]
    return Catalog(
        writer="torch",
        world_size=1,
        tensors=gathered.entries((window.path,)),
        skipped=(*gathered.skipped.values(), *(other for other in others if other.fqn != name)),
        archives=(window,),
        notes=(f"{where}: saved without flattening; the tensors are rank 0's",),
    )


def _window(metadata: DcpMetadata, location: Location, name: str) -> ByteRange:
    item = metadata.items.get(name)
    path = None if item is None else find_file(location.roots, item.path)
    if item is None or path is None:
        raise IncompleteError(f"{location.weights_dir}: the file that contains {name} is missing")
    if item.compressed:
        raise NotMergeableError(f"{path}: {name} is a compressed object, which cannot be read")
    if item.offset + item.length > path.stat().st_size:
        raise IncompleteError(f"{path}: truncated: {name} is outside the file")
    return ByteRange(path, item.offset, item.length)
