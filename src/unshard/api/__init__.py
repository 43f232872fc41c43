"""What unshard does, as functions; the command line and every other caller use these."""

from unshard.api.averaging import average
from unshard.api.inspecting import inspect
from unshard.api.merging import merge, merge_all, merge_with
from unshard.api.options import MergeOptions
from unshard.api.verifying import verify
from unshard.engines.crew import crew
from unshard.read.inspection import Inspection
from unshard.write.comparison import Comparison
from unshard.write.report import Report

__all__ = [
    "Comparison",
    "Inspection",
    "MergeOptions",
    "Report",
    "average",
    "crew",
    "inspect",
    "merge",
    "merge_all",
    "merge_with",
    "verify",
]
