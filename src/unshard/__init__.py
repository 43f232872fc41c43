"""Turn sharded training checkpoints into Hugging Face models: exact, fast, without torch.

    import unshard

    report = unshard.merge("checkpoint-1000", "out", dtype="bfloat16")
    print(unshard.inspect("checkpoint-1000").tensors)
    with unshard.open_checkpoint("checkpoint-1000") as checkpoint:
        rows = checkpoint.get_slice("lm_head.weight")[0:16]

Importing this package imports nothing heavy; numpy comes with the first call.
"""

from typing import TYPE_CHECKING

from unshard._version import __version__
from unshard.errors import (
    CheckpointError,
    ConversionError,
    CorruptError,
    IncompleteError,
    NoSuchTensorError,
    NotMergeableError,
    OutputError,
    UnknownFormatError,
    UnsafeError,
    UnshardError,
    UsageError,
)

if TYPE_CHECKING:
    from unshard.api import (
        Comparison,
        Inspection,
        LazyTensor,
        Loaded,
        MergeOptions,
        OpenCheckpoint,
        Report,
        average,
        inspect,
        load_into,
        load_state_dict,
        merge,
        merge_all,
        open_checkpoint,
        verify,
    )

__all__ = [
    "CheckpointError",
    "Comparison",
    "ConversionError",
    "CorruptError",
    "IncompleteError",
    "Inspection",
    "LazyTensor",
    "Loaded",
    "MergeOptions",
    "NoSuchTensorError",
    "NotMergeableError",
    "OpenCheckpoint",
    "OutputError",
    "Report",
    "UnknownFormatError",
    "UnsafeError",
    "UnshardError",
    "UsageError",
    "__version__",
    "average",
    "inspect",
    "load_into",
    "load_state_dict",
    "merge",
    "merge_all",
    "open_checkpoint",
    "verify",
]

_LAZY = frozenset(
    {
        "Comparison",
        "Inspection",
        "LazyTensor",
        "Loaded",
        "MergeOptions",
        "OpenCheckpoint",
        "Report",
        "average",
        "inspect",
        "load_into",
        "load_state_dict",
        "merge",
        "merge_all",
        "open_checkpoint",
        "verify",
    }
)


def __getattr__(name: str) -> object:
    if name in _LAZY:
        from unshard import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
