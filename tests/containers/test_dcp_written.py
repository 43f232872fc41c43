"""The metadata of DCP that is written is what torch wrote, byte for byte."""

import pickletools
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import cast

import pytest

from unshard.containers.pickles.records import Record
from unshard.containers.torch_files.dcp_metadata import (
    ItemPath,
    Place,
    SavedItem,
    SavedObject,
    SavedPart,
    SavePlan,
    metadata_pickle,
)
from unshard.containers.torch_files.reader import unpickled
from unshard.read.torch_save.values import dtype_named, ints, sizes_of, state_of

ARCHIVE = Path(__file__).parent.parent / "data" / "dcp.tar.xz"


def rewritten(path: Path, version: tuple[int, int]) -> bytes:
    """Return what is written for the plan and the places that a file of torch has."""
    fields = state_of(unpickled(path, path.read_bytes()))
    paths = cast(dict[str, ItemPath], fields["planner_data"])
    described = cast(dict[str, Record], fields["state_dict_metadata"])
    ranks: dict[str, list[tuple[SavedItem, Place]]] = {}
    for index, info in cast(dict[Record, Record], fields["storage_data"]).items():
        at, place = state_of(index), place_of(state_of(info))
        name = cast(str, at["fqn"])
        ranks.setdefault(place.file, []).append((item(name, at, paths, described), place))
    order = list(paths.values())
    planned = [
        sorted(items, key=lambda pair: order.index(pair[0].path)) for items in ranks.values()
    ]
    meta = state_of(fields["storage_meta"])
    directory = meta["checkpoint_id"]
    assert isinstance(directory, Record)
    return metadata_pickle(
        SavePlan(list(paths.values()), [[one for one, _ in items] for items in planned]),
        [[place for _, place in items] for items in planned],
        version,
        checkpoint_id=PurePosixPath(*cast(tuple[str, ...], directory.args)),
        save_id=cast(str, meta["save_id"]),
    )


def place_of(info: Mapping[str, object]) -> Place:
    match info:
        case {"relative_path": str(file), "offset": int(offset), "length": int(length)}:
            return Place(file, offset, length)
    raise AssertionError(info)


def item(
    name: str, at: dict[str, object], paths: dict[str, ItemPath], described: dict[str, Record]
) -> SavedItem:
    if "offset" not in at:
        return SavedObject(paths[name], b"")
    whole = state_of(described[name])
    properties = whole["properties"]
    assert isinstance(properties, Record)
    boxes = [state_of(one) for one in cast(list[Record], whole["chunks"])]
    sizes = next(ints(box["sizes"]) for box in boxes if ints(box["offsets"]) == ints(at["offset"]))
    dtype = dtype_named(cast(tuple[object, ...], properties.state)[0])
    return SavedPart(paths[name], dtype, sizes_of(whole["size"]), ints(at["offset"]), sizes)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the checkpoints; see tests/data/README.md."""
    directory = tmp_path_factory.mktemp("dcp")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.mark.parametrize("version", ["2.4", "2.5", "2.6", "2.8", "2.9", "2.10", "2.12"])
def test_the_metadata_of_other_versions_is_rewritten_byte_for_byte(
    version: str, checkpoints: Path
) -> None:
    found = sorted((checkpoints / f"torch-{version}").rglob(".metadata"))
    assert len(found) >= 2
    for path in found:
        ours = rewritten(path, (2, int(version.split(".")[1])))
        if "optimizer" in path.parent.name:
            # Which equal names of the optimizer were one string depends on the trainer.
            assert spelled_out(ours) == spelled_out(path.read_bytes())
        else:
            assert ours == path.read_bytes()


def spelled_out(pickle: bytes) -> list[tuple[str, object]]:
    """Return the opcodes of a pickle, with strings in place of references to strings."""
    found: list[tuple[str, object]] = []
    memo: list[tuple[str, object]] = []
    for opcode, value, _ in pickletools.genops(pickle):
        if opcode.name == "MEMOIZE":
            memo.append(found[-1] if "UNICODE" in found[-1][0] else ("GET", len(found)))
        elif "GET" in opcode.name:
            found.append(memo[cast(int, value)])
        elif opcode.name != "FRAME":
            found.append((opcode.name, value))
    return found
