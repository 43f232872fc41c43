"""Reader for Megatron-core's `torch_dist`: DCP under Megatron's names, and the files next to it.

Written by Megatron-LM, Megatron-Bridge, NeMo, slime, miles, verl and ms-swift. `metadata.json` is
written last; `common.pt` has the state that all ranks share, among it the training's arguments.
The names stay Megatron's here; `convert.megatron` translates them into those of the hub. Values
other than the model's tensors are left out: the optimizer's state, random state, and the
`_extra_state` of modules.

Megatron-FSDP's `fsdp_dtensor` is DCP as torch itself saves it, and is read as such. One file per
rank and `zarr`, both older, are refused.

Source: `megatron.core.dist_checkpointing` and `megatron.training.checkpointing` 0.11 to 0.16.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.containers.json_file import JsonFields, json_object
from unshard.containers.pickles.records import Record
from unshard.containers.torch_files.reader import read_torch_file
from unshard.errors import CorruptError, IncompleteError, NotMergeableError
from unshard.read.dcp.reader import DCP
from unshard.read.format import Format, Location, ReadOptions, ReshardFormat, find_file
from unshard.read.tree import Tree
from unshard.tensors.catalog import Catalog, Skipped

if TYPE_CHECKING:
    from unshard.read.dcp.metadata import DcpMetadata

_METADATA, _COMMON = "metadata.json", "common.pt"
_BACKEND = "sharded_backend"
_DCP_BACKENDS = ("fsdp_dtensor", "torch_dcp")
_LEGACY = ("model_optim_rng.pt", "distrib_optim.pt")
_CONVERT = "convert it with Megatron's tools (--ckpt-convert-format torch_dist), and merge that"
_LONGEST = 256  # values of a tuple: at most one per layer
_MOST = 1 << 62  # larger numbers are not kept: their text may be of any length
# Patterns of names, with the group and the kind of their values.
_OTHERS = tuple(
    (re.compile(pattern), (group, kind))
    for pattern, group, kind in (
        (r"(?:chained_\d+\.)?optimizer(?:\.|$)", "optimizer.*", "optimizer state"),
        (r"rng_state(?:[./]|$)", "rng_state.*", "random state"),
        (r"rerun_state", "rerun_state_machine.*", "training state"),
        (r"opt_param_scheduler", "opt_param_scheduler.*", "training state"),
        (r".*\._extra_state(?:/|$)", "*._extra_state", "state of modules"),
    )
)


def _holds(tree: Tree, directory: Path) -> bool:
    """Return whether a directory has a step of Megatron: by names, and one key of metadata.json.

    Other tools put a metadata.json next to DCP, too.
    """
    if tree.is_file(directory / _COMMON):
        return True
    if any(tree.glob(directory, "mp_rank_*/model_optim_rng.pt")):
        return True
    is_dcp = tree.is_file(directory / _METADATA) and any(tree.glob(directory, "*.distcp"))
    return is_dcp and _BACKEND in tree.fields(directory / _METADATA)


def _read(location: Location, options: ReadOptions) -> Catalog:
    from unshard.read.dcp.metadata import read_metadata
    from unshard.read.dcp.tensors import metadata_files, read_catalog

    backend = _backend(location)
    if backend in _DCP_BACKENDS:
        return replace(DCP.read(location, options), writer="Megatron-FSDP")
    if backend != "torch_dist":
        raise NotMergeableError(
            f"{location.weights_dir}: a Megatron checkpoint with the backend {backend}",
            expected="torch_dist",
            hint=_CONVERT,
        )
    metadata = read_metadata(metadata_files(location))
    kinds = {  # None for weights
        name: next((kind for pattern, kind in _OTHERS if pattern.match(name)), None)
        for name in (*metadata.tensors, *metadata.objects)
    }
    names = {name: name for name in metadata.tensors if kinds[name] is None}
    common = find_file(location.roots, _COMMON)
    recorded = {} if common is None else read_arguments(common)
    catalog, world = read_catalog(metadata, names, location), recorded.get("world_size")
    trained = world if type(world) is int else 1  # only one rank of each replica wrote
    return replace(
        catalog,
        writer="Megatron-core",
        world_size=max(trained, catalog.world_size),
        skipped=tuple(_skipped(metadata, kinds)),
        training_state=() if common is None else (common,),
        recorded=recorded,
    )


def _missing(location: Location) -> str | None:
    """Return a message if a file of DCP is missing, or Megatron's last file."""
    names = (_COMMON, _METADATA)
    is_begun, is_done = ((location.weights_dir / name).is_file() for name in names)
    is_missing = is_begun and not is_done
    return DCP.missing(location) or (f"{_METADATA} is missing" if is_missing else None)


