"""From a configuration to a running server, and to its orderly end."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from unshard.errors import UnshardError, UsageError
from unshard.evaluate.evaluators import make_evaluator
from unshard.evaluate.jobs import Job
from unshard.evaluate.pins import Quota, read_pin
from unshard.evaluate.profiles import ServerConfig
from unshard.evaluate.scheduler import Scheduler, Settings
from unshard.evaluate.server.app import make_app
from unshard.evaluate.server.security import rules_for
from unshard.evaluate.server.service import Service, let_go, profile_named
from unshard.evaluate.slots import Slots
from unshard.evaluate.store import Store
from unshard.evaluate.work import Evaluator, Profile

__all__ = ["Given", "configured", "make_service", "serve"]

_WORK_DIR = Path("unshard-eval")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says; None and empty: as the configuration has it."""

    config: Path | None = None
    roots: tuple[Path, ...] = ()
    gpus: str | None = None
    host: str | None = None
    port: int | None = None
    token_file: Path | None = None
    allow_unauthenticated: tuple[str, ...] = ()
    work_dir: Path | None = None


def configured(given: Given) -> ServerConfig:
    """Return the configuration of a server; without any, what suits this machine.

    Raises:
        UsageError: something of it makes no sense.
    """
    config = ServerConfig.default()
    if given.config is not None:
        config = ServerConfig.from_yaml(given.config)
    gpus = config.gpus if given.gpus is None else _gpus(given.gpus)
    profiles = {
        name: replace(one, gpus=min(one.gpus, len(gpus))) for name, one in config.profiles.items()
    }
    return replace(
        config,
        roots=given.roots or config.roots or (Path.cwd(),),
        gpus=gpus,
        host=given.host or config.host,
        port=config.port if given.port is None else given.port,
        token_file=given.token_file or config.token_file,
        work_directory=given.work_dir or config.work_directory or _WORK_DIR,
        profiles=profiles,
    )


def _gpus(text: str) -> tuple[int, ...]:
    """Return the GPUs that "0,1" names, or how many "2" means."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"--gpus {text}: unknown", expected="numbers, 0,1, or how many: 2")
    if len(parts) == 1 and "," not in text:
        return tuple(range(int(parts[0])))
    return tuple(dict.fromkeys(map(int, parts)))


def make_service(config: ServerConfig) -> Service:
    """Return what a server does: its jobs, and a scheduler that has not begun."""
    work = (config.work_directory or _WORK_DIR).absolute()
    work.mkdir(parents=True, exist_ok=True)
    work.chmod(0o700)
    store = Store(work / "jobs.sqlite")

    def evaluators(name: str) -> tuple[Profile, Evaluator]:
        profile = profile_named(config.profiles, name)
        return profile, make_evaluator(profile)

    def ended(job: Job) -> None:
        let_go(store, job.pin)

    settings = Settings(work, changed=_changed, ended=ended)
    scheduler = Scheduler(store, Slots(config.gpus), evaluators, settings)
    return Service(store, scheduler, config, Quota(config.pin_count, config.pin_bytes))


def serve(given: Given) -> None:
    """Run a server until it is told to stop; running evaluators are left to the next one.

    Raises:
        UsageError: the configuration makes no sense, or another server uses the work directory.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    config = configured(given)
    rules = rules_for(config.host, config.token_file, given.allow_unauthenticated)
    service = make_service(config)
    service.scheduler.start()
    _log.info("roots %s, profiles %s", list(map(str, config.roots)), list(config.profiles))
    try:
        app = make_app(service, rules)
        uvicorn.run(app, host=config.host, port=config.port, log_level="warning")
    finally:
        service.scheduler.stop(end=False)
        service.store.close()


def _changed(job: Job) -> Sequence[str]:
    """Return the files of a job's pin that were rewritten since."""
    try:
        return [] if job.pin is None else read_pin(Path(job.pin)).changed()
    except (UnshardError, OSError):
        return []
