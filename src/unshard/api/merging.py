"""`merge`: a checkpoint in, a Hugging Face directory out; and `merge_all`: every step of a run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from unshard.api.completing import make_once, make_output, refuse_other, stage_for
from unshard.api.converting import convert
from unshard.api.making import Prepared, fingerprint_of, make_report, plan_output, push_output
from unshard.api.options import MergeOptions, accepting, given_output, given_path
from unshard.api.sources import Sources, open_source, refuse_unloadable
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
from unshard.showing import hearing
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
    store its config.json is written when all else is there and verified. The checkpoint is only
    read. The same checkpoint gives the same bytes, whatever `workers` and `memory` are.

    Args:
        checkpoint: a checkpoint, a directory of several (the highest complete step is taken), or
            any directory inside one. node:///path is what all nodes of a Ray cluster have together
            under that path on their own disks. RUN@last=5 is the average of the last 5 complete
            steps of a run, RUN@last=5,schedule=cosine with a schedule of `average`; they have no
            default output.
        output: must not exist unless `overwrite`; default `merged/<step directory>[-critic][-ema]`
            next to the step directory. An address such as s3://bucket/model is one in an object
            store, where `overwrite` and `push_to_hub` are refused.
        listener: called with progress events and warnings; without one, warnings are
            `UnshardWarning` of Python, and a terminal or a notebook gets a progress bar.

    Keyword Args:
        dtype: "keep", "config" (as in config.json), "base" (as in the base model, tensor by
            tensor), or bfloat16, float16 or float32: by name ("bf16", "fp16" and "fp32" too), or as
            a dtype of numpy, ml_dtypes or torch. Only floating point tensors are cast; integers,
            booleans, 8-bit floats and tensors that the model's family keeps in float32 never are;
            but block FP8 with its scales (`weight_scale_inv`) is dequantised.
        keep_fp32: a regular expression; tensors whose names it matches are not cast.
        quantize: "fp8-block" writes the matrices of linear layers as DeepSeek's models have them:
            float8_e4m3fn, and a float32 scale for each block of 128 x 128. They are quantised from
            their stored values; `dtype` is that of the tensors which are kept.
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
        lora: what to do with adapters: "fuse" them, write the "adapter" alone, or "both"; or
            "keep" their matrices among the weights as training has them, with `names="training"`;
            or "ignore" an adapter in a file next to weights that have none. By default those among
            the weights are fused, and one next to them is an error.
        lora_alpha: the scale of the adapter, if no file of the checkpoint records it.
        weights: "model" (default), "ema", or "module": of DeepSpeed, the weights in the dtype of
            training, where they are whole (stages 0 to 2).
        role: whose weights, where a step has several sets: "actor" (or "policy"), "critic", or the
            name of their folder; by default "actor", "policy", "model", "trainer", the first that
            is there.
        step: which step of a directory with several.
        config: a config.json, or a directory with config, tokenizer and the like, to use instead of
            the checkpoint's own. Without one, those of the base model are used that a file of the
            trainer names, if it is on this machine. "none": write the weights alone if the
            checkpoint has no config.json; a directory of that name is given as Path("none").
        also: directories with more files of the same checkpoint, saved on other nodes.
        max_shard_size: largest weight file, bytes or "5GB"; default: as in the base, or 5GB.
        workers: threads; default: as many as the machine has cores, at most 8.
        memory: bound on all buffers together, bytes or "64MB".
        assume_dim0: treat plain tensors that differ between ranks as shards along dimension 0.
        ep_size: size of the expert parallelism, if the files do not record it (verl's VeOmni).
        allow_globals: tensor subclasses in pickles to read as the plain tensors they store.
        engine: "ray": do the work on the nodes of a Ray cluster, which this process is connected
            with, or which RAY_ADDRESS names, or which this machine is a node of. `workers` and
            `memory` are those of each node then. Default: threads of this process.
        verify: "light" (the output is reopened: headers, names, shapes, dtypes, sizes, index),
            "full" (also checksums of the sources, replicas, and every byte read back), or "off".
        checksums: read the output again, and write the SHA-256 of each tensor of the model into
            `unshard.json`, as `unshard.checksums` returns them.
        extra_state: write scheduler and random state of all ranks next to the weights, if the
            checkpoint has them: `extra_state_merged.pt`, `lr_scheduler_state.json`.
        optimizer: write the state of the optimizer too, under the names of the output's tensors:
            its tensors to `optimizer.safetensors`, everything else to `optimizer.json`.
        overwrite: replace an earlier output, or, if the output is the checkpoint's own directory,
            put the weights there; other files stay. If a file that unshard did not write, or that
            was changed since, would be lost, or if transformers would load it instead of the
            output or together with it, this is an error; "all" removes such files too.
        reuse: if the output was made from this checkpoint with these options, use it: nothing is
            read of the weights, or written. If another process is making it, wait for it; if that
            one dies, go on with its finished files, as `resume` does. Anything else that is there
            is an error, or replaced with `overwrite`.
        resume: go on with the finished files of a merge to the same output that was interrupted, if
            the checkpoint and the options are the same; and leave the finished files if an error
            or a signal ends this one. Without it nothing is left then.
        dry_run: plan only, write nothing.
        push_to_hub: the id of a repository to upload the output to, after it is safe on disk.
        private: make that repository private if it does not exist.

    Raises:
        UnshardError: one of the tree in `unshard.errors`; nothing of the output is left then,
            without `resume`.
    """
    from unshard.stores.nodes.connection import disconnecting

    with disconnecting(), hearing(listener) as heard:
        return merge_checkpoint(checkpoint, output, MergeOptions(**options), heard)


