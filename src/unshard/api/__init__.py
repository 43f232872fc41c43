"""The public names of unshard, which the package `unshard` exports, too.

Each name is imported when it is first used, because a merge needs a third of these modules. The
imports of a name `as` itself mark it as exported for type checkers.
"""

from unshard.errors import CheckpointError as CheckpointError
from unshard.errors import ConversionError as ConversionError
from unshard.errors import CorruptError as CorruptError
from unshard.errors import IncompleteError as IncompleteError
from unshard.errors import NoConfigError as NoConfigError
from unshard.errors import NoSuchFileError as NoSuchFileError
from unshard.errors import NoSuchTensorError as NoSuchTensorError
from unshard.errors import NotMergeableError as NotMergeableError
from unshard.errors import OutputError as OutputError
from unshard.errors import StoreError as StoreError
from unshard.errors import UnknownFormatError as UnknownFormatError
from unshard.errors import UnsafeError as UnsafeError
from unshard.errors import UnshardError as UnshardError
from unshard.errors import UnshardWarning as UnshardWarning
from unshard.errors import UsageError as UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from unshard.api.averaging import average as average
    from unshard.api.comparing.archives import apply_delta as apply_delta
    from unshard.api.comparing.archives import archive as archive
    from unshard.api.comparing.checksums import checksums as checksums
    from unshard.api.comparing.deltas import delta as delta
    from unshard.api.comparing.diffing import diff as diff
    from unshard.api.following.following import follow as follow
    from unshard.api.inspecting import Inspection as Inspection
    from unshard.api.inspecting import inspect as inspect
    from unshard.api.merging import merge as merge
    from unshard.api.merging import merge_all as merge_all
    from unshard.api.options import MergeOptions as MergeOptions
    from unshard.api.resharding.resharding import ReshardReport as ReshardReport
    from unshard.api.resharding.resharding import reshard as reshard
    from unshard.api.unmerged.loading import Loaded as Loaded
    from unshard.api.unmerged.opening import LazyTensor as LazyTensor
    from unshard.api.unmerged.opening import OpenCheckpoint as OpenCheckpoint
    from unshard.api.unmerged.opening import load_into as load_into
    from unshard.api.unmerged.opening import load_state_dict as load_state_dict
    from unshard.api.unmerged.opening import open_checkpoint as open_checkpoint
    from unshard.api.unmerged.pretrained import from_pretrained as from_pretrained
    from unshard.api.unmerged.virtual import VirtualFiles as VirtualFiles
    from unshard.api.unmerged.virtual import push as push
    from unshard.api.unmerged.virtual import virtual as virtual
    from unshard.api.verifying import verify as verify
    from unshard.write.report import Report as Report
    from unshard.write.verification.comparison import Comparison as Comparison

_PLACES = {
    "average": "api.averaging",
    "apply_delta": "api.comparing.archives",
    "archive": "api.comparing.archives",
    "checksums": "api.comparing.checksums",
    "delta": "api.comparing.deltas",
    "diff": "api.comparing.diffing",
    "follow": "api.following.following",
    "Inspection": "api.inspecting",
    "inspect": "api.inspecting",
    "merge": "api.merging",
    "merge_all": "api.merging",
    "MergeOptions": "api.options",
    "ReshardReport": "api.resharding.resharding",
    "reshard": "api.resharding.resharding",
    "Loaded": "api.unmerged.loading",
    "LazyTensor": "api.unmerged.opening",
    "OpenCheckpoint": "api.unmerged.opening",
    "load_into": "api.unmerged.opening",
    "load_state_dict": "api.unmerged.opening",
    "open_checkpoint": "api.unmerged.opening",
    "from_pretrained": "api.unmerged.pretrained",
    "push": "api.unmerged.virtual",
    "VirtualFiles": "api.unmerged.virtual",
    "virtual": "api.unmerged.virtual",
    "verify": "api.verifying",
    "Report": "write.report",
    "Comparison": "write.verification.comparison",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"unshard.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*_PLACES, *(name for name in globals() if name.endswith(("Error", "Warning")))])
