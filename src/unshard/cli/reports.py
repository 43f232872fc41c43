"""What was made, or would be, for people and as JSON."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from unshard.cli.show import size

if TYPE_CHECKING:
    from unshard.api import Report

__all__ = ["print_reports"]


def print_reports(reports: "list[Report]", *, as_list: bool, as_json: bool, quiet: bool) -> None:
    """Print the reports: for people, or as JSON, one object or a list of them."""
    if as_json:
        fields = [asdict(report) for report in reports]
        print(json.dumps(fields if as_list else fields[0]))
        return
    for report in reports:
        if not quiet:
            _print_plan(report) if report.dry_run else _print_report(report)


def _print_report(report: "Report") -> None:
    rate = report.bytes_written / max(report.seconds, 1e-3)
    files = f"{len(report.files)} file{'s' if len(report.files) > 1 else ''}"
    if len(report.sources) > 1:
        print(f"averaged {len(report.sources)} checkpoints: {', '.join(report.sources)}")
    print(f"merged {report.tensors} tensors of {report.world_size} ranks: {_dtypes(report)}")
    print(
        f"wrote {size(report.bytes_written)} in {files}, {report.seconds:.2f} s ({size(rate)}/s), "
        f"peak memory {size(report.peak_memory_bytes)}"
    )
    if report.changed_from_base is not None:
        changed, compared = report.changed_from_base
        print(f"{changed} of {compared} tensors differ from the base model")
    if report.companions:
        print(f"with {', '.join(report.companions)}")
    for skipped in report.skipped:
        print(f"left out {skipped.fqn}: {skipped.reason}")
    print(f"saved to {report.output}")
    if report.url is not None:
        print(f"pushed to {report.url}")


def _print_plan(report: "Report") -> None:
    print(f"plan: {', '.join(report.sources)} -> {report.output} (nothing was written)")
    for name, length in report.files.items():
        print(f"  {name}  {length:,} bytes")
    for name in report.companions:
        print(f"  {name}")
    operations = ", ".join(f"{count} {kind}" for kind, count in report.operations.items())
    print(f"tensors:    {report.tensors} ({_dtypes(report)}), {report.parameters:,} parameters")
    print(f"operations: {operations or 'none'}")
    print(f"reads:      {report.bytes_read:,} bytes")
    print(f"writes:     {report.bytes_written:,} bytes")
    print(f"buffers:    {size(report.memory_bytes)}; the process stays below 128 MB")


def _dtypes(report: "Report") -> str:
    return ", ".join(f"{count} {name}" for name, count in report.dtypes.items())
