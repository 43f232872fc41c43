"""Turn sharded training checkpoints into Hugging Face models: exact, fast, without torch.

    import unshard

    report = unshard.merge("checkpoint-1000", "out", dtype="bfloat16")
    print(unshard.inspect("checkpoint-1000").tensors)
    with unshard.open_checkpoint("checkpoint-1000") as checkpoint:
        rows = checkpoint.get_slice("lm_head.weight")[0:16]

Importing this package imports nothing else; numpy comes with the first call. A command so handles
signals before it imports anything that takes time.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (pip checks it, but not for a source tree)
    raise ImportError(
        f"unshard needs Python 3.11 or later, and this is Python {sys.version_info[0]}."
        f"{sys.version_info[1]}, which is past its end of life: install unshard into an "
        "environment of its own (in a clone of it: uv tool install --python 3.12 .) and run its "
        "commands, `unshard eval serve` and `unshard eval watch` from there"
    )

from unshard._version import __version__

TYPE_CHECKING = False  # as type checkers know it; importing typing takes time
if TYPE_CHECKING:
    from unshard.api import (
        Comparison,
        Inspection,
        LazyTensor,
        Loaded,
        MergeOptions,
        OpenCheckpoint,
        Report,
        ReshardReport,
        VirtualFiles,
        average,
        from_pretrained,
        inspect,
        load_into,
        load_state_dict,
        merge,
        merge_all,
        open_checkpoint,
        push,
        reshard,
        verify,
        virtual,
    )
    from unshard.errors import (
        CheckpointError,
        ConversionError,
        CorruptError,
        IncompleteError,
        NoSuchFileError,
        NoSuchTensorError,
        NotMergeableError,
        OutputError,
        StoreError,
        UnknownFormatError,
        UnsafeError,
        UnshardError,
        UnshardWarning,
        UsageError,
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
    "NoSuchFileError",
    "NoSuchTensorError",
    "NotMergeableError",
    "OpenCheckpoint",
    "OutputError",
    "Report",
    "ReshardReport",
    "StoreError",
    "UnknownFormatError",
    "UnsafeError",
    "UnshardError",
    "UnshardWarning",
    "UsageError",
    "VirtualFiles",
    "__version__",
    "average",
    "from_pretrained",
    "inspect",
    "load_into",
    "load_state_dict",
    "merge",
    "merge_all",
    "open_checkpoint",
    "push",
    "reshard",
    "verify",
    "virtual",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.endswith(("Error", "Warning")):
        from unshard import errors

        return getattr(errors, name)
    from unshard import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
