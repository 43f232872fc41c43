"""From a configuration to a running server, and to its orderly end."""

import errno
import logging
import os
import signal
import socket
import threading
from contextlib import closing, nullcontext
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import uvicorn
from anyio import to_thread
from uvicorn.config import LOGGING_CONFIG

from unshard.errors import UsageError
from unshard.evaluate.logs import log_to_stderr
from unshard.evaluate.server.evaluators.installed import UnknownTasks, tell_missing
from unshard.evaluate.server.gpus import Slots, parse_gpus
from unshard.evaluate.server.health import HealthCheck
from unshard.evaluate.server.http.app import make_app
from unshard.evaluate.server.http.connections import (
    Bounds,
    give_up_silent_readers,
    raise_file_limit,
)
from unshard.evaluate.server.http.security import rules_for
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.placing import RunFinder
from unshard.evaluate.server.processes.gpu_users import list_absent
from unshard.evaluate.server.queue.on_result import running_on_result
from unshard.evaluate.server.queue.scheduler import Scheduler, SchedulerSettings
from unshard.evaluate.server.queue.work_lock import locked
from unshard.evaluate.server.server_yaml import (
    LOG_FORMATS,
    ROOT_PATH_EXPECTED,
    ServerConfig,
    is_root_path,
    read_server_yaml,
)
from unshard.evaluate.server.service import Service
from unshard.evaluate.server.store.schema import is_outdated
from unshard.evaluate.server.store.store import Store
from unshard.stores.remote_path import RemotePath, path_of

_WORK_DIR = Path("unshard-eval")
DATABASE = "jobs.sqlite"  # the database of jobs, in the work directory
_GRACE_S = 3
_THREADS = 12
_log = logging.getLogger(__name__)


class ServeOptions(NamedTuple):
    """The options of the command line; None and (): as in the configuration."""

    config: Path | None = None
    roots: tuple[Path, ...] = ()
    gpus: str | None = None
    host: str | None = None
    port: int | None = None
    token_file: Path | None = None
    allow_unauthenticated: tuple[str, ...] = ()
    work_dir: Path | None = None
    log_format: str | None = None
    root_path: str | None = None


def configure(options: ServeOptions) -> ServerConfig:
    """Return the configuration of a server; by default, one that suits this machine.

    Raises:
        UsageError: a value cannot be used.
    """
    keys: dict[str, object] = {}
    if options.log_format is not None:
        if options.log_format not in LOG_FORMATS:
            formats = ", ".join(LOG_FORMATS)
            raise UsageError(f"--log-format {options.log_format}: unknown", expected=formats)
        keys["log_format"] = options.log_format
    if options.root_path is not None:
        if not is_root_path(options.root_path):
            raise UsageError(
                f"--root-path {options.root_path}: invalid", expected=ROOT_PATH_EXPECTED
            )
        keys["root_path"] = options.root_path
    if options.gpus is not None:
        keys["gpus"] = list(parse_gpus(options.gpus))
    if options.config is None:
        config = ServerConfig.model_validate(keys)
    else:
        config = read_server_yaml(options.config, keys)
    roots = options.roots or config.roots or (Path.cwd(),)
    work = options.work_dir or config.work_directory or _WORK_DIR
    update = {
        "roots": tuple(path_of(root).absolute() for root in roots),
        "host": options.host or config.host,
        "port": config.port if options.port is None else options.port,
        "token_file": options.token_file or config.token_file,
        "work_directory": work.absolute(),
    }
    return config.model_copy(update=update)


def make_service(config: ServerConfig) -> Service:
    """Return a service whose scheduler has not been started.

    Raises:
        UsageError: the work directory cannot be used, or its database not be updated.
    """
    work = _make_private((config.work_directory or _WORK_DIR).absolute())
    database = work / DATABASE
    # A server of an earlier version may still be using a database that is to be updated.
    with locked(work) if is_outdated(database) else nullcontext():
        store = Store(database)
    pins = Pins(store, config.roots, config.pin_quota)
    unknown = UnknownTasks()
    settings = SchedulerSettings(
        work,
        keep_days=config.keep_days,
        keep_gb=config.keep_gb,
        keep_samples_mb=config.keep_samples_mb,
        unknown=unknown,
        pass_at_most=config.pass_at_most,
    )
    slots = slots_of(config)
    scheduler = Scheduler(store, slots, config.profiles, pins, settings)
    health, finder = HealthCheck(database), RunFinder(store.runs, config.roots)
    return Service(store, scheduler, config, pins, health, unknown, slots, finder, work)


def _check_gpus(config: ServerConfig) -> None:
    """Raise a UsageError for configured GPUs that this machine lacks, where that is known."""
    if "gpus" not in config.model_fields_set or not config.gpus:
        return
    if (absent := list_absent(config.gpus)) is None:
        _log.warning(
            "GPU %s: not checked, for lack of NVML (pynvml), nvidia-smi and /proc/driver/nvidia",
            ", ".join(config.gpus),
        )
    elif absent:
        raise UsageError(
            f"this machine has no GPU {', '.join(absent)}",
            expected="numbers or ids that `nvidia-smi -L` shows",
            hint="correct `gpus` or --gpus",
        )


