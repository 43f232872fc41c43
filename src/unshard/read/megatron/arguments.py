"""What `common.pt` records: the arguments of the training, of which only plain values are kept.

It is a pickle of an `argparse.Namespace` with enums, dtypes and whatever else a version has; all of
it is inert here, and nothing is executed. NeMo and Megatron-Bridge record no arguments.
"""

from collections.abc import Mapping
from pathlib import Path

from unshard.containers.pickles.records import Record
from unshard.containers.torch_files.reader import read_torch_file

_LONGEST = 256  # values of a tuple: a layer each, at most
_MOST = 1 << 62  # of numbers; larger ones have no text, or one of any length

Arguments = Mapping[str, object]


def read_arguments(path: Path) -> Arguments:
    """Return the recorded arguments: numbers, text, booleans, None, and few numbers as a tuple.

    Of any other value only "<...>" is kept, which tells it from one that is not recorded.

    Raises:
        CheckpointError: the file is damaged, or was made to run commands.
    """
    saved = read_torch_file(path).value
    found = saved.get("args") if isinstance(saved, dict) else None
    fields = found.state if isinstance(found, Record) else found
    if not isinstance(fields, dict):
        return {}
    named = ((name, value) for name, value in fields.items() if isinstance(name, str))
    return {name: _kept(value) for name, value in named}


def _kept(value: object) -> object:
    if isinstance(value, tuple | list) and len(value) <= _LONGEST and all(map(_is_number, value)):
        return tuple(value)
    is_plain = _is_number(value) or value is None or type(value) in {bool, str}
    return value if is_plain else "<...>"


def _is_number(value: object) -> bool:
    return type(value) in {int, float} and isinstance(value, int | float) and -_MOST < value < _MOST
