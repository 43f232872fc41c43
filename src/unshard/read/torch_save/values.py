"""Small steps on records that every reader of torch's pickles takes: sizes, states, members."""

from unshard.containers.pickles.records import Global, Record, Value

__all__ = [
    "TensorFormError",
    "ints",
    "is_lightning",
    "items_of",
    "member",
    "named",
    "shape",
    "state_of",
]

_MAX_DIMENSIONS = 32
_MAX_NUMBER = 1 << 58  # elements of 16 bytes each, what 64-bit offsets can address


class TensorFormError(ValueError):
    """A pickled tensor is of a form that cannot be read. The message completes "it is …"."""


def ints(value: Value) -> tuple[int, ...]:
    """Return a sequence of integers: a tuple, a list, or a pickled `torch.Size`."""
    if isinstance(value, Record) and value.is_call_of("torch.Size"):
        value = value.args[0] if value.args else ()
    if isinstance(value, tuple | list):
        for item in value:
            if type(item) is not int or not -_MAX_NUMBER < item < _MAX_NUMBER:
                break
        else:
            return tuple(value)
    raise TensorFormError(f"a sequence of sizes was expected, not {named(value)}")


def shape(value: Value) -> tuple[int, ...]:
    """Return a tensor's sizes: few integers, none negative, whose product is addressable."""
    sizes = ints(value)
    elements = 1
    for size in sizes[:_MAX_DIMENSIONS]:
        elements *= max(size, 1)
    if len(sizes) > _MAX_DIMENSIONS or min(sizes, default=0) < 0 or elements >= _MAX_NUMBER:
        raise TensorFormError(
            f"a tensor of {len(sizes)} sizes {list(sizes[:8])}, which no tensor can have"
        )
    return sizes


def named(value: Value) -> str:
    """Return a few words for any value: never long, never nested, whatever the pickle holds."""
    match value:
        case Global():
            return value.dotted[:200]
        case Record(callee=Global() as callee):
            return f"an instance of {callee.dotted[:200]}"
        case None | bool() | float():
            return repr(value)
        case str() | bytes():
            return repr(value[:80])
        case int() if -_MAX_NUMBER < value < _MAX_NUMBER:
            return repr(value)
    return f"a value of type {type(value).__name__}"


def state_of(value: Value) -> dict[str, Value]:
    """Return an object's attributes: of `{…}`, `(None, {…})` or `({…}, {…})` forms, or none."""
    state = value.state if isinstance(value, Record) else value
    if isinstance(state, dict):
        return state
    fields: dict[str, Value] = {}
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            fields = part if not fields else fields | part
        elif part is not None:
            raise TensorFormError(f"attributes of unknown form ({type(part).__name__})")
    return fields


def member(fields: dict[str, Value], *names: str) -> Value:
    """Return the first of these attributes that is present."""
    for name in names:
        if name in fields:
            return fields[name]
    raise TensorFormError(f"the attribute {names[0]} is missing")


def items_of(value: Value) -> dict[str, Value] | None:
    """Return a pickled dict (or OrderedDict) whose keys are all strings; None for anything else."""
    items: dict[Value, Value]
    if isinstance(value, dict):
        items = value
    elif isinstance(value, Record) and value.is_call_of("collections.OrderedDict"):
        items = dict(value.items)
    else:
        return None
    named = {name: item for name, item in items.items() if isinstance(name, str)}
    return named if len(named) == len(items) else None


def is_lightning(value: Value) -> bool:
    """Return whether Lightning's Trainer saved a value, with its module around the model."""
    return "pytorch-lightning_version" in (items_of(value) or {})
