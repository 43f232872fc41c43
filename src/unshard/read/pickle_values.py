"""Small steps on records that every reader of torch's pickles takes: sizes, states, members."""

from unshard.containers.records import Record, Value

__all__ = ["TensorFormError", "ints", "items_of", "member", "state_of"]


class TensorFormError(ValueError):
    """A pickled tensor is of a form that cannot be read. The message completes "it is …"."""


def ints(value: Value) -> tuple[int, ...]:
    """Return a sequence of integers: a tuple, a list, or a pickled `torch.Size`."""
    if isinstance(value, Record) and value.is_call_of("torch.Size"):
        value = value.args[0] if value.args else ()
    if isinstance(value, tuple | list):
        for item in value:
            if type(item) is not int:
                break
        else:
            return tuple(value)
    raise TensorFormError(f"a sequence of sizes was expected, not {type(value).__name__}")


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
