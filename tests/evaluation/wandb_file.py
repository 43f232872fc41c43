"""Read a W&B offline file back: LevelDB's log format around protobuf records."""

import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # generated

_BLOCK = 32768
_HEADER = 7  # of the file and of each chunk
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator[Record]:
    data, position, parts = file.read_bytes(), _HEADER, b""
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEADER])
        position += _HEADER
        chunk, position = data[position : position + length], position + length
        parts = chunk if kind in (_FULL, _FIRST) else parts + chunk
        if kind in (_FULL, _LAST):
            yield Record.FromString(parts)


def history(file: Path) -> list[dict[str, str]]:
    """Return the rows: values as JSON, by key."""
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


def definitions(file: Path) -> dict[str, str]:
    """Return the step metric of each metric that was defined."""
    return {
        record.metric.name or record.metric.glob_name: record.metric.step_metric
        for record in records(file)
        if record.WhichOneof("record_type") == "metric"
    }


def run_record(file: Path) -> Record:
    return next(one for one in records(file) if one.WhichOneof("record_type") == "run")


def config(file: Path) -> dict[str, str]:
    """Return the run's config as it became: values as JSON, by key."""
    return {
        item.key or "/".join(item.nested_key): item.value_json
        for record in records(file)
        if record.WhichOneof("record_type") in {"run", "config"}
        for item in (*record.run.config.update, *record.config.update)
    }
