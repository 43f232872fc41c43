"""`unshard eval hide`, `show` and `adopt`: what people correct about results and runs."""

from pathlib import Path
from typing import Annotated

from unshard.cli.evaluate.commands import URL, ServerUrl, TokenFile, connect
from unshard.cli.evaluate.show import print_jobs
from unshard.cli.options import Json, option
from unshard.cli.parser.parameters import argument
from unshard.cli.running import say
from unshard.errors import UsageError

JobIds = Annotated[list[str], argument("JOB...", "The jobs' ids, or their beginnings.")]


def hide(
    jobs: JobIds,
    reason: Annotated[str, option("TEXT", "Why; it is kept with the job.")],
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Leave results out of curves, tables and exports.

    Nothing is removed, and `unshard eval show` brings them back.
    """
    with connect(server, token_file) as client:
        hidden = [client.hide(job, reason) for job in jobs]
    print_jobs(hidden, as_json=as_json)


def show(
    jobs: JobIds, server: ServerUrl = URL, token_file: TokenFile = None, as_json: Json = False
) -> None:
    """Show hidden results again.

    Also those of a branch that training has left when it went back to an older step.
    """
    with connect(server, token_file) as client:
        shown = [client.show(job) for job in jobs]
    print_jobs(shown, as_json=as_json)


def adopt(
    run: Annotated[Path, argument("RUN", "The run's directory.")],
    server: ServerUrl = URL,
    token_file: TokenFile = None,
) -> None:
    """Continue the curves of a run that was moved.

    On another disk it seems to be a copy, and gets curves of its own.
    """
    from unshard.evaluate.client.v1 import ServerAwayError
    from unshard.evaluate.run_folder import RunFolder

    place = run.resolve()
    if not place.is_dir():
        raise UsageError(f"{run}: there is no such directory", expected="the directory of a run")
    try:
        RunFolder(place).adopt()
    except OSError as error:
        raise UsageError(f"{run}: cannot be written to", found=str(error)) from error
    with connect(server, token_file) as client:
        try:
            print(f"{run} is the run {client.see_run(str(place))['label']}")
        except ServerAwayError as error:
            say(f"the server takes note of it with the run's next checkpoint: {error}")
