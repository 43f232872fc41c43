"""The merger of lmms-engine: `from unshard.merger import FSDP2Merger` for `lmms_engine.merger`.

Importing it imports nothing else, so that `python -m unshard.merger` handles signals first.
"""

__all__ = ["CheckpointMerger", "FSDP2Merger"]

TYPE_CHECKING = False  # as type checkers know it; importing typing takes time
if TYPE_CHECKING:
    from unshard.merger.fsdp2 import CheckpointMerger, FSDP2Merger
else:  # not for type checkers, to which any name would exist then

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from unshard.merger import fsdp2

        return getattr(fsdp2, name)
