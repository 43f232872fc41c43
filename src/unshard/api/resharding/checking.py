"""Read the output of a reshard again, and compare it with its source."""

from pathlib import Path

from unshard.api.options import MergeOptions
from unshard.api.resharding.beside import open_ema
from unshard.api.resharding.target import keeps_keys
from unshard.api.resharding.writing import Writing
from unshard.engines.crew import Crew
from unshard.errors import OutputError
from unshard.plan.planner import make_plan
from unshard.progress import Stage
from unshard.read.open import open_latest
from unshard.read.optimizer.reader import find_kept, find_optimizer
from unshard.tensors.catalog import Catalog


def verify_reshard(writing: Writing, directory: Path, options: MergeOptions, engine: Crew) -> None:
    """Read the output again from disk, and compare it with the source."""
    source, layout, is_full = writing.source, writing.made.layout, options.verify == "full"
    engine.listener(
        Stage("verifying", sum(file.data_bytes for file in layout.files) if is_full else 0)
    )
    weights = (directory / layout.files[0].filename).parent
    output = open_latest(weights, options.choice._replace(step=None, role=None), options.reading)
    _compare(source.catalog, output.catalog, directory)
    catalogs = list(source.catalogs)
    if source.optimizer is not None:
        numbers = {} if writing.target.format.is_dcp else source.optimizer.numbers
        if keeps_keys(source, writing.target.format):
            optimizer = find_kept(output, options.reading)
        else:  # the order of the groups may not identify parameters with new numbers
            optimizer = find_optimizer(output, options.reading, numbers)
        if optimizer is None or optimizer.numbers != numbers:
            raise OutputError(f"{directory}: the optimizer's state is not what was planned")
        _compare(source.optimizer.catalog, optimizer.catalog, directory)
        catalogs.append(optimizer.catalog)
    for ours, theirs in zip(writing.ema, open_ema(output), strict=True):
        _compare(ours.catalog, theirs.catalog, directory)
        catalogs += [ours.catalog, theirs.catalog]
    if is_full:
        catalogs.append(output.catalog)
        engine.verify(make_plan(layout), catalogs, directory)


def _compare(ours: Catalog, theirs: Catalog, directory: Path) -> None:
    forms = [
        {name: (entry.dtype, entry.shape) for name, entry in catalog.tensors.items()}
        for catalog in (ours, theirs)
    ]
    if forms[0] != forms[1]:
        raise OutputError(f"{directory}: its tensors are not those of the source")
