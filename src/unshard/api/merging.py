"""`merge`: write a checkpoint as a Hugging Face directory; `merge_all`: every step of a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from unshard.api.completing import (
    Outcome,
    make_once,
    make_output,
    make_report,
    refuse_other,
    stage_for,
)
from unshard.api.converting import convert
from unshard.api.making import (
    PlannedMerge,
    fingerprint_of,
    plan_output,
    push_output,
)
from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.api.sources import Sources, open_source, refuse_unloadable
from unshard.console import listener_or_default
from unshard.errors import (
    IncompleteError,
    UnknownFormatError,
    UnshardError,
    UsageError,
    raise_all,
)
from unshard.fronts import unadvised
from unshard.keywords import MergeKeywords
from unshard.progress import Event, Listener, Warned, warn
from unshard.read.finding.discover import all_steps, find
from unshard.read.format import EVERY_ROLE, Choice, Location, blaming
from unshard.read.step_names import named_average
from unshard.stores.remote_path import RemotePath
from unshard.write.record import is_made_by
from unshard.write.report import Report
from unshard.write.staging.recovery import recover


@accepting(MergeKeywords)
def merge(
    checkpoint: str | Path,
    output: str | Path | None = None,
    *,
    listener: Listener | None = None,
    **options: Unpack[MergeKeywords],
) -> Report:
    """Merge a sharded checkpoint into a Hugging Face directory.

    The output appears by one rename, complete, verified and durable, or not at all. In an object
    store, config.json is written last, when all other files are verified. The checkpoint is only
    read. The same checkpoint gives the same bytes, independent of `workers` and `memory`.

    Args:
        checkpoint: a checkpoint, a run (its highest complete step is merged), or any directory
            inside a checkpoint. node:///path combines that path on the local disks of all nodes of
            a Ray cluster. RUN@last=5 is the average of the last 5 complete steps of a run, and
            RUN@last=5,schedule=cosine the average with a schedule of `average`; averages have no
            default output.
        output: must not exist unless `overwrite`; default `merged/<step directory>[-critic][-ema]`
            next to the step directory. An address such as s3://bucket/model writes to an object
            store, where `overwrite` and `push_to_hub` are refused.
        listener: called with progress events and warnings. By default warnings are Python's
            `UnshardWarning`, and a terminal or a notebook shows a progress bar.

    Keyword Args:
        dtype: "keep", "config" (as in config.json), "base" (as in the base model, tensor by
            tensor), or bfloat16, float16 or float32: by name ("bf16", "fp16" and "fp32" too), or as
            a dtype of numpy, ml_dtypes or torch. Only floating point tensors are cast; integers,
            booleans, 8-bit floats and tensors that the model's family keeps in float32 never are;
            but block FP8 with its scales (`weight_scale_inv`) is dequantised.
        keep_fp32: a regular expression; tensors whose names it matches are not cast.
        quantize: "fp8-block" writes the matrices of linear layers like DeepSeek's models:
            float8_e4m3fn, and a float32 scale for each block of 128 x 128. They are quantised from
            their stored values; `dtype` applies to all other tensors.
        names: "hub" (tensor names and expert layout as on the hub) or "training" (unchanged).
        base: the model that training started from, a Hugging Face directory or hub id. It
            determines which tensors are expected, their names and files, and completes config
            and tokenizer.
        allow_missing: write the output even if tensors of the base, or of config.json without a
            base, are missing.
        allow_unexpected: write tensors that neither the base, nor config.json without a base, has.
        include: a regular expression; only tensors whose output names it matches are written.
        exclude: a regular expression; tensors whose output names it matches are left out.
        lora: "fuse" adapters, write the "adapter" alone, or "both"; or "keep" their matrices among
            the weights as in training, with `names="training"`; or "ignore" an adapter in a file
            next to weights without LoRA tensors. By default adapters among the weights are fused,
            and an adapter next to the weights is an error.
        lora_alpha: the scale of the adapter, if no file of the checkpoint records it.
        weights: "model" (default), "ema", or "module": DeepSpeed's weights in the dtype of
            training, if they are stored whole (stages 0 to 2).
        role: which model of a step with several: "actor" (or "policy"), "critic", or the name of
            its folder. Default: the first of "actor", "policy", "model", "trainer".
        step: the step of a run to merge.
        config: a config.json, or a directory with config, tokenizer and the like, to use instead of
            the checkpoint's own. Default, if the checkpoint has none: those of the base model that
            a file of the trainer names, if it is on this machine. "none": write the weights alone
            if the checkpoint has no config.json; pass a directory of that name as Path("none").
        also: directories with more files of the same checkpoint, saved on other nodes.
        max_shard_size: largest weight file, bytes or "5GB"; default: as in the base, or 5GB.
        workers: number of threads; default: the number of cores, at most 8.
        memory: bound on all buffers together, bytes or "64MB".
        assume_dim0: treat plain tensors that differ between ranks as shards along dimension 0.
        ep_size: size of the expert parallelism, if the files do not record it (verl's VeOmni).
        allow_globals: tensor subclasses in pickles to read as the plain tensors they store.
        engine: "ray": run on a Ray cluster, to which this process is connected or this machine
            belongs, or at RAY_ADDRESS. `workers` and `memory` then apply to each node. Default:
            local threads.
        verify: "light" (the output is reopened: headers, names, shapes, dtypes, sizes, index),
            "full" (also checksums of the sources, replicas, and every byte read back), or "off".
        checksums: read the output again, and write the SHA-256 of each tensor of the model into
            `unshard.json`, as returned by `unshard.checksums`.
        extra_state: write scheduler and random state of all ranks next to the weights, if the
            checkpoint has them: `extra_state_merged.pt`, `lr_scheduler_state.json`.
        optimizer: also write the state of the optimizer under the names of the output's tensors:
            its tensors to `optimizer.safetensors`, everything else to `optimizer.json`.
        overwrite: replace an earlier output, or put the weights into the checkpoint's own directory
            if it is the output; other files stay. It is an error if this would remove a file that
            unshard did not write or that was changed since, or if transformers would load such a
            file instead of the output or together with it; "all" removes such files too.
        reuse: use an existing output that was made from this checkpoint with these options, without
            reading or writing weights. If another process is making it, wait; if that process dies,
            continue with its finished files, as with `resume`. Any other existing output is an
            error, or replaced with `overwrite`.
        resume: reuse files finished by an interrupted merge of the same checkpoint and options to
            the same output, and keep finished files if an error or a signal ends this merge.
            Otherwise no partial output is left.
        dry_run: plan only, write nothing.
        push_to_hub: the id of a repository to upload the output to, after it is safe on disk.
        private: make that repository private if it does not exist.

    Raises:
        UnshardError: see `unshard.errors`; no partial output is left, except with `resume`.
    """
    from unshard.stores.nodes.connection import disconnecting

    with disconnecting(), listener_or_default(listener) as heard:
        return merge_checkpoint(checkpoint, output, MergeOptions(**options), heard)


def merge_checkpoint(
    checkpoint: str | Path,
    output: str | Path | None,
    options: MergeOptions,
    listener: Listener,
    *,
    before: Callable[[PlannedMerge], PlannedMerge] = lambda prepared: prepared,
    pass_over: bool = True,
) -> Report:
    """Merge one checkpoint like `merge`, with the options as one value.

    `before` is passed to `merge_with`, and `pass_over` to `open_source`.
    """
    target = check_output(output, options)
    sources = open_given(checkpoint, options, listener, pass_over=pass_over)
    if target is None and len(sources.checkpoints) > 1:
        raise UsageError("an average of steps has no default output", hint="give an output")
    return merge_with(sources, target, options, listener, before=before)


def open_given(
    given: str | Path, options: MergeOptions, listener: Listener, *, pass_over: bool = True
) -> Sources:
    """Open the checkpoint at a path with `open_source`, or the average RUN@last=N."""
    path = given_path(given, "the checkpoint")
    if (average := named_average(path)) is None:
        return open_source(path, options, listener, pass_over=pass_over)
    from unshard.api.opening import Averaging, open_sources

    run, last, schedule = average
    how = Averaging(last=last, schedule=schedule)
    return open_sources(run, options, listener, how, pass_over=pass_over)


def check_output(output: str | Path | None, options: MergeOptions) -> Path | None:
    """Return the path of an output, after cheap checks that need no checkpoint.

    The moves of a killed merge are finished now: the output may be inside the checkpoint, which
    must not change while it is read.
    """
    target = None if output is None else given_output(output)
    if options.push_to_hub is not None:
        from unshard.write.hub import check_repo

        check_repo(options.push_to_hub, may_ask=not options.dry_run)
    if target is not None and not isinstance(target, RemotePath) and not options.dry_run:
        recover(target.parent, target=target.resolve().name, resume=options.resume or options.reuse)
    return target


def merge_with(
    sources: Sources,
    output: Path | None,
    options: MergeOptions,
    listener: Listener,
    *,
    before: Callable[[PlannedMerge], PlannedMerge] = lambda prepared: prepared,
    change: Callable[[PlannedMerge, Path], PlannedMerge] | None = None,
) -> Report:
    """Merge one opened checkpoint, or average several.

    `output` comes from `check_output`. `before` is called with the plan before anything is written;
    it may add small files, or raise to end the merge. `change` is passed to `make_output`.
    """
    target = output or sources.last.location.default_output
    refuse_unloadable(sources, options)
    prepared = before(plan_output(sources, convert(sources, options), options))
    prepared = replace(prepared, fingerprint=fingerprint_of(prepared))
    warn(listener, prepared.warnings)
    stage, memory = stage_for(target, prepared, options), options.resources.memory_bytes
    if options.dry_run:
        reused = options.reuse and is_made_by(target, prepared.fingerprint)
        if not reused:
            refuse_other(stage, target, prepared, options)
        planned = Outcome(prepared, reused=reused)
        return make_report(planned, target, memory_bytes=memory, dry_run=True)
    if options.reuse:
        outcome = make_once(prepared, target, options, listener)
    else:
        outcome = make_output(prepared, stage, options, listener, change)
    url, repo = None, options.push_to_hub
    if repo is not None:
        url = push_output(outcome.prepared, target, repo, listener, private=options.private)
    return make_report(outcome, target, memory_bytes=memory, url=url)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result for one step of a run, or for one model of a step.

    Attributes:
        step: number of the step.
        source: the directory of its weights; output: the directory of its model.
        report: the report of the merge, if it succeeded.
        error: the error of the merge; an IncompleteError if the step was passed over.
        role: the role of the model, if all roles are merged.
        is_meant: whether the user chose this step, so that it is not passed over.
    """

    step: int | None
    source: str
    output: str
    report: Report | None = None
    error: UnshardError | None = None
    role: str | None = None
    is_meant: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether the merge failed, and the step was not just passed over."""
        passed_over = isinstance(self.error, IncompleteError) and not self.is_meant
        return self.error is not None and not passed_over

    @property
    def title(self) -> str:
        """The step, and the role of the model if all roles are merged."""
        return f"step {self.step}" + (f", {self.role}" if self.role else "")


@accepting(MergeKeywords)
def merge_all(
    run: str | Path,
    output: str | Path | None = None,
    *,
    listener: Listener | None = None,
    **options: Unpack[MergeKeywords],
) -> list[Report]:
    """Merge every complete step of a run like `merge`, the lowest first.

    A step that cannot be merged does not stop the others.

    Args:
        run: a directory of steps; for `role="all"` it may be a step.
        output: the directory in which each step gets an output; default `merged` next to the steps.
        listener: as for `merge`; incomplete steps are reported as warnings.
        options: as for `merge`, except `step` and `push_to_hub`. role="all" merges every model of a
            step: into `<step>`, `<step>-critic` and so on.

    Returns:
        A report for each model that was merged now or, with `reuse`, before.

    Raises:
        UnshardError: there is no such run; or, after all steps, the errors of the steps that
            failed. The outputs of the others stay.
    """
    from unshard.stores.nodes.connection import disconnecting

    with disconnecting(), listener_or_default(listener) as heard:
        chosen = MergeOptions(**options)
        results = merge_steps(run, output, chosen, heard)
    errors = [result.error for result in results if result.error and result.has_failed]
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else UnshardError
    noun = "steps" if chosen.role != EVERY_ROLE else "models"
    raise_all(kind, f"{run}: {len(errors)} of {len(results)} {noun} failed", errors)
    return [result.report for result in results if result.report is not None]


def merge_steps(
    run: str | Path,
    output: str | Path | None,
    options: MergeOptions,
    listener: Listener,
    *,
    is_run: bool = True,
) -> list[StepResult]:
    """Merge like `merge_all`; return the result of each step.

    With `is_run` False, every model of one step is merged, each into a directory of its role.

    Raises:
        UnshardError: there is no such run, or an option does not fit; nothing was written.
    """
    results, all_roles = list[StepResult](), options.role == EVERY_ROLE
    listener = partial(_forward_unadvised, listener) if all_roles else listener
    sets = _weights_to_merge(given_path(run, "the run"), options, listener, is_run=is_run)
    is_meant = not is_run or (all_roles and len({at.step_dir for at in sets}) == 1)
    for at in sets:
        role, target = at.role or "model", at.default_output
        if output is not None:
            target = given_output(output) / (target.name if is_run else role)
        chosen = replace(options, role=at.role) if all_roles else options
        result = StepResult(at.step, str(at.weights_dir), str(target), is_meant=is_meant)
        result = replace(result, role=role) if all_roles else result
        try:
            result = replace(result, report=merge_checkpoint(at.path, target, chosen, listener))
        except UnshardError as error:
            if all_roles:
                error.subject, error.hint = map(unadvised, (error.subject, error.hint))
            result = replace(result, error=error)
            what = f"{result.title} could not be merged"
            if not result.has_failed:
                what = "passed over an incomplete step"
            listener(Warned(f"{what}: " + error.text))
        results.append(result)
    return results


def _forward_unadvised(listener: Listener, event: Event) -> None:
    """Remove the options from a warning: they may be wrong for the other models of the step."""
    listener(Warned(unadvised(event.text)) if isinstance(event, Warned) else event)


def _weights_to_merge(
    run: Path, options: MergeOptions, listener: Listener, *, is_run: bool
) -> list[Location]:
    """Return the weights to merge: one model of each step, or all models of a step or of a run."""
    if options.push_to_hub is not None:
        what = "⟦--all-steps⟧" if is_run else "⟦--role all⟧"
        raise UsageError(f"{what} with ⟦--push-to-hub⟧: one repository cannot hold all outputs")
    if is_run and options.step is not None:
        raise UsageError(f"⟦--all-steps⟧ and ⟦--step {options.step}⟧ exclude each other")
    if options.role == EVERY_ROLE:
        every = replace(options, role=None).choice._replace(role=EVERY_ROLE)
        steps = (all_steps(run, every) if is_run else []) or [_complete(run, every, listener)]
        return [location for step in steps for location in (step, *step.others)]
    if steps := all_steps(run, options.choice):
        return steps
    raise UnknownFormatError(
        f"{run} is one checkpoint, not a directory of several",
        hint="give the directory that has the steps, or merge this checkpoint alone",
    )


def _complete(run: Path, choice: Choice, listener: Listener) -> Location:
    """Return the highest step whose models all have all files, or else the highest step."""
    steps = list[Location]()
    with blaming(run):
        for step in find(run, choice):
            why = [at.format.missing(at) for at in (step, *step.others)]
            if not any(why):
                return step
            steps.append(step)
            listener(Warned(f"{step.step_dir} is not complete: {next(filter(None, why))}"))
    return steps[0]
