"""What unshard does, as functions; the command line and every other caller use these."""

from unshard.api.averaging import average
from unshard.api.inspecting import Inspection, OptimizerInfo, inspect
from unshard.api.making import Prepared
from unshard.api.merging import StepResult, merge, merge_all, merge_steps, merge_with
from unshard.api.options import MergeOptions
from unshard.api.resharding.resharding import ReshardReport, reshard
from unshard.api.unmerged.loading import Loaded
from unshard.api.unmerged.opening import (
    LazyTensor,
    OpenCheckpoint,
    load_into,
    load_state_dict,
    open_checkpoint,
)
from unshard.api.unmerged.pretrained import from_pretrained
from unshard.api.unmerged.pushing import push
from unshard.api.unmerged.virtual import VirtualFiles, virtual
from unshard.api.verifying import verify
from unshard.write.report import Report
from unshard.write.verification.comparison import Comparison

__all__ = [
    "Comparison",
    "Inspection",
    "LazyTensor",
    "Loaded",
    "MergeOptions",
    "OpenCheckpoint",
    "OptimizerInfo",
    "Prepared",
    "Report",
    "ReshardReport",
    "StepResult",
    "VirtualFiles",
    "average",
    "from_pretrained",
    "inspect",
    "load_into",
    "load_state_dict",
    "merge",
    "merge_all",
    "merge_steps",
    "merge_with",
    "open_checkpoint",
    "push",
    "reshard",
    "verify",
    "virtual",
]
