"""`unshard merge --follow`: its options and its output."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from unshard import signals
from unshard.cli.options import TypedSpec, flag, option, value
from unshard.cli.reports import print_step
from unshard.errors import UsageError
from unshard.keywords import MergeKeywords
from unshard.progress import Listener

if TYPE_CHECKING:
    from unshard.api import MergeOptions

_GROUP = "Following a run"


class FollowKeywords(MergeKeywords, total=False):
    """The options of `unshard merge`, with those of `--follow`."""

    follow: bool
    newest: bool
    keep: int | None
    exec: str | None
    retry: int
    until: int | None
    idle: str | None
    interval: float


FOLLOWING: dict[str, TypedSpec] = {
    "follow": (
        bool,
        flag(
            "--follow",
            "Merge each step as soon as it is complete. Each output is OUTPUT/STEP. "
            "SIGTERM ends the command after the current step.",
            _GROUP,
            default=False,
        ),
    ),
    "newest": (bool, flag("--newest", "Merge the highest step first.", _GROUP, default=False)),
    "keep": value(int, "N", "Remove the outputs of all but the last N steps.", _GROUP),
    "exec": value(
        str,
        "'CMD {output} {step}'",
        "Run this for each output, without a shell. A failure does not stop the rest.",
        _GROUP,
    ),
    "retry": (int, option("N", "Retry a failed step N times.", _GROUP, default=0)),
    "until": value(int, "STEP", "End when this step, or a higher one, is done.", _GROUP),
    "idle": value(str, "TIME", "End after this time without a new step: 30m, 2h.", _GROUP),
    "interval": (float, option("SECONDS", "Time between scans of the run.", _GROUP, default=5.0)),
}


def check_following(given: Mapping[str, object], several: str) -> None:
    """Refuse options of `--follow` without it, and options that it excludes."""
    if given["follow"]:
        if several:
            raise UsageError(f"--follow and {several} exclude each other")
        return
    for name, (_, spec) in FOLLOWING.items():
        if given[name] not in (None, False, spec.default):
            raise UsageError(f"--{name} needs --follow")


def follow(
    run: Path,
    output: Path | None,
    options: "MergeOptions",
    given: Mapping[str, object],
    listener: Listener,
    *,
    as_json: bool,
    quiet: bool,
) -> int:
    """Follow a run, and print each step; return the exit code of the first step that failed."""
    from unshard.api.following.following import follow_steps
    from unshard.api.following.options import Following

    settings = Following(**{name: given[name] for name in FOLLOWING if name != "follow"})  # type: ignore[arg-type]
    requests, code = list[bool](), 0
    with signals.ending_softly(lambda: requests.append(True)):
        for step in follow_steps(
            run, output, options, settings, listener, is_asked_to_end=lambda: bool(requests)
        ):
            print_step(step, as_json=as_json, quiet=quiet)
            if step.error is not None and step.has_failed:
                code = code or step.error.exit_code
    return code
