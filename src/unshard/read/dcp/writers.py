"""Who wrote a DCP checkpoint, by what lies beside it; and the modules that wrap the model there.

Lightning saves the LightningModule and Composer the ComposerModel, whose attribute holds the model
itself: every name starts with it (`model.model.norm.weight`). Nothing else is taken off a name.
"""

import os
from pathlib import Path

from unshard.containers.torch_files.reader import read_torch_file
from unshard.read.dcp.metadata import DcpMetadata
from unshard.read.format import Location
from unshard.read.torch_save.values import items_of

__all__ = ["WRAPPING", "training_state", "writer_of"]

_LIGHTNING, _COMPOSER = "Lightning", "Composer"
WRAPPING = (_LIGHTNING, _COMPOSER)
"""Writers that save a module of their own around the model."""

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


def training_state(location: Location) -> tuple[Path, ...]:
    """Return what lies beside the model: optimizer, scheduler, random state."""
    found = {path for pattern in _TRAINING_STATE for path in location.step_dir.glob(pattern)}
    return tuple(sorted(found))