def merge_checkpoint(
    checkpoint: str | Path,
    output: str | Path | None,
    options: MergeOptions,
    listener: Listener,
    *,
    before: Callable[[Prepared], Prepared] = lambda prepared: prepared,
    pass_over: bool = True,
) -> Report:
    """Merge one checkpoint as `merge` does, with the options as one value.

    Args:
        checkpoint, output, options, listener: as for `merge`.
        before: as for `merge_with`.
        pass_over: as for `open_source`.
    """
    target = check_output(output, options)
    sources = open_given(checkpoint, options, listener, pass_over=pass_over)
    if target is None and len(sources.checkpoints) > 1:
        raise UsageError("an average of steps has no default output", hint="give an output")
    return merge_with(sources, target, options, listener, before=before)


def open_given(
    given: str | Path, options: MergeOptions, listener: Listener, *, pass_over: bool = True
) -> Sources:
    """Open the checkpoint that a path means, as by `open_source`, or the average that it names."""
    path = given_path(given, "the checkpoint")
    if (average := named_average(path)) is None:
        return open_source(path, options, listener, pass_over=pass_over)
    from unshard.api.opening import Averaging, open_sources

    run, last, schedule = average
    how = Averaging(last=last, schedule=schedule)
    return open_sources(run, options, listener, how, pass_over=pass_over)


