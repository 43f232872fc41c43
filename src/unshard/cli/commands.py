"""`unshard merge`, `average`, `verify`, `push` and `inspect`: the commands about checkpoints."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from unshard import signals
from unshard.cli.following import FOLLOWING, FollowKeywords, check_following, follow
from unshard.cli.options import (
    CHECKPOINT,
    OUTPUT,
    CheckpointArgument,
    Json,
    OutputOption,
    Quiet,
    flag,
    keywords_of,
    one_of,
    option,
    taking,
    value,
)
from unshard.cli.parser.parameters import argument
from unshard.cli.reports import (
    fields_of,
    print_comparison,
    print_inspection,
    print_report,
    print_reshard,
    print_steps,
)
from unshard.cli.running import DIFFERENT, front_of
from unshard.console import listening
from unshard.errors import UsageError
from unshard.fronts import Front, spell
from unshard.keywords import (
    CHOICES,
    MergeKeywords,
    Names,
    PushKeywords,
    ReadKeywords,
    ReshardKeywords,
    VerifyKeywords,
)
from unshard.progress import Event, Listener, Stage

if TYPE_CHECKING:
    from unshard.api import MergeOptions

_AVERAGE = "Average"
_MERGED = "How it was merged"
_SUMS = "A file with the SHA-256 of each tensor, as printed by `unshard checksums`."
_AS_MERGE = "As given to merge.  [default: from unshard.json]"

_log = logging.getLogger(__name__)


@taking(FollowKeywords, but=(), **FOLLOWING)
def merge(
    checkpoint: CheckpointArgument,
    output: Annotated[
        Path | None,
        argument(
            "OUTPUT",
            "Output directory, or the address of one in an object store; must not exist yet.  "
            "[default: merged/<step> next to the checkpoint]",
        ),
    ] = None,
    *,
    all_steps: Annotated[
        bool, flag("--all-steps", "Merge every complete step of a run.", CHECKPOINT)
    ] = False,
    no_local: Annotated[
        bool,
        flag(
            "--no-local", "With --push-to-hub: write no local output, like `unshard push`.", OUTPUT
        ),
    ] = False,
    output_option: OutputOption = None,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Merge a sharded checkpoint into a Hugging Face directory."""
    from unshard import api
    from unshard.api.merging import merge_checkpoint, merge_steps
    from unshard.read.format import EVERY_ROLE

    if None not in (output, output_option):
        two = f"two outputs: {output} and --output {output_option}"
        raise UsageError(two, hint="leave one out")
    options = api.MergeOptions(**keywords_of(MergeKeywords, given))
    request = (checkpoint, output or output_option, options)
    several = "--all-steps" if all_steps else "--role all" if options.role == EVERY_ROLE else ""
    check_following(given, several or "--no-local" * no_local)
    repo = _repo_without_output(options, request[1], several) if no_local else None
    with _working(quiet=quiet, front=front_of(merge, locals())) as listener:
        if given["follow"]:
            raise SystemExit(follow(*request, given, listener, as_json=as_json, quiet=quiet))
        if repo is not None:
            keywords = keywords_of(PushKeywords, given)
            report = api.push(
                checkpoint, repo, private=options.private, listener=listener, **keywords
            )
        elif not several:
            report = merge_checkpoint(*request, listener)
        else:
            steps = merge_steps(*request, listener, is_run=all_steps)
    if not several:
        print_report(report, as_json=as_json, quiet=quiet)
        return
    print_steps(steps, as_json=as_json, quiet=quiet)
    for step in steps:
        if step.error is not None and step.has_failed:
            raise SystemExit(step.error.exit_code)


def _repo_without_output(options: "MergeOptions", output: Path | None, several: str) -> str:
    """Return the repository for `--no-local`; refuse options that it excludes."""
    if options.push_to_hub is None:
        raise UsageError("--no-local needs --push-to-hub")
    allowed = {*PushKeywords.__annotations__, "push_to_hub", "private", "extra_state"}
    from unshard.stores.remote_path import as_given

    excluded = [several] if several else []
    excluded += [f"--{spell(name)}" for name in options.chosen if name not in allowed]
    excluded += [] if output is None else [f"the output {as_given(output)}"]
    if excluded:
        raise UsageError(
            f"--no-local writes no output, so it excludes {', '.join(excluded)}",
            hint="leave out --no-local, or the options that it excludes",
        )
    return options.push_to_hub


