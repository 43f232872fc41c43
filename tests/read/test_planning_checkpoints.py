"""The checkpoints that `benchmarks/planning.py` makes up are read as those that torch saves."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_tables import items_of as stored_items
from dcp_tables import plain, read_items
from unshard.containers.torch_files.zip import read_torch_zip
from unshard.read.dcp.items import StoredItem
from unshard.read.dcp.metadata import read_metadata

SHAPES = {"model.norm.weight": (100,), "model.layers.0.up.weight": (300, 64), "w": (2, 3, 5)}


@pytest.fixture
def planning() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "planning.py"
    spec = spec_from_file_location("planning", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def items_of(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return of every tensor: what describes it, its item's length, its view and its pickle."""
    metadata = read_metadata([directory / ".metadata"])
    found: dict[str, tuple[object, ...]] = {}
    for (name, offsets), item in stored_items(metadata).items():
        window = directory / item.path, item.offset, item.length
        (stored,) = read_items([window])
        assert isinstance(stored, StoredItem)
        archive = read_torch_zip(window[0], offset=item.offset, length=item.length)
        start = stored.start - item.offset
        described = plain(metadata.tensors[name]), metadata.paths[name], offsets
        found[name] = (*described, item.length, stored.view, start, archive.pickle)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_items_of_dcp_are_those_that_torch_saves(planning: ModuleType, tmp_path: Path) -> None:
    made, saved = tmp_path / "made", tmp_path / "saved"
    made.mkdir()
    planning.write_dcp(made, SHAPES, 1)
    state = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    save(state, checkpoint_id=saved, no_dist=True)
    assert items_of(made) == items_of(saved)
