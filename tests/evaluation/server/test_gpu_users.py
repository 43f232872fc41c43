"""GPUs that others use, with stand-ins for NVML and nvidia-smi that answer as the real ones.

What they answer was noted from an H200 with driver, nvidia-smi and nvidia-ml-py of their own.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from evaluation.running import job_of, request, scheduler, script_profile, wait_for, whole_model
from evaluation.servers import Live
from unshard.evaluate.jobs import Job, Status
from unshard.evaluate.server.endings import Cause, OutOfMemory, Postponed, judge
from unshard.evaluate.server.evaluators.work import EvalInput, Scores
from unshard.evaluate.server.processes import gpu_users
from unshard.evaluate.server.processes.gpu_users import GpuUsers, list_absent, read_devices
from unshard.evaluate.server.processes.supervise import Exit
from unshard.evaluate.server.queue.scheduler import Scheduler
from unshard.evaluate.server.store.store import Store
from waiting import wait_until

MIB = 1 << 20

NVML = """
import json, os, pathlib
nvmlMemory_v2 = 0x2000028
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
class Info:
    def __init__(self, **fields): self.__dict__.update(fields)
place = pathlib.Path(__file__).with_name("gpus.json")
def nvmlInit():
    with place.with_name("asked").open("a") as file: file.write("x")
    if not place.exists(): raise NVMLError("Driver Not Loaded")
def nvmlShutdown(): pass
def gpus(): return json.loads(place.read_text())
def nvmlDeviceGetCount(): return len(gpus())
def nvmlDeviceGetHandleByIndex(index): return gpus()[index]
def nvmlDeviceGetUUID(handle): return handle["uuid"]
def nvmlDeviceGetMemoryInfo(handle, version=None):
    # Without a version, with what the driver reserves.
    return Info(used=(handle["used"] + (0 if version else 615)) << 20, total=143156 << 20)
def nvmlDeviceGetComputeRunningProcesses(handle):
    return [Info(pid=568, usedGpuMemory=None if one is None else one << 20)
            for one in handle["processes"]]