@contextmanager
def _working(*, quiet: bool, front: Front) -> Iterator[Listener]:
    """Yield the listener of a command that writes."""
    with listening(quiet=quiet, front=front) as listener:

        def logged(event: Event) -> None:
            if isinstance(event, Stage):  # the log's timestamps show the duration of each stage
                _log.info("%s", event.name)
            listener(event)

        # The upload is silent if it gets `progress.ignore`, so that must not be wrapped.
        yield logged if _log.isEnabledFor(logging.INFO) else listener


@taking(MergeKeywords, but=("step", "lora", "lora_alpha", "extra_state", "optimizer"))
def average(
    checkpoints: Annotated[
        list[Path],
        argument(
            "CHECKPOINT...",
            "Checkpoints to average, in this order, or one run, to average all its complete "
            "steps. Without --output, the last argument is the output directory, which must not "
            "exist yet.",
        ),
    ],
    coefficients: Annotated[
        str | None,
        option("1,2,3", "Weight of each checkpoint.  [default: equal weights]", _AVERAGE),
    ] = None,
    ema_decay: Annotated[
        float | None,
        option(
            "DECAY", "Exponential moving average of the checkpoints, with this decay.", _AVERAGE
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        option(
            "NAME",
            "Coefficients that emulate learning rate decay (WSM): linear, cosine, 1-sqrt or "
            "ema:DECAY.",
            _AVERAGE,
        ),
    ] = None,
    last: Annotated[
        int | None, option("N", "Use only the last N steps of a run.", _AVERAGE)
    ] = None,
    every: Annotated[
        int | None,
        option("N", "Use every Nth step of a run, counting back from the highest.", _AVERAGE),
    ] = None,
    *,
    output: OutputOption = None,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Average checkpoints into a Hugging Face directory, in one pass."""
    from unshard import api

    checkpoints, output = _split_paths(checkpoints, output)
    with _working(quiet=quiet, front=front_of(average, locals())) as listener:
        report = api.average(
            checkpoints,
            output,
            coefficients=_parse_numbers(coefficients),
            ema_decay=ema_decay,
            schedule=schedule,
            last=last,
            every=every,
            listener=listener,
            **keywords_of(MergeKeywords, given),
        )
    print_report(report, as_json=as_json, quiet=quiet)


def _split_paths(paths: list[Path], output: Path | None) -> tuple[list[Path], Path]:
    """Take the last path as the output, like `cp`, if there is no `--output`.

    An existing path may be a checkpoint, so only `--output` can select it as the output.
    """
    from unshard.stores.remote_path import path_of

    if output is not None:
        return paths, output
    *sources, last = paths
    if not sources or path_of(last).exists():
        raise UsageError(
            "the output is missing",
            expected="a last argument that does not exist yet, or --output OUTPUT",
            found=f"{last} exists" if path_of(last).exists() else f"only {last}",
        )
    return sources, last


def _parse_numbers(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--coefficients {text}: not numbers", expected="a number per checkpoint: 1,2,3"
        ) from error


@taking(
    VerifyKeywords,
    base=value(str, "MODEL", "As given to merge.", _MERGED),
    include=value(str, "REGEX", _AS_MERGE, _MERGED),
    exclude=value(str, "REGEX", _AS_MERGE, _MERGED),
    lora_alpha=value(float, "ALPHA", _AS_MERGE, _MERGED),
    config=value(str, "FILE", "As given to merge.  [default: the output's config.json]", _MERGED),
)
def verify(
    output: Annotated[Path, argument("OUTPUT", "A merged model: a directory, or one file.")],
    against: Annotated[
        Path | None, option("PATH", "The checkpoint or Hugging Face model to compare it with.")
    ] = None,
    checksums: Annotated[Path | None, option("FILE", _SUMS)] = None,
    atol: Annotated[float, option("A", "Accept |ours - theirs| <= A + R x |theirs|.")] = 0.0,
    rtol: Annotated[float, option("R", "See --atol.")] = 0.0,
    load: Annotated[
        bool, flag("--load", "Also load names and shapes with transformers (extra `torch`).")
    ] = False,
    *,
    names: Annotated[str | None, one_of(CHOICES["names"], _AS_MERGE, _MERGED)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Compare a merged model with a checkpoint, a model, or checksums.

    Every tensor is compared bit by bit, unless --atol or --rtol is given. Exit code 1 means that
    the models differ.
    """
    from unshard import api

    with listening(quiet=quiet, front=front_of(verify, locals())) as listener:
        comparison = api.verify(
            output,
            against,
            checksums=checksums,
            atol=atol,
            rtol=rtol,
            load=load,
            names=cast("Names | None", names),
            listener=listener,
            **keywords_of(VerifyKeywords, given),
        )
    if as_json or not quiet:
        print_comparison(comparison, as_json=as_json)
    if not comparison.equal:
        raise SystemExit(DIFFERENT)


@taking(PushKeywords)
def push(
    checkpoint: CheckpointArgument,
    repo: Annotated[str, argument("REPO", "NAME or OWNER/NAME; created if it does not exist.")],
    *,
    private: Annotated[
        bool, flag("--private", "Make the repository private if it is new.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Upload the model of a merge to the hub, without a local copy."""
    from unshard import api

    with _working(quiet=quiet, front=front_of(push, locals())) as listener:
        keywords = keywords_of(PushKeywords, given)
        report = api.push(checkpoint, repo, private=private, listener=listener, **keywords)
    print_report(report, as_json=as_json, quiet=quiet)


@taking(ReshardKeywords)
def reshard(
    checkpoint: CheckpointArgument,
    output: Annotated[
        Path,
        argument(
            "OUTPUT",
            "Directory to write instead of the weights' directory; must not exist yet.",
        ),
    ],
    world_size: Annotated[int, option("N", "Number of ranks to write for.", OUTPUT)],
    to: Annotated[
        str | None,
        option(
            "verl|lmms|dcp|accelerate",
            "Format to write.  [default: that of the checkpoint]",
            OUTPUT,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        option("2x4", "Device mesh; the last dimension shards.  [default: one dimension]", OUTPUT),
    ] = None,
    mesh_names: Annotated[
        str | None,
        option("ddp,fsdp", "Names of its dimensions.  [default: the checkpoint's]", OUTPUT),
    ] = None,
    device: Annotated[
        str | None,
        option("cuda", "Type of its devices.  [default: the checkpoint's, or cuda]", OUTPUT),
    ] = None,
    *,
    torch: Annotated[
        str, option("2.13", "torch version that will read it: 2.4, 2.6, 2.8, 2.10.", OUTPUT)
    ] = "2.13",
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Write a checkpoint for other ranks or in another format.

    Writes model, optimizer, scheduler and random state, to resume from. From a model of the hub, it
    writes only the model, to start a run.
    """
    from unshard import api

    with _working(quiet=quiet, front=front_of(reshard, locals())) as listener:
        report = api.reshard(
            checkpoint,
            output,
            world_size=world_size,
            to=to,
            mesh=None if mesh is None else _parse_mesh(mesh),
            mesh_names=None if mesh_names is None else mesh_names.split(","),
            device=device,
            torch=torch,
            listener=listener,
            **keywords_of(ReshardKeywords, given),
        )
    print_reshard(report, as_json=as_json, quiet=quiet)


def _parse_mesh(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split("x")]
    except ValueError as error:
        raise UsageError(f"--mesh {text}: not a mesh", expected="sizes: 2x4") from error


@taking(ReadKeywords)
def inspect(checkpoint: CheckpointArgument, *, as_json: Json = False, **given: object) -> None:
    """Describe a checkpoint, and the output of its merge."""
    from unshard import api

    signals.raise_them()
    inspection = api.inspect(checkpoint, **keywords_of(ReadKeywords, given))
    if as_json:
        print(json.dumps(fields_of(inspection)))
    else:
        print_inspection(inspection, front_of(inspect, locals()))
