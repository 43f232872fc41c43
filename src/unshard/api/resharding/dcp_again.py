"""DCP for another number of ranks: every tensor and object of the checkpoint, under its own name.

Nothing is interpreted, so what only the trainer knows stays where it looks for it.
"""

import re
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path, PurePosixPath

from unshard.api.resharding.anew.placing import cut_dimension, placed_alone
from unshard.api.resharding.target import Target
from unshard.api.resharding.writing import Addition, Writing, random_note, trainer_rng
from unshard.containers.open_files import opened
from unshard.containers.strided import read_exactly
from unshard.containers.torch_files.dcp_metadata import SavedObject
from unshard.containers.zstd import decompress
from unshard.errors import NotMergeableError
from unshard.plan.dcp_resharding import DcpDirectory, SavedEntry, lay_out_directories
from unshard.read.dcp.items import inflate, inflated_bytes
from unshard.read.dcp.metadata import Item, read_metadata
from unshard.read.dcp.optimizer import place_of, places_beside
from unshard.read.dcp.tensors import metadata_files, read_tensors
from unshard.read.format import Location
from unshard.read.open import Checkpoint, check_coverage
from unshard.tensors.catalog import Catalog
from unshard.write.stage import scratch_directory

_LARGEST = 1 << 30
"""Bytes of a compressed object."""
_SMALL = re.compile(
    r"scheduler(_\d+)?\.bin|scheduler\.pt|sampler(_\d+)?\.bin|trainer_state\.json|meta\.pt"
    r"|training_args\.bin|custom_checkpoint_\d+\.pkl|scaler\.pt|dl_state_dict(_\d+)?\.bin"
)
_OF_RANK = re.compile(
    r"random_states_(?P<accelerate>\d{1,5})\.pkl|rng_state(_(?P<hf>\d{1,5}))?\.pth"
)


def dcp_again(source: Checkpoint, target: Target, output: Path, stack: ExitStack) -> Writing:
    """Return what is written of a DCP checkpoint; the stack removes what is decompressed for it.

    Raises:
        NotMergeableError: it was saved without flattening, so torch kept one rank's part only.
        CheckpointError: a tensor has holes, or an object cannot be read.
    """
    places = [source.location, *places_beside(source.location)]
    root = source.location.weights_dir
    if len(places) > 1 or root.name.startswith("pytorch_model_fsdp_"):
        root = root.parent
    directories = [
        DcpDirectory("" if one.weights_dir == root else one.weights_dir.name, _items(one, stack))
        for one in places
    ]
    world = len(target.meshes)
    place = PurePosixPath(output.absolute())
    made, metadata = lay_out_directories(directories, world, target.version, place)
    files = Addition(data=metadata)
    _add_small(source, root, world, files)
    return Writing(made, files)


def _items(place: Location, stack: ExitStack) -> list[SavedEntry | SavedObject]:
    """Return everything that a directory has, in its order."""
    metadata = read_metadata(metadata_files(place))
    if not metadata.steps:
        raise NotMergeableError(
            f"{place.weights_dir}: was saved without flattening (flatten_state_dict=False)",
            expected="tensors under names of their own",
            hint="give --to FORMAT, which writes the model alone",
        )
    found, _ = read_tensors(metadata, {name: name for name in metadata.tensors}, place.roots)
    catalog = Catalog("", 1, found, roots=place.roots)
    check_coverage(catalog)
    if inflated_bytes(catalog):
        catalog = inflate(catalog, scratch_directory(stack) / "items")
    tensors = catalog.tensors
    items: list[SavedEntry | SavedObject] = []
    for name, path in metadata.steps.items():
        if name in metadata.objects:
            items.append(SavedObject(path, _data(*place_of(metadata, place, name), name)))
        elif name in tensors:
            entry = placed_alone(tensors[name])
            items.append(SavedEntry(path, entry, entry.dtype, cut_dimension(entry)))
    return items


def _data(path: Path, item: Item, name: str) -> bytes:
    """Return what an object contains."""
    with opened(path) as file:
        if item.compressed:
            out = BytesIO()
            decompress(f"{path}: {name}", file, (item.offset, item.length), out, _LARGEST)
            return out.getvalue()
        data = bytearray(item.length)
        read_exactly(file, item.offset, memoryview(data))
        return bytes(data)


def _add_small(source: Checkpoint, root: Path, world: int, files: Addition) -> None:
    """Add the files next to the weights that a trainer resumes from."""
    for path in source.companions.paths.values():
        if path.is_relative_to(root):
            files.copied[str(path.relative_to(root))] = path
    ranks: dict[bool, dict[int, Path]] = {}
    for path in sorted(root.iterdir()):
        match = _OF_RANK.fullmatch(path.name)
        if match:
            number = int(match["accelerate"] or match["hf"] or 0)
            ranks.setdefault(match["accelerate"] is None, {})[number] = path
        elif _SMALL.fullmatch(path.name):
            files.copied[path.name] = path
    for is_trainer, found in ranks.items():
        before = max(found) + 1
        for rank in range(world):
            name = trainer_rng(rank, world) if is_trainer else f"random_states_{rank}.pkl"
            if rank % before in found:
                files.copied[name] = found[rank % before]
            else:
                files.notes.append(f"rank {rank} gets no random state: the file is missing")
        if before != world:
            files.notes.append(random_note(before, world))
