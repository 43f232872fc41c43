"""`unshard merge --follow`: its options, and what it prints of each step."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from unshard import signals
from unshard.cli.options import Option, flag, option, value
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


FOLLOWING: dict[str, Option] = {
    "follow": (
        bool,
        flag(
            "--follow",
            "Merge each step as soon as it is complete. It becomes OUTPUT/STEP, while training "
            "goes on; SIGTERM ends after the current one.",
            _GROUP,
            default=False,
        ),
    ),
    "newest": (bool, flag("--newest", "The highest step first.", _GROUP, default=False)),
    "keep": value(int, "N", "Remove the outputs of all but the last N steps.", _GROUP),
    "exec": value(
        str,
        "'CMD {output} {step}'",
        "Run this for each output; no shell runs it. A failure does not stop the rest.",
        _GROUP,
    ),
    "retry": (
        int,
        option("N", "Try a step that failed N times again.", _GROUP, default=0),
    ),
    "until": value(int, "STEP", "End when this step, or a higher one, is done.", _GROUP),
    "idle": value(str, "TIME", "End when no new step came for so long: 30m, 2h.", _GROUP),
    "interval": (
        float,
        option("SECONDS", "Between two looks at the run.", _GROUP, default=5.0),
    ),
}


def check_following(given: Mapping[str, object], several: str) -> None:
    """Refuse options of `--follow` without it, and what it excludes."""
    alone = [one for one in FOLLOWING if given[one] not in (None, False, FOLLOWING[one][1].default)]
    if not given["follow"]:
        if alone:
            raise UsageError(f"--{alone[0]} needs --follow")
    elif several:
        raise UsageError(f"--follow and {several} exclude each other")


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

    how = Following(**{one: given[one] for one in FOLLOWING if one != "follow"})  # type: ignore[arg-type]
    asked, code = list[bool](), 0
    with signals.ending_softly(lambda: asked.append(True)):
        for one in follow_steps(
            run, output, options, how, listener, is_asked_to_end=lambda: bool(asked)
        ):
            print_step(one, as_json=as_json, quiet=quiet)
            if one.error is not None and one.has_failed:
                code = code or one.error.exit_code
    return code
