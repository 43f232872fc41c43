"""`average`: several checkpoints in, their mean out, in one pass over all of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from unshard.api.merging import check_output, merge_with
from unshard.api.opening import open_sources
from unshard.api.options import MergeOptions, accepting
from unshard.keywords import MergeKeywords
from unshard.progress import Listener
from unshard.showing import hearing
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
    order given, and rounded once, to the dtype that is written. World sizes and formats may differ;
    names, shapes and dtypes may not. Integers and booleans are not averaged: those of the last
    checkpoint are taken, and its config and tokenizer. Scheduler and random state are left out,
    because an average does not belong to a training step.

    Args:
        checkpoints: each as for `merge`; or one run, whose complete steps are averaged, the lowest
            first.
        output: as for `merge`; it has no default.
        coefficients: the weight of each checkpoint, in their order; default: all the same.
        ema_decay: use the coefficients of an exponential moving average: it starts with the first
            checkpoint, and each later one moves it by 1 - decay.
        schedule: "linear", "cosine" or "1-sqrt": use the coefficients that emulate such a decay of
            the learning rate, from the first checkpoint on, where it was constant and they are
            evenly spaced (https://arxiv.org/abs/2507.17634); or "ema:0.99", as `ema_decay`.
        last: use only the N highest steps of a run.
        every: use every Nth step of a run, counting back from the highest.
        options: those of `merge` as one value.
        listener: as for `merge`; steps that are incomplete are named.
        keywords: as for `merge`, except `lora`, `step` and `optimizer`.

    Raises:
        UnshardError: one of the tree in `unshard.errors`; nothing of the output is left then.
    """
    chosen = replace(options or MergeOptions(), **keywords)
    target = check_output(output, chosen)
    with hearing(listener) as heard:
        sources = open_sources(
            checkpoints,
            chosen,
            heard,
            coefficients=coefficients,
            ema_decay=ema_decay,
            schedule=schedule,
            last=last,
            every=every,
        )
        return merge_with(sources, target, chosen, heard)
