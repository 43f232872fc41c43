"""Keys, command lines and accepted arguments that lm-eval and lmms-eval share.

Clients may choose arguments that load nothing else and run no code of a checkpoint (by the sources
of lm_eval 0.4.13 and lmms_eval 0.7.3), and others that `allowed_model_args` of a profile allows.
"""

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from unshard.errors import UsageError
from unshard.evaluate.jobs import Arguments
from unshard.evaluate.server.config.arguments import (
    has_separator,
    is_name,
    join_arguments,
    matches,
    parse_arguments,
)
from unshard.evaluate.server.config.keys import (
    Folders,
    ModelArgs,
    NonEmptyText,
    Texts,
    find_program,
)
from unshard.evaluate.server.evaluators.installed import UnknownTasksError
from unshard.evaluate.server.evaluators.revision import installed_versions
from unshard.evaluate.server.evaluators.work import EvalInput, Profile
from unshard.evaluate.server.processes.bounded_log import last_lines
from unshard.evaluate.server.processes.supervise import LOG_NAME
from unshard.evaluate.server.roots import not_accepted
from unshard.evaluate.values import LARGEST, Scalar, expects

# Model arguments that are plain values in every model class of both evaluators.
_MODEL_ARGUMENTS = frozenset(
    # precision, attention, memory
    "dtype softmax_dtype mixed_precision_dtype attn_implementation use_flash_attention_2 use_cache "
    "logits_cache parallelize tensor_parallel_size data_parallel_size gpu_memory_utilization "
    "max_num_seqs max_num_batched_tokens max_batch_size enforce_eager swap_space seed "
    # text
    "max_length max_model_len max_new_tokens max_gen_toks truncation truncation_side add_bos_token "
    "prefix_token_id enable_thinking think_end_token system_prompt reasoning_prompt "
    # images, video, sound
    "max_pixels min_pixels total_pixels min_image_pixels max_image_size max_images min_patches "
    "max_patches do_image_splitting image_first interleave_visuals fps video_fps nframes "
    "num_frames max_num_frames max_frame_num max_frames max_frames_num video_max_frames "
    "use_custom_video_loader language task".split()
)
# Without `penalty_alpha` and `num_beam_groups`, for which transformers fetches code.
_GENERATION_ARGUMENTS = frozenset(
    "temperature top_p top_k min_p typical_p do_sample num_beams early_stopping length_penalty "
    "repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size max_new_tokens "
    "min_new_tokens max_gen_toks max_tokens max_length until stop seed use_cache".split()
)
# Lengths, which RULER and BABILong build their questions for. Not `tokenizer`, `pretrained` and
# `model`, which tasks load with trust_remote_code=True, and not `version`, which would replace the
# task's own in the results.
_METADATA = frozenset({"max_seq_lengths"})

_MOST_ARGUMENTS = 64
_LONGEST_VALUE = 4000
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)

_LOG_LINES = 100
_NOT_FOUND = re.compile(r"Tasks not found: (.*?)(?:\. Try .*)?$", re.MULTILINE)


