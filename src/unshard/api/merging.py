"""`merge`: a checkpoint in, a Hugging Face directory out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from unshard.api.flow.converting import convert
from unshard.api.flow.making import (
    add_files,
    compare_with_base,
    late_notes,
    make_report,
    named_companions,
    push_output,
    stage_output,
    verify_output,
)
from unshard.api.flow.preparing import Prepared, plan_output
from unshard.api.flow.sources import Opening, decompressed, one_checkpoint
from unshard.api.options import MergeOptions, given_output, taking
from unshard.engines.threads import RunPlan, run_plan
from unshard.keywords import MergeKeywords
from unshard.progress import Listener, Stage, Warned
from unshard.showing import hearing
from unshard.write.hub import check_repo
from unshard.write.report import Report

__all__ = ["merge", "merge_with"]


@taking(MergeKeywords)
def merge(
    checkpoint: str | Path,
    output: str | Path | None = None,
    *,
    listener: Listener | None = None,
    **options: Unpack[MergeKeywords],
) -> Report:
    """Merge a sharded checkpoint into a Hugging Face directory.

    The output appears by one rename, complete, verified and durable, or not at all; the checkpoint
    is only read. The same checkpoint gives the same bytes, whatever `workers` and `memory` are.

    Args:
        checkpoint: a checkpoint, a directory of several (the highest complete step is taken), or
            any directory inside one.
        output: must not exist unless `overwrite`; default `merged/<step directory>[-critic][-ema]`
            next to the step directory.
        listener: called with progress events and warnings; without one, warnings are
            `UnshardWarning` of Python, and a terminal or a notebook gets a progress bar.

    Keyword Args:
        dtype: "keep", "config" (as in config.json), "base" (as in the base model, tensor by
            tensor), or bfloat16, float16 or float32: by name ("bf16", "fp16" and "fp32" too), or as
            a dtype of numpy, ml_dtypes or torch. Only floating point tensors are cast; integers,
            booleans, 8-bit floats and tensors that the model's family keeps in float32 never are.
        keep_fp32: a regular expression; tensors whose names it matches are not cast.
        names: "hub" (tensor names and expert layout as on the hub) or "training" (unchanged).
        base: the model that training started from, a Hugging Face directory or hub id. It
            determines which tensors are expected, their names and files, and completes config
            and tokenizer.
        allow_missing: write the output even if tensors of the base, or without a base those that
            config.json implies, are missing.
        allow_unexpected: write the output even if it has tensors that the base, or without a base
            config.json, does not have.
        include: a regular expression; only tensors whose output names it matches are written.
        exclude: a regular expression; tensors whose output names it matches are left out.
        lora: what to do with adapters: "fuse" them, write the "adapter" alone, or "both".
        lora_alpha: the scale of the adapter, if no file of the checkpoint records it.
        weights: "model" (default) or "ema".
        role: "actor" or "critic"; needed only if both exist, or only a critic.
        step: which step of a directory with several.
        config: a config.json, or a directory with config, tokenizer and the like, to use instead of
            the checkpoint's own.
        also: directories with more files of the same checkpoint, saved on other nodes.
        max_shard_size: largest weight file, bytes or "5GB"; default: as in the base, or 5GB.
        workers: threads; default: as many as the machine has cores, at most 8.
        memory: bound on all buffers together, bytes or "64MB".
        assume_dim0: treat plain tensors that differ between ranks as shards along dimension 0.
        ep_size: size of the expert parallelism, if the files do not record it (verl's VeOmni).
        allow_globals: tensor subclasses in pickles to read as the plain tensors they store.
        verify: "light" (the output is reopened: headers, names, shapes, dtypes, sizes, index),
            "full" (also checksums of the sources, replicas, and every byte read back), or "off".
        extra_state: write scheduler and random state of all ranks next to the weights, if the
            checkpoint has them: `extra_state_merged.pt`, `lr_scheduler_state.json`.
        overwrite: replace an earlier output, or, if the output is the checkpoint's own directory,
            put the weights there; other files stay. If a file that unshard did not write, or that
            was changed since, would be lost, or if transformers would load it instead of the
            output or together with it, this is an error; "all" removes such files too.
        dry_run: plan only, write nothing.
        push_to_hub: the id of a repository to upload the output to, after it is safe on disk.
        private: make that repository private if it does not exist.

    Raises:
        UnshardError: one of the tree in `unshard.errors`; nothing of the output is left then.
    """
    with hearing(listener) as heard:
        return merge_with(checkpoint, output, MergeOptions(**options), heard)


def merge_with(
    checkpoint: str | Path | Opening,
    output: str | Path | None,
    options: MergeOptions,
    listener: Listener,
    *,
    engine: RunPlan = run_plan,
    before: Callable[[Prepared], Prepared] = lambda prepared: prepared,
    pass_over: bool = True,
) -> Report:
    """Merge as `merge` does, with the options as one value.

    Args:
        checkpoint: as for `merge`; or a function that opens several, to be averaged.
        output, options, listener: as for `merge`.
        engine: what writes the files; see `unshard.engines.crew`.
        before: called with the plan before anything is written; returns it, perhaps with more small
            files, and what it raises ends the merge.
        pass_over: whether an older step may be taken, with a warning, for one that is not complete,
            or that is an error, as it is for the tools that `unshard.compat` replaces.
    """
    started = time.monotonic()
    if not callable(checkpoint):
        checkpoint = one_checkpoint(checkpoint, options, pass_over=pass_over)
    target = None if output is None else given_output(output)
    if options.push_to_hub is not None:
        check_repo(options.push_to_hub, may_ask=not options.dry_run)
    sources = checkpoint(listener)
    target = target or sources.last.location.default_output
    prepared = before(plan_output(sources, convert(sources, options), options))
    _warn(listener, prepared.warnings)
    stage = stage_output(prepared, target, options)
    if options.dry_run:
        stage.check()
        return make_report(prepared, target, options, started)
    with stage:
        if sources.compressed_bytes:  # only now can values be compared, and be read anywhere
            sources, planned = decompressed(sources, stage.scratch, listener), prepared
            again = plan_output(sources, convert(sources, options), options)
            _warn(listener, [one for one in again.warnings if one not in planned.warnings])
            prepared = replace(again, files=planned.files)
        listener(Stage("writing", prepared.plan.layout.total_size))
        overflows = engine(prepared.plan, stage.directory, options.settings, listener)
        add_files(prepared, stage.directory, options, listener)
        verify_output(prepared, stage.directory, options, listener)
        changed = compare_with_base(prepared, listener)
        listener(Stage("committing"))
        committed = stage.commit(replaced=named_companions(prepared, options))
    notes = _warn(listener, [*late_notes(prepared, changed, overflows), *committed])
    url = push_output(prepared, target, options, listener)
    return make_report(prepared, target, options, started, notes=notes, changed=changed, url=url)


def _warn(listener: Listener, notes: Sequence[str]) -> Sequence[str]:
    """Give notes to the listener, and return them."""
    for note in notes:
        listener(Warned(note))
    return notes
