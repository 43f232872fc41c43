"""Checks a server's configuration before it is started: `unshard eval doctor`.

Only a trial writes: it evaluates a checkpoint as a server would, in a directory of its own that is
removed afterwards.
"""

import os
import shlex
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from unshard.console import counted
from unshard.errors import UnshardError, UsageError
from unshard.evaluate.jobs import Request, Status
from unshard.evaluate.logs import one_line
from unshard.evaluate.server.config.keys import OnResult
from unshard.evaluate.server.evaluators.installed import versions_of
from unshard.evaluate.server.evaluators.profiles import default_profiles
from unshard.evaluate.server.gpus import find_gpus
from unshard.evaluate.server.http.security import rules_for
from unshard.evaluate.server.processes.gpu_users import list_absent
from unshard.evaluate.server.processes.supervise import LOG_NAME
from unshard.evaluate.server.queue.allotment import find_work
from unshard.evaluate.server.serve import DATABASE, ServeOptions, configure, make_service, slots_of
from unshard.evaluate.server.server_yaml import ServerConfig
from unshard.evaluate.server.store.schema import check_version
from unshard.evaluate.server.store.statements import as_request
from unshard.stores.remote_path import RemotePath

_SHOWN = 5  # reasons
_WAITING = "SELECT request FROM jobs WHERE status IN ('queued', 'running')"
_LEAST_BYTES = 1 << 30
_POLL_S = 0.1
_END = 600  # characters of a log's end


@dataclass(frozen=True, slots=True)
class Finding:
    """The subject of a check, whether a server can work with it, and why not or what to do."""

    subject: str
    is_fine: bool
    text: str


class Trial(NamedTuple):
    """A checkpoint below one of the server's roots, and the tasks to evaluate, by profile."""

    checkpoint: Path
    tasks: Mapping[str, Sequence[str]]


def examine(options: ServeOptions, trial: Trial | None) -> Iterator[Finding]:
    """Yield the finding of each check; a configuration that cannot be read is the only one."""
    subject = f"configuration {options.config or '(none: every setting has its default)'}"
    try:
        config = configure(options)
    except UnshardError as error:
        yield Finding(subject, is_fine=False, text=str(error))
        return
    yield Finding(subject, is_fine=True, text=f"profiles {', '.join(config.profiles)}")
    work, access = config.work_directory or Path(), f"access {config.host}:{config.port}"
    yield _check(access, lambda: _check_access(config, options))
    yield _check(f"work directory {work}", lambda: _check_work_directory(work))
    for root in config.roots:
        yield _check(f"root {root}", partial(_check_root, root))
    yield _check(f"GPUs {', '.join(config.gpus) or 'none'}", lambda: _check_gpus(config))
    if (work / DATABASE).is_file():
        yield _check("jobs that wait", lambda: _check_queue(config, work / DATABASE))
    if (on_result := config.on_result) is not None:
        yield _check("on_result", lambda: _check_command(on_result))
    yield from _check_profiles(config, trial)


def _check(subject: str, check: Callable[[], str]) -> Finding:
    """Return the text of a check, or of the error that it raises."""
    try:
        return Finding(subject, is_fine=True, text=check())
    except UnshardError as error:
        return Finding(subject, is_fine=False, text=str(error))


def _check_profiles(config: ServerConfig, trial: Trial | None) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="unshard-doctor-") as directory:
        work, findings = Path(directory), dict[str, Finding]()
        for name, profile in config.profiles.items():
            find_versions = partial(versions_of, profile, work)
            findings[name] = _check(f"profile {name} ({profile.kind})", find_versions)
        usable = {name for name, finding in findings.items() if finding.is_fine}
        # Without `profiles` in the configuration there is one of each harness; one is enough.
        is_default = config.profiles == default_profiles(config.gpus)
        is_enough = is_default and not usable.isdisjoint(("lm-eval", "lmms-eval"))
        for name, finding in findings.items():
            if is_enough and not finding.is_fine:
                yield replace(finding, is_fine=True, text=f"not needed: {finding.text}")
            else:
                yield finding
            if name in usable and trial and name in trial.tasks:
                evaluate = partial(_evaluate, config, name, trial, work / name)
                yield _check(f"trial of {name}", evaluate)
    for name in sorted(trial.tasks.keys() - config.profiles.keys()) if trial else ():
        text = f"there is no such profile; there are: {', '.join(config.profiles)}"
        yield Finding(f"trial of {name}", is_fine=False, text=text)


