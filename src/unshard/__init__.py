"""Turn sharded training checkpoints into Hugging Face models: exact, fast, without torch.

    import unshard

    report = unshard.merge("checkpoint-1000", "out", dtype="bfloat16")
    print(unshard.inspect("checkpoint-1000").tensors)

Importing this package imports nothing heavy; numpy comes with the first call.
"""

from typing import TYPE_CHECKING

from unshard._version import __version__
from unshard.errors import (
    CheckpointError,
    ConversionError,
    CorruptError,
    IncompleteError,
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
        MergeOptions,
        Report,
        average,
        inspect,
        merge,
        merge_all,
        verify,
    )

__all__ = [
    "CheckpointError",
    "Comparison",
    "ConversionError",
    "CorruptError",
    "IncompleteError",
    "Inspection",
    "MergeOptions",
    "NotMergeableError",
    "OutputError",
    "Report",
    "UnknownFormatError",
    "UnsafeError",
    "UnshardError",
    "UsageError",
    "__version__",
    "average",
    "inspect",
    "merge",
    "merge_all",
    "verify",
]

_LAZY = frozenset(
    {
        "Comparison",
        "verify",
        "Inspection",
        "MergeOptions",
        "Report",
        "average",
        "inspect",
        "merge",
        "merge_all",
    }
)


def __getattr__(name: str) -> object:
    if name in _LAZY:
        from unshard import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
