"""An evaluator that a cluster schedules: `launch` of its profile is put before its command.

What is launched is a script, because launchers quote arguments in ways of their own, and start in
directories of their own. It makes `BEGUN_NAME` when the cluster has found a place for it.
"""

import shlex
from collections.abc import Sequence

from unshard.evaluate.server.config.arguments import fill
from unshard.evaluate.server.evaluators.work import Work

BEGUN_NAME = "begun"
_SCRIPT_NAME = "launched.sh"


def write_launched(work: Work, command: Sequence[str]) -> list[str]:
    """Write the script that runs a command in the attempt's directory; return what launches it."""
    request, directory = work.request, work.directory
    script = directory / _SCRIPT_NAME
    place = shlex.quote(str(directory))
    script.write_text(f"cd {place} && : > {BEGUN_NAME} && exec {shlex.join(command)}\n")
    values = {
        "gpus": str(work.gpus),
        "job": directory.parent.name,
        "attempt": directory.name,
        "run": request.run,
        "step": "" if request.step is None else str(request.step),
    }
    return [*(fill(part, values) for part in work.profile.launch), "/bin/sh", str(script)]
