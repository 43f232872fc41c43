"""`average`: write the mean of several checkpoints, in one pass over all of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from unshard.api.merging import check_output, merge_with
from unshard.api.opening import Averaging, open_sources
from unshard.api.options import MergeOptions, accepting
from unshard.console import listener_or_default
from unshard.keywords import MergeKeywords
from unshard.progress import Listener
from unshard.stores.nodes.connection import disconnecting
from unshard.write.report import Report


@accepting(MergeKeywords)
@disconnecting()
def average(
    checkpoints: Sequence[str | Path] | str | Path,
    output: str | Path,
    *,
    coefficients: Sequence[float] | None = None,
    ema_decay: float | None = None,
    schedule: str | None = None,
    last: int | None = None,
    every: int | None = None,
    options: MergeOptions | None = None,
    listener: Listener | None = None,
    **keywords: Unpack[MergeKeywords],
) -> Report:
    """Average checkpoints into a Hugging Face directory, in one pass and in bounded memory.

    Every value is (sum of coefficient * value) / (sum of coefficients), added in float32 in the
    order given, and rounded once, to the output dtype. World sizes and formats may differ; names,
    shapes and dtypes may not. Integers and booleans are not averaged: they are those of the last
    checkpoint, like config and tokenizer. Scheduler and random state are left out, because an
    average does not belong to a training step.

    Args:
        checkpoints: each as for `merge`; or a run, whose complete steps are averaged, lowest first.
        output: as for `merge`; it has no default.
        coefficients: the weight of each checkpoint, in order; default: equal weights.
        ema_decay: use the coefficients of an exponential moving average that starts with the first
            checkpoint, and moves by 1 - decay with each later one.
        schedule: "linear", "cosine" or "1-sqrt": use the coefficients that emulate such a decay of
            the learning rate, from the first checkpoint on, where it was constant and they are
            evenly spaced (https://arxiv.org/abs/2507.17634); or "ema:0.99", as `ema_decay`.
        last: use only the N highest steps of a run.
        every: use every Nth step of a run, counting back from the highest.
        options: the options of `merge` as one value.
        listener: as for `merge`; incomplete steps are reported as warnings.
        keywords: as for `merge`, except `lora`, `step` and `optimizer`.

    Raises:
        UnshardError: see `unshard.errors`; no partial output is left.
    """
    chosen = replace(options or MergeOptions(), **keywords)
    target = check_output(output, chosen)
    how = Averaging(coefficients, ema_decay, schedule, last, every)
    with listener_or_default(listener) as heard:
        return merge_with(open_sources(checkpoints, chosen, heard, how), target, chosen, heard)
