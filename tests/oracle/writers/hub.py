"""Scenarios of the Hugging Face world by name: torch's storage writer, accelerate, transformers.

They make a tree below the directory, as those tools do; the truth is next to it, as always.
"""

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from oracle.writers.scenarios import Scenario

__all__ = ["HUB_SCENARIOS", "LIBRARIES", "MERGE_WITH_ACCELERATE"]


@dataclass(frozen=True)
class _Later:
    """A scenario that only its own processes import: transformers and accelerate take seconds."""

    module: str
    name: str

    def __call__(self, rank: int, world: int, directory: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when they are imported
        scenario: Scenario = getattr(import_module(f"oracle.writers.{self.module}"), self.name)
        scenario(rank, world, directory)


_NAMES = {
    "storage": (
        "storage_consolidated",
        "storage_consolidated_extras",
        "storage_consolidated_files",
        "storage_consolidated_scalar",
        "storage_extras",
        "storage_extras_files",
        "storage_files",
        "storage_shards",
        "storage_whole",
        "storage_whole_files",
    ),
    "pretrained": ("pretrained_hsdp", "pretrained_shards", "pretrained_tp"),
    "accelerate": (
        "accelerate_bins_fsdp1",
        "accelerate_bins_fsdp2",
        "accelerate_fsdp1",
        "accelerate_fsdp2",
        "accelerate_full",
        "accelerate_local",
    ),
    "trainer": ("trainer_fsdp1", "trainer_fsdp2", "trainer_full"),
}

HUB_SCENARIOS: dict[str, Scenario] = {
    name: _Later(module, name) for module, names in _NAMES.items() for name in names
}

MERGE_WITH_ACCELERATE: Scenario = _Later("accelerate", "accelerate_merge")
LIBRARIES: Scenario = _Later("libraries", "save_libraries")
