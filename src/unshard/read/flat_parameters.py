"""FSDP1's flat parameters (LOCAL_STATE_DICT): recognised by name in every format, and refused."""

from collections.abc import Iterable
from pathlib import Path

from unshard.errors import NotMergeableError

__all__ = ["refuse_flat_parameters"]

_NAMES = ("_flat_param", "flat_param")


def refuse_flat_parameters(where: Path, names: Iterable[str]) -> None:
    """Refuse tensors that hold a module's parameters end to end: only the model knows the cuts.

    Raises:
        NotMergeableError: there are some.
    """
    flat = [name for name in names if name.rpartition(".")[2] in _NAMES]
    if flat:
        raise NotMergeableError(
            f"{where}: flat parameters of FSDP1 (LOCAL_STATE_DICT): {flat[0]} …",
            expected="tensors under their own names and shapes",
            found=f"{len(flat)} flat parameters, whose parts only the model knows",
            hint="load it in the training code, on as many ranks, and save it again with "
            "StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
        )
