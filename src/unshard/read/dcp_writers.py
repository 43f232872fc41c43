"""Who wrote a DCP checkpoint, by what lies beside it; and the modules that wrap the model there.

Lightning saves the LightningModule and Composer the ComposerModel, whose attribute holds the model
itself: every name starts with it (`model.model.norm.weight`). Nothing else is taken off a name.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from unshard.containers.torch_file import read_torch_file
from unshard.read.dcp_metadata import DcpMetadata
from unshard.read.format import Location
from unshard.read.pickle_values import items_of

__all__ = ["training_state", "without_wrapper_module", "writer_of"]

_LIGHTNING, _COMPOSER = "Lightning", "Composer"
_TRAINING_STATE = (
    "optimizer_*",
    "optim",
    "scheduler.bin",
    "scheduler.pt",
    "random_states_*.pkl",
    "rng_state*.pth",
    "sampler*.bin",
    "trainer_state.json",
    "meta.pt",
    "train",
)


def writer_of(location: Location, metadata: DcpMetadata, prefix: tuple[str, ...]) -> str:
    """Return the tool that wrote a checkpoint, as far as its files and paths tell."""
    folder, step = location.weights_dir, location.step_dir
    if folder.name.startswith("pytorch_model_fsdp_"):
        trainer = (step / "trainer_state.json").is_file()
        return "HF Trainer (accelerate)" if trainer else "accelerate"
    if os.path.lexists(folder / "meta.pt"):
        return _LIGHTNING if _is_lightning_trainer(folder / "meta.pt") else "Lightning Fabric"
    if prefix == ("state", "model"):
        return _COMPOSER
    if folder.name == "model_and_optim":
        return "OLMo-core"
    roots = {path[0] for path in metadata.paths.values() if path}
    if not prefix and "train_state" in roots:
        return "torchtitan"
    return "torch"


def _is_lightning_trainer(meta: Path) -> bool:
    """Tell Lightning's Trainer, which saves a LightningModule, from Fabric, which does not."""
    items = items_of(read_torch_file(meta).value)
    return items is not None and "pytorch-lightning_version" in items


def without_wrapper_module(names: Mapping[str, str], writer: str) -> dict[str, str]:
    """Take the attribute of a LightningModule or ComposerModel off all names, if all have it."""
    first = {name.partition(".")[0] for name in names.values()}
    if writer not in (_LIGHTNING, _COMPOSER) or len(first) != 1:
        return dict(names)
    return {flat: name.partition(".")[2] or name for flat, name in names.items()}


def training_state(location: Location) -> tuple[Path, ...]:
    """Return what lies beside the model: optimizer, scheduler, random state."""
    found = {path for pattern in _TRAINING_STATE for path in location.step_dir.glob(pattern)}
    return tuple(sorted(found))
