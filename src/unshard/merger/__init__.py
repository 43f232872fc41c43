"""lmms-engine's merger: `from unshard.merger import FSDP2Merger` replaces `lmms_engine.merger`.

Importing it imports nothing else, so that `python -m unshard.merger` handles signals first.
"""

__all__ = ["CheckpointMerger", "FSDP2Merger"]

TYPE_CHECKING = False  # a name that type checkers recognise; importing typing takes time
if TYPE_CHECKING:
    from unshard.merger.fsdp2 import CheckpointMerger, FSDP2Merger
else:  # hidden from type checkers, which would accept any name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from unshard.merger import fsdp2

        return getattr(fsdp2, name)
