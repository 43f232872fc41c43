"""The merger of lmms-engine: `from unshard.merger import FSDP2Merger` for `lmms_engine.merger`."""

from unshard.merger.base import CheckpointMerger
from unshard.merger.fsdp2 import FSDP2Merger

__all__ = ["CheckpointMerger", "FSDP2Merger"]