def check_output(output: str | Path | None, options: MergeOptions) -> Path | None:
    """Return the path of an output; refuse, before anything is read, what cannot be one.

    What a killed merge has begun to move there is moved: into the checkpoint itself, perhaps, which
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
    before: Callable[[Prepared], Prepared] = lambda prepared: prepared,
    change: Callable[[Prepared, Path], Prepared] | None = None,
) -> Report:
    """Merge what was opened: one checkpoint, or several that are averaged.

    Args:
        sources: what to merge.
        output: what `check_output` returned; options, listener: as for `merge`.
        before: called with the plan before writing; may add small files, or raise to end the merge.
        change: as for `make_output`.
    """
    target = output or sources.last.location.default_output
    refuse_unloadable(sources, options)
    prepared = before(plan_output(sources, convert(sources, options), options))
    prepared = replace(prepared, fingerprint=fingerprint_of(prepared))
    warn(listener, prepared.warnings)
    stage, memory = stage_for(target, prepared, options), options.resources.memory_bytes
    if options.dry_run:
        is_made = options.reuse and is_made_by(target, prepared.fingerprint)
        if not is_made:
            refuse_other(stage, target, prepared, options)
        return make_report(prepared, target, memory_bytes=memory, dry_run=True, reused=is_made)
    if options.reuse:
        made = make_once(prepared, target, options, listener)
    else:
        made = make_output(prepared, stage, options, listener, change)
    url, repo = None, options.push_to_hub
    if repo is not None:
        url = push_output(made.prepared, target, repo, listener, private=options.private)
    return make_report(
        made.prepared,
        target,
        memory_bytes=memory,
        notes=made.notes,
        changed=made.changed,
        copied=made.copied,
        url=url,
        reused=made.reused,
    )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of one step of a run, or of one model of a step.

    Attributes:
        step: its number.
        source: the directory of its weights; output: where its model is, or would be.
        report: of the merge, if it was made or used.
        error: why it was not; an IncompleteError for a step that was passed over.
        role: what the model is called, if every role was asked for.
        is_meant: whether this step was asked for, and so is not passed over.
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
        """Whether the step could not be merged although it is complete, or was asked for."""
        passed_over = isinstance(self.error, IncompleteError) and not self.is_meant
        return self.error is not None and not passed_over

    @property
    def title(self) -> str:
        """Which step this is, and which model of it."""
        return f"step {self.step}" + (f", {self.role}" if self.role else "")


@accepting(MergeKeywords)
def merge_all(
    run: str | Path,
    output: str | Path | None = None,
    *,
    listener: Listener | None = None,
    **options: Unpack[MergeKeywords],
) -> list[Report]:
    """Merge every complete step of a run, each as `merge` does, the lowest first.

    A step that cannot be merged does not prevent the merge of the others.

    Args:
        run: a directory that has several steps; for `role="all"`, also one of them.
        output: the directory to make one output per step in; default `merged` next to the steps.
        listener: as for `merge`; steps that are incomplete are named.
        options: as for `merge`, except `step` and `push_to_hub`; and role="all" merges every model
            of a step: into `<step>`, `<step>-critic` and so on.

    Returns:
        A report for each model that was merged now or, with `reuse`, before.

    Raises:
        UnshardError: there is no such run; or, after all steps were tried, what those that failed
            ended with. The outputs of the others stay.
    """
    from unshard.stores.nodes.connection import disconnecting

    with disconnecting(), hearing(listener) as heard:
        chosen = MergeOptions(**options)
        results = merge_steps(run, output, chosen, heard)
    failed = [one.error for one in results if one.error is not None and one.has_failed]
    kinds = {type(error) for error in failed}
    kind = kinds.pop() if len(kinds) == 1 else UnshardError
    what = "steps" if chosen.role != EVERY_ROLE else "models"
    raise_all(kind, f"{run}: {len(failed)} of {len(results)} {what} failed", failed)
    return [one.report for one in results if one.report is not None]


def merge_steps(
    run: str | Path,
    output: str | Path | None,
    options: MergeOptions,
    listener: Listener,
    *,
    is_run: bool = True,
) -> list[StepResult]:
    """Merge as `merge_all` does; return what became of each step.

    With `is_run` False, every model of one step is merged, each into a directory of its role.

    Raises:
        UnshardError: there is no such run, or an option does not fit; nothing was made.
    """
    results, is_every = list[StepResult](), options.role == EVERY_ROLE
    listener = partial(_tell_alone, listener) if is_every else listener
    sets = _sets_meant(given_path(run, "the run"), options, listener, is_run=is_run)
    is_meant = not is_run or (is_every and len({at.step_dir for at in sets}) == 1)
    for at in sets:
        role, target = at.role or "model", at.default_output
        if output is not None:
            target = given_output(output) / (target.name if is_run else role)
        chosen = replace(options, role=at.role) if is_every else options
        one = StepResult(at.step, str(at.weights_dir), str(target), is_meant=is_meant)
        one = replace(one, role=role) if is_every else one
        try:
            one = replace(one, report=merge_checkpoint(at.path, target, chosen, listener))
        except UnshardError as error:
            if is_every:
                error.subject, error.hint = map(unadvised, (error.subject, error.hint))
            one = replace(one, error=error)
            what = f"{one.title} could not be merged"
            if not one.has_failed:
                what = "passed over an incomplete step"
            listener(Warned(f"{what}: " + error.text))
        results.append(one)
    return results


def _tell_alone(listener: Listener, event: Event) -> None:
    """Tell what is about one model of several: what it needs may be wrong for the others."""
    listener(Warned(unadvised(event.text)) if isinstance(event, Warned) else event)


def _sets_meant(
    run: Path, options: MergeOptions, listener: Listener, *, is_run: bool
) -> list[Location]:
    """Return the sets of weights to merge: one of each step, or every one of a step or of each."""
    if options.push_to_hub is not None:
        what = "⟦--all-steps⟧" if is_run else "⟦--role all⟧"
        raise UsageError(f"{what} with ⟦--push-to-hub⟧: one repository cannot hold all of them")
    if is_run and options.step is not None:
        raise UsageError(f"⟦--all-steps⟧ and ⟦--step {options.step}⟧ exclude each other")
    if options.role == EVERY_ROLE:
        every = replace(options, role=None).choice._replace(role=EVERY_ROLE)
        steps = (all_steps(run, every) if is_run else []) or [_complete(run, every, listener)]
        return [one for step in steps for one in (step, *step.others)]
    if steps := all_steps(run, options.choice):
        return steps
    raise UnknownFormatError(
        f"{run} is one checkpoint, not a directory of several",
        hint="give the directory that has the steps, or merge this checkpoint alone",
    )


def _complete(run: Path, choice: Choice, listener: Listener) -> Location:
    """Return the highest step of which no set of weights lacks a file; without one, the highest."""
    steps = list[Location]()
    with blaming(run):
        for step in find(run, choice):
            why = [at.format.missing(at) for at in (step, *step.others)]
            if not any(why):
                return step
            steps.append(step)
            listener(Warned(f"{step.step_dir} is not complete: {next(filter(None, why))}"))
    return steps[0]
