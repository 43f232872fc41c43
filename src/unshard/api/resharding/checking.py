"""Read the output of a reshard again, and compare it with its source."""

from collections.abc import Mapping
from pathlib import Path

from unshard.api.options import MergeOptions
from unshard.api.resharding.beside import open_ema
from unshard.api.resharding.formats import keeps_keys
from unshard.api.resharding.writing import Writing
from unshard.engines.crew import Crew
from unshard.errors import OutputError
from unshard.plan.planner import make_plan
from unshard.progress import Stage
from unshard.read.format import ReshardFormat
from unshard.read.open import Checkpoint, open_latest
from unshard.read.optimizer.reader import find_kept, find_optimizer
from unshard.read.optimizer_state import OptimizerState
from unshard.tensors.catalog import Catalog


def check_output(  # noqa: PLR0917 (what was read, and what was made of it)
    source: Checkpoint,
    writing: Writing,
    kind: ReshardFormat,
    directory: Path,
    options: MergeOptions,
    engine: Crew,
) -> None:
    """Read the output again from disk, and compare it with the source."""
    full, made = options.verify == "full", writing.made
    engine.listener(
        Stage("verifying", sum(one.data_bytes for one in made.layout.files) if full else 0)
    )
    weights = (directory / made.layout.files[0].filename).parent
    again = open_latest(weights, options.choice._replace(step=None, role=None), options.reading)
    _compare(source.catalog, again.catalog, directory)
    catalogs = list(source.catalogs)
    if source.optimizer is not None:
        optimizer = _optimizer_again(source, again, kind, options)
        if optimizer is None or optimizer.numbers != _numbers(source, kind):
            raise OutputError(f"{directory}: the optimizer's state is not what was planned")
        _compare(source.optimizer.catalog, optimizer.catalog, directory)
        catalogs.append(optimizer.catalog)
    for ours, theirs in zip(writing.ema, open_ema(again), strict=True):
        _compare(ours.catalog, theirs.catalog, directory)
        catalogs += [ours.catalog, theirs.catalog]
    if full:
        catalogs.append(again.catalog)
        engine.verify(make_plan(made.layout), catalogs, directory)


def _numbers(source: Checkpoint, kind: ReshardFormat) -> Mapping[str, int]:
    """Return the numbers that the parameters have in the output; none in DCP."""
    return {} if kind.is_dcp or source.optimizer is None else source.optimizer.numbers


def _optimizer_again(
    source: Checkpoint, again: Checkpoint, kind: ReshardFormat, options: MergeOptions
) -> OptimizerState | None:
    """Read the optimizer's state of the output as that of the source was read."""
    if keeps_keys(source, kind):
        return find_kept(again, options.reading)
    # Of numbers that are new, the order of the groups alone may not tell the parameters.
    return find_optimizer(again, options.reading, _numbers(source, kind))


def _compare(ours: Catalog, theirs: Catalog, directory: Path) -> None:
    both = (ours.tensors, theirs.tensors)
    stated = [{name: (one.dtype, one.shape) for name, one in table.items()} for table in both]
    if stated[0] != stated[1]:
        raise OutputError(f"{directory}: its tensors are not those of the source")
