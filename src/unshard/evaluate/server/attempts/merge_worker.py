"""The process that merges a checkpoint, or checks it for an evaluation without a merge.

Run as `python -m unshard.evaluate.server.attempts.merge_worker`.

Reads one line of JSON from stdin, which stays open while the server lives: when it is closed, the
worker kills itself and all its children. Writes `merge.json` into its working directory.
"""

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.errors import NoConfigError, OutputError, StoreError, UnshardError
from unshard.evaluate.server.evaluators.direct import PLACE_NAME
from unshard.fronts import Call, Command
from unshard.stores.remote_path import path_of
from unshard.write.dirfd import write_whole

if TYPE_CHECKING:
    from unshard.api.options import MergeOptions

ANSWER_NAME = "merge.json"

_HINT = "set `config` of the profile, in the server's YAML, to that file or its directory"
_WHOLE = ("model*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class MergeOrder:
    """The input of a worker.

    Attributes:
        options: the fields of the merge's `MergeOptions`.
        config: config.json, or a directory with config and tokenizer, for a checkpoint without.
        needs_config: refuse a model without a config, before it is merged.
        pin: merge this instead of `checkpoint`, if it exists.
        may_be_whole: do not merge a checkpoint that is already a whole model.
        is_direct: write everything except the weights: see `_describe`.
    """

    checkpoint: str
    output: str
    options: Mapping[str, object]
    config: str | None = None
    needs_config: bool = False
    pin: str | None = None
    may_be_whole: bool = False
    is_direct: bool = False


def main() -> int:
    """Merge the checkpoint that the order on stdin names."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the server is gone
        return 1
    threading.Thread(target=_die_with_server, daemon=True).start()
    answer = _answer(MergeOrder(**json.loads(line)))
    try:
        write_whole(Path(ANSWER_NAME), json.dumps(answer).encode())
    except OSError as error:
        with suppress(OSError):  # the log is on the same disk
            os.write(2, f"the answer {answer} cannot be written: {error}\n".encode())
        return os.EX_TEMPFAIL
    return 0


def _answer(order: MergeOrder) -> dict[str, object]:
    """Return the path of the model; or the error, and whether another attempt may succeed.

    Only this process reads the disk of the checkpoint, because a disk that does not answer must
    not block the server.
    """
    is_pinned = order.pin is not None and Path(order.pin).exists()
    order = replace(order, checkpoint=order.pin) if is_pinned and order.pin else order
    answer: dict[str, object] = {"checkpoint": order.checkpoint, "model": None, "error": None}
    try:
        if order.may_be_whole and _is_whole(Path(order.checkpoint), order.options):
            return answer | {"model": order.checkpoint}
        if order.is_direct:
            _describe(order)
        else:
            _merge(order)
    except UnshardError as error:
        if isinstance(error, NoConfigError):
            error.hint = _HINT
        chosen = {"weights": "ema"} if order.options.get("weights") == "ema" else {}
        error.front = Command({}, Call("unshard merge", (order.checkpoint, "OUTPUT"), chosen))
        answer |= {"error": str(error), "may_pass": isinstance(error, OutputError | StoreError)}
    except (OSError, MemoryError) as error:
        answer |= {"error": f"{order.checkpoint}: {error!r}", "may_pass": True}
    else:
        return answer | {"model": order.output}
    is_gone = False
    with suppress(StoreError):  # the store does not answer
        is_gone = not path_of(order.checkpoint).exists()
    return answer | {"is_gone": is_gone}


def _is_whole(source: Path, options: Mapping[str, object]) -> bool:
    """Return whether a directory is a whole model, with its config and nothing sharded."""
    if options.get("weights") != "model" or not (source / "config.json").is_file():
        return False
    if not any(any(source.glob(pattern)) for pattern in _WHOLE):
        return False
    from unshard.read.finding.discover import find
    from unshard.read.format import Choice

    location = next(find(source, Choice(None, None, "model")))
    return not location.format.sharded and location.weights_dir == source.resolve()


def _merge(order: MergeOrder) -> None:
    from unshard.api.merging import merge_checkpoint
    from unshard.progress import ignore

    merge_checkpoint(order.checkpoint, order.output, _options(order), ignore)


def _describe(order: MergeOrder) -> None:
    """Write all files of a merged model except its weights, and the path of the checkpoint.

    The weights are planned as for a merge, so that a checkpoint that cannot be merged is refused
    with the same message. Files of the tokenizer are links.
    """
    from unshard.api.converting import convert
    from unshard.api.making import plan_output
    from unshard.api.sources import open_source, refuse_unloadable
    from unshard.progress import ignore
    from unshard.write.companions import companion_files

    options, output = _options(order), Path(order.output)
    sources = open_source(order.checkpoint, options, ignore)
    refuse_unloadable(sources, options)
    prepared = plan_output(sources, convert(sources, options), options)
    output.mkdir()
    files = companion_files(prepared.checkpoint.companions, prepared.config)
    for name, content in files.items():
        target = output / name
        target.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            target.symlink_to(content.absolute())
    source = {
        "checkpoint": order.checkpoint,
        "weights": options.weights,
        "companions": _digest(output),
    }
    (output / PLACE_NAME).write_text(json.dumps(source), encoding="utf-8")


def _digest(directory: Path) -> str:
    """Return a digest of all files; an engine can be used again for a model with the same."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            digest.update(f"{path.relative_to(directory)}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()


def _options(order: MergeOrder) -> "MergeOptions":
    from unshard.api.options import MergeOptions
    from unshard.read.beside.companions import find_companions
    from unshard.read.finding.discover import find

    options = MergeOptions(**order.options)  # type: ignore[arg-type]  # JSON
    if order.config is not None:
        location = next(find(path_of(order.checkpoint), options.choice))
        if find_companions(location, None).config is None:
            return replace(options, config=order.config)
    return options if order.needs_config else replace(options, config="none")


def _die_with_server() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would be missed when the interpreter ends
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