MEGATRON = Format(
    "Megatron-core distributed checkpoint",
    _holds,
    _read,
    lambda tree, path: path.name in (*_LEGACY, _COMMON) or DCP.claims(tree, path),
    missing=_missing,
    reshards_to=(ReshardFormat.DCP,),
)


def _backend(location: Location) -> str:
    """Return the storage format of the tensors, from metadata.json.

    Raises:
        NotMergeableError: the checkpoint has one file per rank.
        IncompleteError: metadata.json is missing.
        CorruptError: it is damaged.
    """
    where = location.weights_dir
    if next(where.glob("mp_rank_*/model_optim_rng.pt"), None) is not None:
        raise NotMergeableError(
            f"{where}: a Megatron checkpoint of one file per rank (mp_rank_*/model_optim_rng.pt)",
            expected="torch_dist",
            found="files without a record of how the tensors were cut",
            hint=_CONVERT,
        )
    path = find_file(location.roots, _METADATA)
    if path is None:
        raise IncompleteError(
            f"{where}: its {_METADATA} is missing",
            expected=f"{_METADATA}, which Megatron writes last",
            hint="the save was interrupted, or the file was not copied",
        )
    backend = JsonFields(path, json_object(path)).text(_BACKEND)
    if backend is None:
        raise CorruptError(f"{path}: has no {_BACKEND}", hint="take another checkpoint")
    return backend


def _skipped(
    metadata: "DcpMetadata", kinds: dict[str, tuple[str, str] | None]
) -> Iterator[Skipped]:
    groups = Counter(kind for kind in kinds.values() if kind is not None)
    for (group, kind), count in groups.items():
        yield Skipped(group, f"not model weights: {kind} ({count} values)")
    for name in metadata.objects:
        if kinds[name] is None:
            yield Skipped(name, "not model weights: object")


def read_arguments(path: Path) -> Mapping[str, object]:
    """Return the recorded arguments: numbers, text, booleans, None, and few numbers as a tuple.

    The file is a pickle of an `argparse.Namespace` with enums, dtypes and other objects; all of it
    is inert here. NeMo and Megatron-Bridge do not record arguments. Any other value becomes
    "<...>", which distinguishes it from an argument that is not recorded.

    Raises:
        CheckpointError: the file is damaged, or was made to run commands.
    """
    saved = read_torch_file(path).value
    args = saved.get("args") if isinstance(saved, dict) else None
    fields = args.state if isinstance(args, Record) else args
    if not isinstance(fields, dict):
        return {}
    named = ((name, value) for name, value in fields.items() if isinstance(name, str))
    return {name: _argument(value) for name, value in named}


def _argument(value: object) -> object:
    if isinstance(value, tuple | list) and len(value) <= _LONGEST and all(map(_is_number, value)):
        return tuple(value)
    is_plain = _is_number(value) or value is None or type(value) in {bool, str}
    return value if is_plain else "<...>"


def _is_number(value: object) -> bool:
    return type(value) in {int, float} and isinstance(value, int | float) and -_MOST < value < _MOST
