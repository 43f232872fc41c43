"""Every attack on every kind of file: one table of places, one of what is put there.

A new format joins by a line in `PICKLED`, `ZIPPED`, `HEADED` or `JSON`; a new attack by a line in
the module of its kind.
"""

import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hostile import pickles, texts, zips
from hostile.dcp import LIES, put_item, rewritten

__all__ = ["HOSTS", "Attack", "attacks"]

Write = Callable[[Path, bytes], object]
_RANK = "model_world_size_3_rank_1.pt"
_ZERO = "global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
_LEGACY = b"".join(
    pickle.dumps(part, 2)
    for part in (
        0x1950A86A20F9469CFC6C,
        1001,
        {"protocol_version": 1001, "little_endian": True, "type_sizes": {}},
    )
)


@dataclass(frozen=True, slots=True)
class Attack:
    """A checkpoint that is hostile.

    Attributes:
        name: which attack on which file.
        host: the sample that is changed.
        on_code: it reaches for code, so that a merge must refuse it; the others may also be read as
            what the sample is.
        make: makes it of the sample: both paths.
    """

    name: str
    host: str
    on_code: bool
    make: Callable[[Path, Path], object]


def _to(name: str) -> Write:
    return lambda directory, data: (directory / name).write_bytes(data)


def _zipped(name: str) -> Write:
    """Return what puts a pickle in the place of that of a torch.save file, storages stay."""

    def write(directory: Path, data: bytes) -> None:
        path = directory / name
        records = zips.records_of(path.read_bytes())
        path.write_bytes(zips.packed(records | {"data.pkl": data}))

    return write


def _spliced(name: str) -> Write:
    """Return what adds a pickle to the state dict of a torch.save file, as one more value."""

    def write(directory: Path, data: bytes) -> None:
        path = directory / name
        records = zips.records_of(path.read_bytes())
        state = records["data.pkl"][:-1] + pickles.binary("evil") + data[:-1] + b"s."
        path.write_bytes(zips.packed(records | {"data.pkl": state}))

    return write


PICKLED: Mapping[str, tuple[str, Write]] = {
    "the pickle of a rank file": ("rank files", _zipped(_RANK)),
    "a value in a rank file": ("rank files", _spliced(_RANK)),
    "the pickle of FSDP1's": ("rank files, ShardedTensors", _zipped(_RANK)),
    "a value in a .bin of a rank": ("bins", _spliced("pytorch_model_fsdp_0_rank1.bin")),
    "a value in pytorch_model.bin": ("pytorch_model.bin", _spliced("pytorch_model.bin")),
    "a legacy file": (
        "legacy torch",
        lambda at, data: _to("pytorch_model.bin")(at, _LEGACY + data + pickle.dumps([], 2)),
    ),
    "DCP's .metadata": ("DCP", _to(".metadata")),
    "a rank's __1.metadata": ("DCP, no collectives", _to("__1.metadata")),
    "an item of DCP": (
        "DCP, many files",
        lambda at, data: put_item(at, zips.packed({"data.pkl": data, "byteorder": b"little"})),
    ),
    "Lightning's meta.pt": ("DCP, Lightning", _zipped("meta.pt")),
    "a zip in its place": ("rank files", _to(_RANK)),
    "the model's states of ZeRO": ("ZeRO-2", _zipped("global_step1/mp_rank_00_model_states.pt")),
    "a value in a rank's states of ZeRO": ("ZeRO-3", _spliced(_ZERO)),
}
"""Where a pickle is: the sample, and what writes one there."""

ZIPPED: Mapping[str, tuple[str, str]] = {
    "a rank file": ("rank files", _RANK),
    "pytorch_model.bin": ("pytorch_model.bin", "pytorch_model.bin"),
    "a .bin of a rank": ("bins", "pytorch_model_fsdp_0_rank1.bin"),
    "a rank's states of ZeRO": ("ZeRO-3", _ZERO),
}
"""Files of torch.save: the sample, and the name."""

HEADED: Mapping[str, tuple[str, str]] = {
    "model.safetensors": ("one safetensors", "model.safetensors"),
    "one of several files": ("safetensors and index", "model-00001-of-00002.safetensors"),
}
"""Files of safetensors."""

JSON: Mapping[str, tuple[str, str]] = {
    "the index": ("safetensors and index", "model.safetensors.index.json"),
    "config.json": ("one safetensors", "config.json"),
}
"""JSON that is read."""

HOSTS = sorted(
    {"DCP", "DCP, zstd"}
    | {host for table in (PICKLED, ZIPPED, HEADED, JSON) for host, _ in table.values()}
)


def attacks(samples: Mapping[str, Path]) -> Iterator[Attack]:
    """Yield every attack; `samples` are good checkpoints by the names of HOSTS."""
    for place, (host, write) in PICKLED.items():
        for what, data in pickles.evils():
            yield _written(f"{what}, as {place}", host, write, data, on_code=True)
        for what, data in pickles.oversized():
            yield _written(f"{what}, as {place}", host, write, data)
    yield from _on_files(ZIPPED, samples, zips.zips)
    headers = texts.INCOMPLETE | texts.CORRUPT | texts.STRICTER
    yield from _on_files(HEADED, samples, lambda _: headers.items())
    bad_json = {what: text for what, (text, _) in texts.BAD_JSON.items()}
    yield from _on_files(JSON, samples, lambda _: bad_json.items())
    for host in ("DCP", "DCP, zstd"):
        for what, lie in LIES.items():
            yield Attack(f"{what}: {host}", host, on_code=False, make=partial(rewritten, lie=lie))


def _on_files(
    files: Mapping[str, tuple[str, str]],
    samples: Mapping[str, Path],
    make: Callable[[bytes], Iterable[tuple[str, bytes]]],
) -> Iterator[Attack]:
    """Yield what is made of the bytes of each file."""
    for place, (host, file) in files.items():
        path = samples[host] / file
        for what, data in make(path.read_bytes() if path.exists() else b""):
            yield _written(f"{what}: {place}", host, _to(file), data)


def _written(name: str, host: str, write: Write, data: bytes, *, on_code: bool = False) -> Attack:
    def make(original: Path, copy: Path) -> None:
        shutil.copytree(original, copy)
        write(copy, data)

    return Attack(name, host, on_code, make)
