"""The merger of lmms-engine: `from unshard.merger import FSDP2Merger` for `lmms_engine.merger`.

Importing it imports nothing else, so that `python -m unshard.merger` handles signals first.
"""

TYPE_CHECKING = False  # as type checkers know it; importing typing takes time
if TYPE_CHECKING:
    from unshard.merger.base import CheckpointMerger
    from unshard.merger.fsdp2 import FSDP2Merger

__all__ = ["CheckpointMerger", "FSDP2Merger"]


def __getattr__(name: str) -> object:
    if name == "CheckpointMerger":
        from unshard.merger.base import CheckpointMerger

        return CheckpointMerger
    if name == "FSDP2Merger":
        from unshard.merger.fsdp2 import FSDP2Merger

        return FSDP2Merger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