def _check_access(config: ServerConfig, options: ServeOptions) -> str:
    rules = rules_for(config.host, config.token_file, options.allow_unauthenticated)
    if names := [f"{user.name} ({user.role})" for user in rules.users if user.name]:
        return f"users {', '.join(names)}"
    return "with a token" if rules.users else "no token: any user of this machine may connect"


def _check_work_directory(work: Path) -> str:
    existing = next(path for path in (work, *work.parents) if path.exists())
    choose = "choose another by --work-dir or `work_directory`"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{existing} cannot be written; {choose}")
    if existing == work and work.stat().st_uid != os.geteuid():
        raise UsageError(f"belongs to another user; {choose}")
    free = shutil.disk_usage(existing).free
    text = f"{free / 1e9:.1f} GB free"
    if free < _LEAST_BYTES:
        raise UsageError(f"{text}; merged models go there: make room")
    return text


def _check_root(root: Path) -> str:
    try:
        count = sum(1 for _ in root.iterdir())
    except FileNotFoundError as error:
        raise UsageError("no such directory; correct `roots` or --root") from error
    except OSError as error:
        raise UsageError(str(error)) from error
    text = counted(count, "name")
    if not isinstance(root, RemotePath) and not os.access(root, os.W_OK):
        text += "; it cannot be written: checkpoints that clients do not pin are not kept from "
        text += "rotation"
    return text


def _check_gpus(config: ServerConfig) -> str:
    visible = find_gpus()
    absent = list_absent(config.gpus)
    if absent is None:
        absent = [name for name in config.gpus if name.isdecimal() and name not in visible]
    if absent:
        raise UsageError(f"this machine has no GPU {', '.join(absent)}; correct `gpus` or --gpus")
    return f"{len(visible)} on this machine"


def _check_queue(config: ServerConfig, database: Path) -> str:
    """Check that jobs of an earlier server can begin with this configuration."""
    slots, reasons, profiles = slots_of(config), Counter[str](), set[str]()
    address = f"file:{quote(str(database))}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            check_version(connection, database)
            rows = connection.execute(_WAITING).fetchall()
    except sqlite3.Error as error:
        raise UsageError(f"{database}: cannot be read: {error}") from error
    for (text,) in rows:
        try:
            find_work(config.profiles, slots, request := as_request(text))
        except UnshardError as error:
            reasons[f"profile {request.profile}: {one_line(str(error))}"] += 1
            profiles.add(request.profile)
        except (ValueError, TypeError, LookupError, AttributeError):  # no server wrote it
            reasons["a request that cannot be read"] += 1
    if not reasons:
        return f"{counted(len(rows), 'job')}, which can begin"
    shown = [f"{counted(number, 'job')} of {why}" for why, number in reasons.most_common(_SHOWN)]
    shown += [f"{len(reasons) - _SHOWN} more reasons"] if len(reasons) > _SHOWN else []
    lines = [f"unshard eval cancel --profile {shlex.quote(name)}" for name in sorted(profiles)]
    hint = f"correct the configuration, or end them: {'; '.join(lines)}"
    raise UsageError(f"{'; '.join(shown)}; {hint}")


def _check_command(on_result: OnResult) -> str:
    """Return the path of the program of `on_result`, which is not run."""
    program = on_result.command[0]
    search = on_result.environment.get("PATH", os.environ.get("PATH", os.defpath))
    if (path := shutil.which(program, path=search)) is None:
        raise UsageError(f"the program {program} is not found; install it, or change `command`")
    return path


def _evaluate(config: ServerConfig, name: str, trial: Trial, work: Path) -> str:
    """Evaluate the checkpoint as a server does, with one document of each task of a harness."""
    tasks, arguments = tuple(trial.tasks[name]), config.profiles[name].trial
    service = make_service(config.model_copy(update={"work_directory": work}))
    try:
        service.scheduler.start()
        request = Request(str(trial.checkpoint), name, tasks, arguments=arguments)
        job, _ = service.submit(request, None)
        while not job.status.is_final:
            time.sleep(_POLL_S)
            job = service.store.get(job.id) or job
    finally:
        service.scheduler.stop(end=True)
        service.pins.remove_unneeded()
        service.store.close()
    if job.status is not Status.COMPLETED:
        logs = sorted(work.glob(f"jobs/*/*/{LOG_NAME}"), key=lambda path: path.stat().st_mtime)
        log = logs[-1].read_text(errors="replace").strip()[-_END:] if logs else ""
        shown = f"; its log ends:\n{log}" if log else ""
        raise UsageError(f"{job.error or job.status}{shown}")
    return ", ".join(f"{metric} = {value:g}" for metric, value in job.metrics.items())