"""

SMI = """
import json, pathlib, sys
place = pathlib.Path(__file__).with_name("gpus.json")
with place.with_name("asked").open("a") as file: file.write("x")
if not place.exists():
    print("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    sys.exit(9)
assert sys.argv[2:] == ["--format=csv,noheader,nounits"], sys.argv
for number, gpu in enumerate(json.loads(place.read_text())):
    if sys.argv[1] == "--query-gpu=index,uuid,memory.used":
        print(f"{number}, {gpu['uuid']}, {gpu['used']}")
    elif sys.argv[1] == "--query-compute-apps=gpu_uuid,used_memory":
        for one in gpu["processes"]:
            print(f"{gpu['uuid']}, {'[N/A]' if one is None else one}")
"""

Gpu = tuple[int, tuple[int | None, ...]]
FREE: Gpu = (0, ())
TAKEN: Gpu = (12595, (12587,))


@dataclass
class Driver:
    """What it says is in a file next to the module and the program."""

    directory: Path

    def show(self, *gpus: Gpu) -> None:
        said = [
            {
                "uuid": f"GPU-{number}d0386-7532-df78-4a52-cd121116b84e",
                "used": used,
                "processes": of,
            }
            for number, (used, of) in enumerate(gpus)
        ]
        draft = self.directory / "draft"
        draft.write_text(json.dumps(said))
        draft.rename(self.directory / "gpus.json")

    def asked(self) -> int:
        file = self.directory / "asked"
        return file.stat().st_size if file.exists() else 0


@pytest.fixture(params=["nvml", "nvidia-smi"])
def driver(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    place = tmp_path / "driver"
    place.mkdir()
    monkeypatch.setattr(gpu_users, "_EVERY_S", 0.3)
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    if request.param == "nvml":
        (place / "pynvml.py").write_text(NVML)
        monkeypatch.syspath_prepend(place)
        monkeypatch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    else:
        program = place / "nvidia-smi"
        program.write_text(f"#!{sys.executable} -IS\n{SMI}")
        program.chmod(0o755)
    yield Driver(place)
    sys.modules.pop("pynvml", None)


@pytest.mark.parametrize(
    ("gpu", "mib"),
    [
        (FREE, 0),
        (TAKEN, 12595),
        ((621, (612,)), 621),  # a context of CUDA and nothing in it
        ((30, (30,)), 0),  # MPS's server
        ((480, ()), 0),  # a desktop
        ((900, ()), 900),  # a process of another container
        ((900, (None,)), 900),
        ((100, (40, 50)), 100),
    ],
)
def test_what_is_used_by_others(driver: Driver, gpu: Gpu, mib: int) -> None:
    driver.show(FREE, gpu)
    devices = read_devices()
    assert devices is not None
    assert [one.number for one in devices] == ["0", "1"]
    assert [one.used_by_others for one in devices] == [0, mib * MIB]


def test_an_older_nvml_counts_what_the_driver_reserves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(NVML.replace("nvmlMemory_v2 =", "_ ="))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    driver = Driver(tmp_path)
    driver.show(FREE, (700, ()), (9000, ()), (621, (612,)))
    devices = read_devices()
    sys.modules.pop("pynvml")
    assert devices is not None
    assert [one.used_by_others // MIB for one in devices] == [0, 1315, 9615, 1236]


def test_a_driver_that_does_not_answer_is_none(driver: Driver) -> None:
    assert read_devices() is None
    users = GpuUsers()
    asked = driver.asked()
    assert asked
    for _ in range(5):
        assert users.ask(frozenset({"0"})) == frozenset()
    assert driver.asked() == asked + 1  # the next look is a minute later
    assert users.describe(frozenset({"0"}), 1) is None


def test_one_question_is_enough_for_a_while(driver: Driver) -> None:
    users = GpuUsers()
    driver.show(FREE, TAKEN, FREE)
    free = frozenset({"0", "1", "GPU-2d03", "MIG-8f3a", "7"})
    asks = time.monotonic()
    assert users.ask(free) == {"1"}
    once = driver.asked()
    assert users.ask(free) == {"1"}
    assert time.monotonic() - asks > 0.3 or driver.asked() == once
    assert users.describe(free, 5) == "GPU 1 is used by others (12.3 GiB)"
    assert users.describe(free, 4) is None
    driver.show(FREE, FREE, TAKEN)
    wait_until(lambda: users.ask(free) == {"GPU-2d03"}, "the next look")
    driver.show(TAKEN, FREE, FREE)
    wait_until(lambda: users.ask(frozenset({"1"})) == frozenset(), "the next look")
    if users.ask(frozenset({"0", "1"})) == {"0"}:  # it is free only now: not known, or used
        assert "0" in users.taken
    wait_until(lambda: users.describe(frozenset({"0"}), 1) is not None or users.ask(frozenset("0")))


Made = Callable[..., tuple[Store, Scheduler, Callable[..., Job]]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    """Return what makes a server with GPUs 0 to 2, and submits to it."""
    begun: list[tuple[Store, Scheduler]] = []

    def made(most: int = 0) -> tuple[Store, Scheduler, Callable[..., Job]]:
        script = "draft = model.parent / f'draft-{step}'\n"
        script += "draft.write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        script += "draft.rename(model.parent / f'gpus-{step}')\n"
        script += "\nwhile not (model.parent / f'go-{step}').exists(): time.sleep(0.01)\n"
        script += "done(acc=1)"
        store, server = scheduler(
            tmp_path / "work",
            script,
            gpus="0,1,2",
            profile=script_profile(),
            pass_at_most=most,
        )
        begun.append((store, server))
        model = whole_model(tmp_path / "model")

        def submit(step: int, **more: object) -> Job:
            return store.submit(request(model, step, **more), pin=None)[0]

        server.start()
        return store, server, submit

    yield made
    for store, server in begun:
        server.stop(end=True)
        store.close()


def test_a_job_waits_for_a_gpu_that_others_use_and_others_are_taken(
    driver: Driver, make: Made, tmp_path: Path
) -> None:
    driver.show(TAKEN, FREE, FREE)
    store, server, submit = make()
    first, large, second, cpu = submit(1), submit(2, num_gpus=3), submit(3), submit(4, num_gpus=0)
    for step, gpu in ((1, "1"), (3, "2"), (4, "")):
        note = tmp_path / f"gpus-{step}"
        wait_until(note.exists, f"step {step}")
        assert note.read_text() == gpu
    assert server.waits_for(job_of(store, large.id)) == "GPU 0 is used by others (12.3 GiB)"
    last = submit(5)
    wait_until(lambda: server.waits_for(job_of(store, last.id)) is not None, "its reason")
    assert server.waits_for(job_of(store, first.id)) is None
    driver.show(FREE, (5000, (4990,)), (5000, (4990,)))  # our own jobs, on GPUs that are not free
    wait_until(lambda: server.waits_for(job_of(store, last.id)) is None, "no reason")
    time.sleep(0.5)
    assert not (tmp_path / "gpus-5").exists()  # what is free is kept for the large job now
    driver.show(FREE, FREE, FREE)
    for step in range(1, 6):
        (tmp_path / f"go-{step}").touch()
    for job in (first, large, second, cpu, last):
        wait_for(store, job.id, Status.COMPLETED)
    assert (tmp_path / "gpus-2").read_text() == "0,1,2"
    assert (tmp_path / "gpus-5").read_text() == "0"


def test_a_driver_is_asked_only_before_a_job_begins(driver: Driver, make: Made) -> None:
    driver.show(FREE, FREE, FREE)
    store, _, submit = make()
    time.sleep(1)
    assert driver.asked() == 0
    job = submit(1, num_gpus=0)
    wait_until(lambda: job_of(store, job.id).status is Status.RUNNING)
    assert driver.asked() == 0


def test_gpus_that_the_machine_has(driver: Driver) -> None:
    driver.show(FREE, FREE)
    assert list_absent(["0", "1", "GPU-1d0386", "MIG-8f3a"]) == []
    assert list_absent(["0", "6", "7", "GPU-7d"]) == ["6", "7", "GPU-7d"]


def test_gpus_are_counted_by_the_kernels_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_users, "read_devices", lambda: None)
    monkeypatch.setattr(gpu_users, "_DRIVERS", tmp_path)
    for name in ("0000:00:06.0", "0000:00:07.0"):
        (tmp_path / name).mkdir()
    assert list_absent(["1", "2", "GPU-8f3a"]) == ["2"]
    monkeypatch.setattr(gpu_users, "_DRIVERS", tmp_path / "nothing")
    assert list_absent(["1", "2"]) is None


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["nvidia-smi"], indirect=True)
def test_a_server_says_at_its_start_that_a_gpu_is_not_there(driver: Driver, tmp_path: Path) -> None:
    driver.show(*[FREE] * 4)
    server = Live(tmp_path / "server", ("--gpus", "3,6,7"))
    server.configure()
    server.launch()
    assert server.process is not None
    assert server.process.wait(60) != 0
    assert "this machine has no GPU 6, 7" in server.told()
    server.options = ("--gpus", "2,3")
    server.start()
    server.stop()
    assert "is not known" not in server.told()
    (driver.directory / "gpus.json").unlink()
    server.start()
    server.stop()
    assert server.told().count("GPU 2, 3: not checked, for lack of NVML") == 1


SAYS = """print({line!r}, flush=True)
(model.parent / "began").open("a").write("x")
while (model.parent / "holds").exists(): time.sleep(0.01)
if (model.parent / "fits").exists(): done(acc=1)
else: sys.exit(1)
"""
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has a total"
    " capacity of 139.80 GiB of which 139.29 GiB is free."
)
VLLM = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
)
BUSY = (
    "(EngineCore pid=7) ValueError: Free memory on device cuda:0 (1.2/139.8 GiB) on startup is less"
    " than desired GPU memory utilization (0.9, 125.8 GiB)."
)


@pytest.mark.parametrize("line", [TORCH, VLLM, BUSY])
def test_memory_that_ran_out_is_told_and_tried_again_as_a_failure_is(
    tmp_path: Path, line: str
) -> None:
    profile = script_profile(retries=1)
    store, server = scheduler(tmp_path / "work", SAYS.format(line=line), profile=profile)
    job = store.submit(request(whole_model(tmp_path / "model")), pin=None)[0]
    server.start()
    try:
        done = wait_for(store, job.id, Status.FAILED)
    finally:
        server.stop(end=True)
        store.close()
    assert (done.attempts, done.failures) == (2, 2)
    assert str(done.error).startswith("script: out of GPU memory\n")
    assert "hint:     choose a smaller batch_size" in str(done.error)
    assert line[:100] in str(done.error)


def test_memory_that_others_took_meanwhile_is_no_failure(driver: Driver, tmp_path: Path) -> None:
    driver.show(FREE)
    (tmp_path / "holds").touch()
    profile = script_profile(retries=0)
    store, server = scheduler(tmp_path / "work", SAYS.format(line=TORCH), profile=profile)
    job = store.submit(request(whole_model(tmp_path / "model")), pin=None)[0]
    server.start()
    try:
        wait_until((tmp_path / "began").exists, "the evaluator")
        driver.show(TAKEN)
        (tmp_path / "holds").unlink()
        wait_until(lambda: job_of(store, job.id).status is Status.QUEUED, "its next turn")
        error = str(job_of(store, job.id).error)
        assert error.startswith("GPU 0 is used by others (12.3 GiB)\nscript: out of GPU memory")
        wait_until(lambda: server.waits_for(job_of(store, job.id)) is not None, "what it waits for")
        assert job_of(store, job.id).attempts == 1
        (tmp_path / "fits").touch()
        driver.show(FREE)
        done = wait_for(store, job.id, Status.COMPLETED)
        assert (done.attempts, done.failures) == (2, 0)
    finally:
        server.stop(end=True)
        store.close()


@pytest.mark.parametrize("code", [-9, 137])
def test_a_killed_evaluator_has_not_run_out_of_gpu_memory(tmp_path: Path, code: int) -> None:
    (tmp_path / "log.txt").write_text(f"{TORCH}\ntrying half the batch\n")
    work = EvalInput(tmp_path, tmp_path, tmp_path, request(tmp_path), script_profile())
    outcome = judge(work, Exit("exited", code, "", 1.0))
    assert isinstance(outcome, Postponed)
    assert outcome.cause is Cause.KILLED
    assert isinstance(judge(work, Exit("exited", 1, "", 1.0)), OutOfMemory)
    (tmp_path / "metrics.json").write_text('{"task/acc": 1}')
    assert isinstance(judge(work, Exit("exited", 0, "", 1.0)), Scores)
