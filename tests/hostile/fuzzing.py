"""Random bytes for every parser: each is read, or refused with one of our errors.

A parser joins by a line in `TARGETS`. `hostile.campaign` tries many inputs.
"""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

from unshard.containers.json_file import parsed_object
from unshard.containers.open_files import opened
from unshard.containers.pickles.machine import DangerousPickleError, MalformedPickleError
from unshard.containers.pickles.template import make_template
from unshard.containers.pickles.unpickle import unpickle
from unshard.containers.safetensors_file import read_safetensors
from unshard.containers.torch_files.legacy import read_torch_legacy
from unshard.containers.torch_files.zip import read_torch_zip
from unshard.containers.zstd import decompress
from unshard.errors import UnshardError
from unshard.read.dcp.metadata import read_metadata
from unshard.read.format import Choice, ReadOptions
from unshard.read.open import open_latest
from unshard.write.record import read_record

__all__ = ["TARGETS", "mutated", "try_input"]

Target = Callable[[bytes, Path], object]
_REFUSED = (UnshardError, MalformedPickleError, DangerousPickleError)


def _in_file(read: Callable[[Path], object], name: str = "fuzzed") -> Target:
    def run(data: bytes, scratch: Path) -> None:
        path = scratch / name
        path.write_bytes(data)
        read(path)

    return run


def _checkpoint(name: str) -> Target:
    """Return what opens a directory with this file, as far as its checked catalog."""
    return _in_file(lambda path: open_latest(path.parent, Choice(), ReadOptions()), f"run/{name}")


def _template(data: bytes, scratch: Path) -> None:
    del scratch
    template, _ = make_template(data)
    template.numbers_in(data)
    template.numbers_in(bytes(reversed(data)))


def _zip(data: bytes, scratch: Path) -> None:
    archive = read_torch_zip(
        scratch, offset=0, length=len(data), pread=lambda count, at: data[at : at + count]
    )
    for record in archive.storages.values():
        assert 0 <= record.offset <= record.offset + record.size <= len(data)


def _zstd(data: bytes, scratch: Path) -> None:
    path = scratch / "fuzzed"
    path.write_bytes(data)
    out = io.BytesIO()
    with opened(path) as file, suppress(UnshardError):
        decompress("fuzzed", file, (0, len(data)), out, 10_000)
    assert len(out.getvalue()) <= 10_000


def _record(data: bytes, scratch: Path) -> None:
    (scratch / "unshard.json").write_bytes(data)
    directory = os.open(scratch, os.O_RDONLY)
    try:
        read_record(directory)
    finally:
        os.close(directory)


TARGETS: Mapping[str, Target] = {
    "pickle": lambda data, _: unpickle(data),
    "template": _template,
    "zip": _zip,
    "legacy": _in_file(read_torch_legacy),
    "safetensors": _in_file(read_safetensors),
    "json": lambda data, _: parsed_object(data, "fuzzed"),
    "dcp": _in_file(lambda path: read_metadata([path])),
    "zstd": _zstd,
    "record": _record,
    "rank file": _checkpoint("model_world_size_1_rank_0.pt"),
    "model": _checkpoint("pytorch_model.bin"),
    "model states": _checkpoint("mp_rank_00_model_states.pt"),
}
"""What reads bytes of others: given them, and a directory of its own."""


def try_input(target: str, data: bytes, scratch: Path) -> None:
    """Give a parser an input; anything but its own errors is raised."""
    with suppress(*_REFUSED):
        TARGETS[target](data, scratch)


def mutated(seeds: Sequence[bytes], random: Random) -> bytes:
    """Return one of the seeds with some bytes changed, inserted, repeated or removed."""
    data = bytearray(random.choice(seeds))
    for _ in range(random.randint(1, 4)):
        at, size = random.randint(0, len(data)), random.randint(1, 8)
        match random.randrange(5):
            case 0:
                data[at : at + 1] = random.randbytes(1)
            case 1:
                data[at : at + size] = random.choice([b"\xff", b"\0", b"\x7f"]) * size
            case 2:
                data[at:at] = random.randbytes(size)
            case 3:
                del data[at : at + size]
            case _:
                other = random.choice(seeds)
                start = random.randint(0, len(other))
                data[at : at + size] = other[start : start + size]
    return bytes(data)
