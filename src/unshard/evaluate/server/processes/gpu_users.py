"""How much memory of NVIDIA's GPUs is in use, and by what, as the driver says.

By NVML, if the module `pynvml` (nvidia-ml-py) is there, else by `nvidia-smi`. Parts of a GPU
(`MIG-...`) are not looked at.
"""

import logging
import shutil
import subprocess
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

_EVERY_S = 3.0
_NOTHING_S = 60.0  # until a driver is looked for again where there is none
_TIMEOUT_S = 10.0
_MIB = 1 << 20
# More than CUDA's own server for several processes (MPS) has; every other process has more.
_PROCESS_BYTES = 64 * _MIB
# Of processes that the driver does not list: those of other containers, and a desktop.
_HIDDEN_BYTES = 512 * _MIB
_RESERVED_BYTES = 1024 * _MIB
_DRIVERS = Path("/proc/driver/nvidia/gpus")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: its number and id, how many bytes are in use, and how many by processes."""

    number: str
    uuid: str
    used: int
    of_processes: int

    @property
    def used_by_others(self) -> int:
        """How many bytes are in use if this server uses none; 0: not so many that it matters."""
        is_used = self.of_processes > _PROCESS_BYTES or self.used > _HIDDEN_BYTES
        return max(self.used, self.of_processes) if is_used else 0

    def is_called(self, name: str) -> bool:
        """Return whether a name is this number, or the beginning of this id."""
        return name == self.number or (name.startswith("GPU-") and self.uuid.startswith(name))


def read_devices() -> list[Device] | None:
    """Return all GPUs that the driver lets this process see; None: there is no driver to ask."""
    for read in (_by_nvml, _by_nvidia_smi):
        try:
            return list(read())
        except Exception as error:  # noqa: BLE001  (each version of NVML has errors of its own)
            _log.debug("%s: %r", read.__name__, error)
    return None


def list_absent(gpus: Collection[str]) -> list[str] | None:
    """Return those GPUs that this machine does not have; None: its GPUs cannot be counted."""
    devices = read_devices()
    if devices is not None:
        parts = [name for name in gpus if not name.startswith("MIG-")]
        return [name for name in parts if not any(one.is_called(name) for one in devices)]
    try:
        count = sum(1 for _ in _DRIVERS.iterdir())
    except OSError:
        return None
    return [name for name in gpus if name.isdecimal() and int(name) >= count]


class GpuUsers:
    """Which GPUs others use; asks once every few seconds at most. For one thread, but `describe`.

    Attributes:
        taken: the GPUs that were not to be had when this was asked last.
    """

    def __init__(self) -> None:
        self.taken: frozenset[str] = frozenset()
        self._used: Mapping[str, int] = {}
        self._known: frozenset[str] | None = None  # None: there is no driver to ask
        self._until = 0.0

    def ask(self, free: frozenset[str]) -> frozenset[str]:
        """Return those GPUs, of some that this server does not use, that others use.

        One that became free only now may still be shown as used: it is taken until the next look.
        """
        if time.monotonic() > self._until:
            devices = read_devices()
            self._until = time.monotonic() + (_NOTHING_S if devices is None else _EVERY_S)
            self._known = None if devices is None else free
            used = _used_by_others(free, devices or ())
            if used.keys() - self._used.keys():
                _log.info("%s; jobs do not get it", describe_use(used))
            self._used = used
        unknown = free - self._known if self._known is not None else frozenset()
        self.taken = frozenset(self._used) | unknown
        return self.taken & free

    @property
    def count(self) -> int:
        """How many GPUs others used when this was asked last."""
        return len(self._used)

    def describe(self, free: frozenset[str], count: int) -> str | None:
        """Return that others use what a job for so many GPUs waits for; None if they do not."""
        used = self._used
        return describe_use(used) if used and len(free - used.keys()) < count else None


def read_use(gpus: Collection[str]) -> str:
    """Return which of these GPUs others use now, if this server uses none of them; or nothing."""
    return describe_use(_used_by_others(gpus, read_devices() or ())) if gpus else ""


def _used_by_others(gpus: Collection[str], devices: Iterable[Device]) -> dict[str, int]:
    pairs = [(name, one) for name in gpus for one in devices if one.is_called(name)]
    return {name: one.used_by_others for name, one in pairs if one.used_by_others}


def describe_use(used: Mapping[str, int]) -> str:
    """Return which GPUs others use, for people: "GPU 3 is used by others (12.3 GiB)"."""
    names = sorted(used, key=lambda name: (len(name), name))
    sizes = {name: f"{used[name] / 2**30:.1f} GiB" for name in names}
    return "; ".join(f"GPU {name} is used by others ({size})" for name, size in sizes.items())


def _by_nvml() -> Iterator[Device]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an older package of this name asks to be replaced
        nvml: Any = import_module("pynvml")
    nvml.nvmlInit()
    try:
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            of_processes = sum(one.usedGpuMemory or 0 for one in processes)
            uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
            yield Device(str(number), uuid, _used(nvml, handle), of_processes)
    finally:
        nvml.nvmlShutdown()


def _used(nvml: Any, handle: Any) -> int:
    """Return the bytes in use, without those that the driver reserves (0.6 GiB of an H200)."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used)
    except Exception:  # noqa: BLE001  an older NVML, which does not tell them apart
        used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return used if used > _RESERVED_BYTES else 0


def _by_nvidia_smi() -> Iterator[Device]:
    of_processes = dict[str, int]()
    for uuid, used in _ask("--query-compute-apps=gpu_uuid,used_memory", 2):
        of_processes[uuid] = of_processes.get(uuid, 0) + _bytes(used)
    for number, uuid, used in _ask("--query-gpu=index,uuid,memory.used", 3):
        yield Device(number, uuid, _bytes(used), of_processes.get(uuid, 0))


def _ask(query: str, fields: int) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("nvidia-smi")
    command = [program, query, "--format=csv,noheader,nounits"]
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == fields]


def _bytes(mib: str) -> int:
    return int(mib) * _MIB if mib.isdecimal() else 0  # "[N/A]" in a container
