"""What every merger can do, for those who write their own: the base class of lmms-engine."""

from abc import ABC, abstractmethod
from pathlib import Path

__all__ = ["CheckpointMerger"]


class CheckpointMerger(ABC):
    """Something that merges checkpoints."""

    @abstractmethod
    def merge(self, checkpoint_path: Path, output_path: Path | None = None) -> Path:
        """Merge a checkpoint and return where its model lies.

        Args:
            checkpoint_path: the sharded checkpoint.
            output_path: where to; None: into `checkpoint_path`.
        """