class HarnessKeys(Profile):
    """Keys of the profiles of lm-eval and lmms-eval."""

    module: ClassVar[str]
    """The module of the evaluator."""
    listing: ClassVar[str]
    """The command that lists its tasks, after `python -m`."""
    is_lmms_form: ClassVar[bool] = True
    trial: ClassVar[Arguments] = Arguments(limit=1)
    settings: ClassVar[frozenset[str]] = frozenset({"model", "checkpoint_key", "model_args"})

    interpreter: Annotated[NonEmptyText, AfterValidator(find_program)] = sys.executable
    """The Python in which the evaluator is installed."""
    include_paths: Folders = ()
    """Directories with further tasks (lmms-eval: one); paths in a task must be absolute."""
    model: NonEmptyText
    """The type of model, as the evaluator calls it."""
    checkpoint_key: NonEmptyText = "pretrained"
    """The argument of the model that takes the checkpoint."""
    model_args: ModelArgs = {}  # noqa: RUF012  (pydantic copies it)
    """Arguments of the model that no client can change."""
    allowed_model_args: Texts = ()
    """Shell patterns of names in `model_args`, `gen_kwargs` and `metadata` that clients may set in
    addition to those known to be harmless."""
    launcher: Annotated[Literal["accelerate", "none"], expects("accelerate, none")] = "accelerate"
    """With several GPUs: one process for each, with the whole model and a part of the data; or one
    process, whose model spreads over them (vllm)."""

    @property
    def start(self) -> tuple[str, ...]:
        """The interpreter."""
        return (self.interpreter,)

    @property
    def modules(self) -> tuple[str, ...]:
        """The evaluator's module."""
        return (self.module,)

    @property
    def version(self) -> str | None:
        """The version that the interpreter would import."""
        return installed_versions(self.interpreter, self.module, self.environment)[0]

    @property
    def versions(self) -> str:
        """The versions of the interpreter, the module, and others that it would import."""
        return installed_versions(self.interpreter, self.module, self.environment)[1]

    @property
    def files(self) -> Mapping[str, Path]:
        """The config, and the directories with further tasks."""
        tasks = {f"include_paths.{index}": path for index, path in enumerate(self.include_paths)}
        return {**super().files, **tasks}

    def check_arguments(self, where: str) -> None:
        """Raise if an argument of the profile cannot be handed over."""
        super().check_arguments(where)
        join_arguments(self.model_args, what=f"{where}: model_args")
        own = self.arguments
        join_arguments(own.model_args, what=f"{where}: arguments: model_args")
        parse_arguments(own.gen_kwargs or "", what=f"{where}: arguments: gen_kwargs")
        if twice := sorted({self.checkpoint_key, *self.model_args} & own.model_args.keys()):
            raise UsageError(
                f"{where}: arguments: model_args sets again: {', '.join(twice)}",
                expected="each key once: in `model_args`, or in `arguments` if submissions may "
                "change it",
            )

    def list_unfitting(self, chosen: Arguments) -> Iterator[UsageError]:
        """Yield the arguments that are neither harmless nor allowed, or that the server sets."""
        yield from super().list_unfitting(chosen)
        for key in chosen.metadata:
            if key not in _METADATA and not matches(key, self.allowed_model_args):
                yield not_accepted(
                    "metadata",
                    key,
                    expected=", ".join(sorted(_METADATA)),
                    hint="other keys may name code or models; the profile can allow them by "
                    "`allowed_model_args`, or set them by `arguments: metadata`",
                )
        yield from self._list_unfitting("model_args", chosen.model_args, _MODEL_ARGUMENTS)
        fixed = {self.checkpoint_key, *self.model_args}
        for key in sorted(fixed.intersection(chosen.model_args)):
            yield not_accepted(
                "model_args", key, expected="an argument that the server does not set itself"
            )
        try:
            pairs = parse_arguments(chosen.gen_kwargs or "", what="gen_kwargs")
        except UsageError as error:
            yield error
        else:
            yield from self._list_unfitting("gen_kwargs", pairs, _GENERATION_ARGUMENTS)

    def _list_unfitting(
        self, field: str, pairs: Mapping[str, Scalar], harmless: Collection[str]
    ) -> Iterator[UsageError]:
        if len(pairs) > _MOST_ARGUMENTS:
            yield not_accepted(field, len(pairs), expected=f"at most {_MOST_ARGUMENTS}")
            return
        for key, value in pairs.items():
            if not is_name(key, _KEY):
                yield not_accepted(
                    field, key, expected="an identifier of ASCII letters, digits and `_`"
                )
            elif key not in harmless and not matches(key, self.allowed_model_args):
                yield not_accepted(
                    field,
                    key,
                    expected="an argument that is known to load neither code nor another model",
                    hint="the profile can allow it by `allowed_model_args`, or set it by "
                    "`model_args`",
                )
            elif not _is_plain(value):
                yield not_accepted(
                    f"{field}: {key}",
                    value,
                    expected="a finite number, a boolean, or one line of text without comma, "
                    "equals sign, quotes, brackets and slashes, and not only dots",
                )

    def module_command(self, work: EvalInput, module: str) -> list[str]:
        """Return the command line that runs a module on all GPUs of the work.

        One process is started without `accelerate launch`, which would not set the variables that
        `Accelerator()` then needs. Port 0 makes it choose a free port, so that jobs do not collide.
        """
        start = [self.interpreter, "-m"]
        if work.gpus > 1 and self.launcher == "accelerate":
            start += ["accelerate.commands.launch", "--multi_gpu", f"--num_processes={work.gpus}"]
            start += ["--num_machines=1", "--main_process_port=0", "-m"]
        return [*start, module]

    def model_args_of(self, work: EvalInput, model: Path) -> dict[str, Scalar]:
        """Return the arguments of the model; the profile's win over the client's."""
        return {**work.arguments.model_args, **self.model_args, self.checkpoint_key: str(model)}

    def check_known(self, work: EvalInput) -> None:
        """Raise if the evaluator's log has the error that it does not know a task of the job.

        Both evaluators end with the line "ValueError: Tasks not found: a, b" (lm_eval 0.4.13,
        config/evaluate_config.py; lmms_eval 0.7.3, __main__.py, where a sentence follows).
        """
        log = last_lines(work.directory / LOG_NAME, _LOG_LINES)
        named = {name for line in _NOT_FOUND.findall(log) for name in line.split(", ")}
        if unknown := [task for task in work.request.tasks if task in named]:
            raise UnknownTasksError(
                work.program,
                unknown,
                hint=f"see `{self.interpreter} -m {self.listing}`; files of "
                "further tasks belong in a directory of the profile's `include_paths`",
            )


def _is_plain(value: object) -> bool:
    """Return whether a value is plain: a slash may mean a path, or a repository of code."""
    if isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return abs(value) <= LARGEST  # false for NaN, too
    return (
        isinstance(value, str)
        and 0 < len(value) <= _LONGEST_VALUE
        and value.isprintable()
        and not has_separator(value)
        and "/" not in value
        and set(value) != {"."}
    )


def generation_args(work: EvalInput) -> dict[str, Scalar]:
    """Return the arguments of generation."""
    return parse_arguments(work.arguments.gen_kwargs or "", what="gen_kwargs")