def slots_of(config: ServerConfig) -> Slots:
    """Return the slots that jobs of a server may have."""
    launched = {name: each.slots for name, each in config.profiles.items() if each.launch}
    return Slots(config.gpus, cpu=config.cpu_slots, launched=launched)


def _make_private(work: Path) -> Path:
    """Make the work directory readable by this user only, and return it."""
    try:
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = work.stat()
        if status.st_uid != os.geteuid():
            raise UsageError(f"--work-dir {work} belongs to another user")
        is_ours = (work / DATABASE).is_file() or not any(work.iterdir())
        if status.st_mode & 0o077 and not is_ours:
            raise UsageError(
                f"--work-dir {work} contains other files, and other users may read it",
                expected="a directory for this server alone",
            )
        work.chmod(0o700)
    except OSError as error:
        raise UsageError(f"--work-dir {work} cannot be used", found=str(error)) from error
    return work


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, OverflowError) as error:
        is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        hint = "another process listens there; choose another port: --port N, or 0 for a free one"
        raise UsageError(
            f"--host {host} --port {port}: cannot listen",
            found=str(error),
            hint=hint if is_taken else "",
        ) from error
    # asyncio sets it only for sockets with an explicit protocol; without it, an answer waits 40 ms
    # for its client's acknowledgement of the headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    give_up_silent_readers(listening)
    return listening


def serve(options: ServeOptions) -> None:
    """Run a server until a signal stops it; running evaluators are left to the next server.

    After SIGUSR1 it is drained: it begins no more jobs, and ends when no job runs.

    Raises:
        UsageError: the configuration cannot be used, or another server uses the work directory.
    """
    config = configure(options)
    is_json = config.log_format == "json"
    log_to_stderr(logging.INFO, "%(asctime)s %(name)s %(message)s", as_json=is_json)
    raise_file_limit()
    _check_gpus(config)
    networks = options.allow_unauthenticated
    rules = rules_for(config.host, config.token_file, networks, config.root_path)
    service = make_service(config)
    # First: a process that inherited the lock from a killed server also inherited its port.
    service.scheduler.lock()
    with (
        closing(service.store),
        _listen(config.host, config.port) as listening,
        running_on_result(service.store, config.on_result, service.work_dir),
    ):
        service.scheduler.start()
        service.pins.remove_unneeded()
        _log_start(config, listening)
        signal.signal(signal.SIGTERM, _end)
        # Not `service.drain`: the interrupted thread may be using the database.
        signal.signal(signal.SIGUSR1, lambda _number, _frame: service.scheduler.drain())
        server = _Server(
            service,
            uvicorn.Config(
                Bounds(make_app(service, rules)),
                http="h11",
                ws="none",
                log_level="warning",
                log_config=None if is_json else LOGGING_CONFIG,  # its own format
                proxy_headers=False,  # any client could claim to be a proxy
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,  # clients that follow events never disconnect
            ),
        )
        try:
            server.run(sockets=[listening])
        finally:
            service.scheduler.stop(end=False)


def _log_start(config: ServerConfig, listening: socket.socket) -> None:
    """Log the address, the configuration, and missing evaluators."""
    host, port = listening.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    _log.info("roots %s, profiles %s", list(map(str, config.roots)), list(config.profiles))
    gpus = f"GPUs {', '.join(config.gpus) or 'none'}"
    _log.info("work directory %s, %s", config.work_directory, gpus)
    for root in config.roots:
        if not isinstance(root, RemotePath) and not root.is_dir():
            _log.warning("root %s: no such directory", root)
    # In a thread, so that a slow disk does not delay the server.
    arguments = (config.profiles, config.work_directory or _WORK_DIR)
    threading.Thread(target=tell_missing, args=arguments, name="probing", daemon=True).start()
    _log.info("listening on http://%s:%d", address, port)


class _Server(uvicorn.Server):
    """uvicorn's server with fewer threads; a signal also ends the merges for clients."""

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; threads are few because each holds its answer in memory."""
        to_thread.current_default_thread_limiter().total_tokens = _THREADS
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end, which a drained server does."""
        if self._service.scheduler.is_drained and not self._service.stopping.is_set():
            _log.info("drained: no job runs; queued jobs are left to the next server")
            self._service.stopping.set()
        return await super().on_tick(counter) or self._service.stopping.is_set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end."""
        self._service.stopping.set()
        super().handle_exit(sig, frame)


def _end(_number: int, _frame: FrameType | None) -> None:
    """Exit normally when uvicorn, after it has closed its connections, raises the signal again."""
    raise SystemExit(0)
