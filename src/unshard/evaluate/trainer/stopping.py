"""The stop file of a run: where `<run>/_unshard/STOP` is made, the callbacks end the training.

Anything may make it: a person, or the command that `on_result` of the server runs. It stays there,
so a training that is started again ends again until it is removed. Its first line is the reason.

All ranks must end at the same step, or the others would wait for them forever. So global rank 0
looks, and the others get its answer, at every tenth step, because a broadcast makes ranks wait for
each other.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unshard.errors import printable
from unshard.evaluate.run_folder import STOP, RunFolder
from unshard.evaluate.sinks.base import ignoring_errors
from unshard.write.dirfd import closing, open_regular

_EVERY = 10  # steps between two broadcasts
_REASON = 300  # bytes that are shown

log = logging.getLogger(__name__)


class StopFile:
    """Whether training must end, with the same answer on all ranks.

    Args:
        run_dir: the run's directory; it counts on global rank 0 only.
        is_first: whether this process is global rank 0.
    """

    def __init__(self, run_dir: Path, *, is_first: bool) -> None:
        self._folder = RunFolder(Path(run_dir))
        self._is_first = is_first
        self._has_logged = False

    def ends_training(
        self, step: int, ranks: int, broadcast: Callable[[bool], bool] | None = None
    ) -> bool:
        """Return whether training must end. All ranks call it, with the same step.

        Args:
            step: one rank looks at every step, several at the multiples of ten.
            ranks: how many processes there are.
            broadcast: returns rank 0's value on every rank; None: by torch.distributed.
        """
        if ranks > 1 and step % _EVERY:
            return False
        is_there = self._is_first and self._look()
        if ranks > 1:
            with ignoring_errors("the stop file is not looked for"):
                return (broadcast or _broadcast)(is_there)
        return is_there and ranks == 1

    def _look(self) -> bool:
        """Return whether the file is there; log why, once."""
        path = self._folder.state / STOP
        try:
            os.lstat(path)
        except OSError:
            return False
        if not self._has_logged:
            self._has_logged = True
            reason = ""
            with ignoring_errors(f"{path}: the reason is not known"):
                reason = _first_line(self._folder)
            log.warning(
                "training ends: %s is there%s; remove it to train further",
                path,
                f" ({reason})" if reason else "",
            )
        return True


def _first_line(folder: RunFolder) -> str:
    with folder.opened() as state, closing(open_regular(STOP, os.O_RDONLY, within=state)) as fd:
        data = os.read(fd, _REASON)
    return printable(data.decode(errors="replace").strip().partition("\n")[0])


def _broadcast(value: bool) -> bool:  # noqa: FBT001  (the value itself)
    from torch import distributed

    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def count_ranks() -> int:
    """Return how many processes torch.distributed has connected; 1 if it is not in use."""
    distributed = sys.modules.get("torch.distributed")
    with suppress(AttributeError):
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_world_size())
    return 1
