"""Compare plain values: equal, of the same types, in the same order."""

from unshard.containers.torch_files.writer import Plain


def same(found: Plain, value: Plain) -> bool:
    """Return whether two values are equal, of the same types, and in the same order."""
    if type(found) is not type(value):
        return False
    if isinstance(found, dict) and isinstance(value, dict):
        return same(list(found.items()), list(value.items()))
    if isinstance(found, list | tuple) and isinstance(value, list | tuple):
        return len(found) == len(value) and all(map(same, found, value))
    return found == value
