"""What a server needs, looked at before it is started: `unshard eval doctor`.

Nothing is written, but for a trial: it evaluates a checkpoint as a server would, in a directory of
its own that is removed afterwards.
"""

import os
import shlex
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from unshard.errors import UnshardError
from unshard.evaluate.jobs import Request, Status
from unshard.evaluate.logs import one_line
from unshard.evaluate.server.config.keys import OnResult
from unshard.evaluate.server.evaluators.installed import versions_of
from unshard.evaluate.server.evaluators.profiles import default_profiles
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.gpus import find_gpus
from unshard.evaluate.server.http.security import rules_for
from unshard.evaluate.server.processes.gpu_users import list_absent
from unshard.evaluate.server.processes.supervise import LOG_NAME
from unshard.evaluate.server.queue.allotment import find_work
from unshard.evaluate.server.serve import DATABASE, ServeOptions, configure, make_service, slots_of
from unshard.evaluate.server.server_yaml import ServerConfig
from unshard.evaluate.server.store.schema import check_version
from unshard.evaluate.server.store.statements import as_request
from unshard.showing import counted
from unshard.stores.remote_path import RemotePath

_SHOWN = 5  # reasons
_WAITING = "SELECT request FROM jobs WHERE status IN ('queued', 'running')"
_LEAST_BYTES = 1 << 30
_POLL_S = 0.1
_END = 600  # characters of a log's end


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, and whether a server can work with it; `text` says why or what to do."""

    subject: str
    is_fine: bool
    text: str


@dataclass(frozen=True, slots=True)
class Trial:
    """What the profiles are to evaluate.

    Attributes:
        checkpoint: under one of the server's roots.
        tasks: by profile.
    """

    checkpoint: Path
    tasks: Mapping[str, Sequence[str]]


def examine(given: ServeOptions, trial: Trial | None = None) -> Iterator[Finding]:
    """Yield what is found, one after the other; without a configuration, nothing else is looked at.

    Args:
        given: as for `serve`.
        trial: what to evaluate with the profiles that it names.
    """
    subject = f"configuration {given.config or '(none: every setting has its default)'}"
    try:
        config = configure(given)
    except UnshardError as error:
        yield Finding(subject, is_fine=False, text=str(error))
        return
    profiles = config.profiles
    yield Finding(subject, is_fine=True, text=f"profiles {', '.join(profiles)}")
    yield _look_at_access(config, given)
    yield _look_at_work_directory(config.work_directory or Path())
    for root in config.roots:
        yield _look_at_root(root)
    yield _look_at_gpus(config)
    yield from _look_at_queue(config)
    if config.on_result is not None:
        yield _look_at_command(config.on_result)
    with tempfile.TemporaryDirectory(prefix="unshard-doctor-") as directory:
        work = Path(directory)
        findings = {name: _look_at_profile(name, one, work) for name, one in profiles.items()}
        works = [name for name, finding in findings.items() if finding.is_fine]
        # Without `profiles` in the configuration there is one of each harness; one is enough.
        is_default = profiles == default_profiles(config.gpus)
        is_enough = is_default and not {"lm-eval", "lmms-eval"}.isdisjoint(works)
        for name, finding in findings.items():
            yield replace(finding, is_fine=True) if is_enough else finding
            if name in works and trial and name in trial.tasks:
                yield _try_out(config, name, trial, work / name)
    for name in sorted(trial.tasks.keys() - profiles.keys()) if trial else ():
        text = f"there is no such profile; there are: {', '.join(profiles)}"
        yield Finding(f"trial of {name}", is_fine=False, text=text)


def _look_at_access(config: ServerConfig, given: ServeOptions) -> Finding:
    subject = f"access {config.host}:{config.port}"
    try:
        rules = rules_for(config.host, config.token_file, given.allow_unauthenticated)
    except UnshardError as error:
        return Finding(subject, is_fine=False, text=str(error))
    who = "with a token" if rules.users else "no token: everybody on this machine"
    if names := [f"{user.name} ({user.role})" for user in rules.users if user.name]:
        who = f"users {', '.join(names)}"
    return Finding(subject, is_fine=True, text=who)


def _look_at_work_directory(work: Path) -> Finding:
    subject = f"work directory {work}"
    there = next(place for place in (work, *work.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        text = f"{there} cannot be written; choose another by --work-dir or `work_directory`"
        return Finding(subject, is_fine=False, text=text)
    if there == work and work.stat().st_uid != os.geteuid():
        text = "belongs to another user; choose another by --work-dir or `work_directory`"
        return Finding(subject, is_fine=False, text=text)
    free = shutil.disk_usage(there).free
    text = f"{free / 1e9:.1f} GB free"
    if free < _LEAST_BYTES:
        return Finding(subject, is_fine=False, text=f"{text}; merged models go there: make room")
    return Finding(subject, is_fine=True, text=text)


def _look_at_root(root: Path) -> Finding:
    subject = f"root {root}"
    try:
        count = sum(1 for _ in root.iterdir())
    except (OSError, UnshardError) as error:
        hint = "correct `roots` or --root" if isinstance(error, FileNotFoundError) else ""
        why = "no such directory" if isinstance(error, FileNotFoundError) else str(error)
        return Finding(subject, is_fine=False, text=f"{why}; {hint}" if hint else why)
    text = counted(count, "name")
    if not isinstance(root, RemotePath) and not os.access(root, os.W_OK):
        text += "; it cannot be written: checkpoints that clients do not pin are not kept from "
        text += "rotation"
    return Finding(subject, is_fine=True, text=text)


def _look_at_gpus(config: ServerConfig) -> Finding:
    there = find_gpus()
    names = ", ".join(config.gpus) or "none"
    absent = list_absent(config.gpus)
    if absent is None:
        absent = [name for name in config.gpus if name.isdecimal() and name not in there]
    if absent:
        text = f"this machine has no GPU {', '.join(absent)}; correct `gpus` or --gpus"
        return Finding(f"GPUs {names}", is_fine=False, text=text)
    return Finding(f"GPUs {names}", is_fine=True, text=f"{len(there)} on this machine")


def _look_at_queue(config: ServerConfig) -> Iterator[Finding]:
    """Look for jobs of an earlier server that would wait for this configuration to be mended."""
    database = (config.work_directory or Path()) / DATABASE
    if not database.is_file():
        return
    slots, why, profiles = slots_of(config), Counter[str](), set[str]()
    address = f"file:{quote(str(database))}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            check_version(connection, database)
            rows = connection.execute(_WAITING).fetchall()
    except UnshardError as error:
        yield Finding(f"database {database}", is_fine=False, text=str(error))
        return
    except sqlite3.Error as error:
        yield Finding("jobs that wait", is_fine=False, text=f"{database}: cannot be read: {error}")
        return
    for (text,) in rows:
        try:
            find_work(config.profiles, slots, request := as_request(text))
        except UnshardError as error:
            why[f"profile {request.profile}: {one_line(str(error))}"] += 1
            profiles.add(request.profile)
        except (ValueError, TypeError, LookupError, AttributeError):  # not as a server writes it
            why["a request that cannot be read"] += 1
    found = [f"{counted(number, 'job')} of {text}" for text, number in why.most_common(_SHOWN)]
    found += [f"{len(why) - _SHOWN} more reasons"] if len(why) > _SHOWN else []
    shown = "; ".join(found)
    lines = [f"unshard eval cancel --profile {shlex.quote(one)}" for one in sorted(profiles)]
    hint = f"; correct the configuration, or end them: {'; '.join(lines)}"
    text = f"{shown}{hint}" if why else f"{counted(len(rows), 'job')}, which can begin"
    yield Finding("jobs that wait", is_fine=not why, text=text)


def _look_at_command(on_result: OnResult) -> Finding:
    """Look for the program of `on_result`; it is not run."""
    program = on_result.command[0]
    search = on_result.environment.get("PATH", os.environ.get("PATH", os.defpath))
    if (path := shutil.which(program, path=search)) is None:
        text = f"the program {program} is not found; install it, or change `command`"
        return Finding("on_result", is_fine=False, text=text)
    return Finding("on_result", is_fine=True, text=path)


def _look_at_profile(name: str, profile: Profile, directory: Path) -> Finding:
    subject = f"profile {name} ({profile.kind})"
    try:
        return Finding(subject, is_fine=True, text=versions_of(profile, directory))
    except UnshardError as error:
        return Finding(subject, is_fine=False, text=str(error))


def _try_out(config: ServerConfig, name: str, trial: Trial, work: Path) -> Finding:
    """Evaluate the checkpoint as a server does, with one document of each task of a harness."""
    subject = f"trial of {name}"
    tasks, arguments = tuple(trial.tasks[name]), config.profiles[name].trial
    try:
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
    except UnshardError as error:
        return Finding(subject, is_fine=False, text=str(error))
    if job.status is not Status.COMPLETED:
        return Finding(subject, is_fine=False, text=f"{job.error or job.status}{_end_of_log(work)}")
    numbers = ", ".join(f"{metric} = {value:g}" for metric, value in job.metrics.items())
    return Finding(subject, is_fine=True, text=numbers)


def _end_of_log(work: Path) -> str:
    """Return the end of the last log of an evaluator, which says more than its exit code."""
    logs = sorted(work.glob(f"jobs/*/*/{LOG_NAME}"), key=lambda path: path.stat().st_mtime)
    text = logs[-1].read_text(errors="replace").strip()[-_END:] if logs else ""
    return f"; its log ends:\n{text}" if text else ""
