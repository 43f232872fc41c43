"""Memory of NVIDIA's GPUs that other processes use, from the driver.

Read by NVML, if the module `pynvml` (nvidia-ml-py) is installed, else by `nvidia-smi`. Parts of a
GPU (`MIG-...`) are ignored.
"""

import logging
import shutil
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

_EVERY_S = 3.0
_NOTHING_S = 60.0  # until a missing driver is looked for again
_TIMEOUT_S = 10.0
_MIB = 1 << 20
# More than CUDA's MPS server uses; every other process uses more.
_PROCESS_BYTES = 64 * _MIB
# Memory of processes that the driver does not list: in other containers, or a desktop's.
_HIDDEN_BYTES = 512 * _MIB
_RESERVED_BYTES = 1024 * _MIB
_DRIVERS = Path("/proc/driver/nvidia/gpus")

_log = logging.getLogger(__name__)


class Device(NamedTuple):
    """A GPU: its number and id, the bytes in use, and the bytes that listed processes use."""

    number: str
    uuid: str
    used: int
    of_processes: int

    @property
    def used_by_others(self) -> int:
        """The bytes in use, on a GPU that this server does not use; 0 if they are negligible."""
        is_used = self.of_processes > _PROCESS_BYTES or self.used > _HIDDEN_BYTES
        return max(self.used, self.of_processes) if is_used else 0

    def is_called(self, name: str) -> bool:
        """Return whether a name is this number, or the beginning of this id."""
        return name == self.number or (name.startswith("GPU-") and self.uuid.startswith(name))


def read_devices() -> list[Device] | None:
    """Return all GPUs that the driver shows to this process; None if there is no driver."""
    for read in (_by_nvml, _by_nvidia_smi):
        try:
            return list(read())
        except Exception as error:  # noqa: BLE001  (each version of NVML has its own errors)
            _log.debug("%s: %r", read.__name__, error)
    return None


def list_absent(gpus: Collection[str]) -> list[str] | None:
    """Return the GPUs that this machine lacks; None if its GPUs cannot be counted."""
    devices = read_devices()
    if devices is not None:
        whole = [name for name in gpus if not name.startswith("MIG-")]
        return [name for name in whole if not any(gpu.is_called(name) for gpu in devices)]
    try:
        count = sum(1 for _ in _DRIVERS.iterdir())
    except OSError:
        return None
    return [name for name in gpus if name.isdecimal() and int(name) >= count]


class GpuUsers:
    """The GPUs that others use, read once in three seconds at most.

    Only `describe` may be called from several threads. `taken` has the GPUs that were not available
    at the last call of `ask`.
    """

    def __init__(self) -> None:
        self.taken: frozenset[str] = frozenset()
        self._used: Mapping[str, int] = {}
        self._read: frozenset[str] | None = None  # the GPUs that were free then; None: no driver
        self._until = 0.0

    def ask(self, free: frozenset[str]) -> frozenset[str]:
        """Return the GPUs among `free`, which this server does not use, that others use.

        The driver may still show a GPU that just became free as used, so it counts as taken until
        the next reading.
        """
        if time.monotonic() > self._until:
            devices = read_devices()
            self._until = time.monotonic() + (_NOTHING_S if devices is None else _EVERY_S)
            self._read = None if devices is None else free
            used = _used_by_others(free, devices or ())
            if used.keys() - self._used.keys():
                _log.info("%s; jobs do not get it", describe_use(used))
            self._used = used
        unknown = free - self._read if self._read is not None else frozenset()
        self.taken = frozenset(self._used) | unknown
        return self.taken & free

    @property
    def count(self) -> int:
        """How many GPUs others used at the last call of `ask`."""
        return len(self._used)

    def describe(self, free: frozenset[str], count: int) -> str | None:
        """Describe the GPUs that others use, if a job waits for them; None if it does not."""
        used = self._used
        return describe_use(used) if used and len(free - used.keys()) < count else None


def read_use(gpus: Collection[str]) -> str:
    """Describe which of these GPUs, that this server does not use, others use now; "" if none."""
    return describe_use(_used_by_others(gpus, read_devices() or ())) if gpus else ""


def _used_by_others(gpus: Collection[str], devices: Iterable[Device]) -> dict[str, int]:
    pairs = [(name, gpu) for name in gpus for gpu in devices if gpu.is_called(name)]
    return {name: gpu.used_by_others for name, gpu in pairs if gpu.used_by_others}


def describe_use(used: Mapping[str, int]) -> str:
    """Describe the bytes that others use: "GPU 3 is used by others (12.3 GiB)"."""
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
            of_processes = sum(process.usedGpuMemory or 0 for process in processes)
            uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
            yield Device(str(number), uuid, _used(nvml, handle), of_processes)
    finally:
        nvml.nvmlShutdown()


def _used(nvml: Any, handle: Any) -> int:
    """Return the bytes in use, without the driver's reserve (0.6 GiB of an H200)."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used)
    except Exception:  # noqa: BLE001  an older NVML, whose figure includes the reserve
        used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return used if used > _RESERVED_BYTES else 0


def _by_nvidia_smi() -> Iterator[Device]:
    of_processes = Counter[str]()
    for uuid, used in _ask("--query-compute-apps=gpu_uuid,used_memory", 2):
        of_processes[uuid] += _bytes(used)
    for number, uuid, used in _ask("--query-gpu=index,uuid,memory.used", 3):
        yield Device(number, uuid, _bytes(used), of_processes[uuid])


def _ask(query: str, fields: int) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("nvidia-smi")
    command = [program, query, "--format=csv,noheader,nounits"]
    process = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    rows = [[part.strip() for part in line.split(",")] for line in process.stdout.splitlines()]
    return [row for row in rows if len(row) == fields]


def _bytes(mib: str) -> int:
    return int(mib) * _MIB if mib.isdecimal() else 0  # "[N/A]" in a container
