"""lmms-eval (lmms_eval 0.7.3): `python -m lmms_eval --model ... --model_args key=value,...`.

Its exit code is always 0 (lmms_eval/__main__.py ends in `sys.exit(0)` after it prints an error). So
only the results count: new, and with numbers for every task of the job. This refuses tags, which
the results do not record.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from unshard.errors import UsageError
from unshard.evaluate.jobs import Arguments
from unshard.evaluate.server.config.arguments import has_separator, join_arguments, matches
from unshard.evaluate.server.config.keys import Folders, NonEmptyText, Texts
from unshard.evaluate.server.evaluators.documents import check_tasks, find_newest, read_results
from unshard.evaluate.server.evaluators.harness import HarnessKeys, generation_args
from unshard.evaluate.server.evaluators.work import EvalInput, Scores
from unshard.evaluate.server.roots import not_accepted

MODEL_TYPES = tuple(
    "async_hf_model audio_flamingo_3 fuyu glm4v huggingface idefics2 instructblip internvl_hf "
    "llama4_scout llama_vision llava_hf nanovlm qwen2_5_vl qwen2_audio qwen2_vl qwen3_omni "
    "video_llava whisper".split()
)
"""Types that load the checkpoint through transformers, without trust_remote_code.

`qwen3_vl` and `qwen3_5` are missing because they read its config with trust_remote_code=True;
`vllm` and `sglang`, because that is their default.
"""

GUARDED_TYPES = ("qwen_vl", "vllm")
"""Types in which only the argument `trust_remote_code` runs code.

Its default is True; the server sets it to False. lmms-engine documents the first type, and has the
second as its default.
"""

CHECKPOINT_KEYS: Mapping[str, str] = {
    "fastvideo": "model",
    "longvila": "model",
    "phi3v": "model_id_name",
    "sglang": "model",
    "vllm": "model",
    "vllm_generate": "model",
}
"""The argument for the checkpoint, for types that do not call it `pretrained`."""

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)


class LmmsEvalProfile(HarnessKeys):
    """A profile of lmms-eval."""

    module: ClassVar[str] = "lmms_eval"
    listing: ClassVar[str] = "lmms_eval --tasks list"
    kind: Literal["lmms-eval"] = "lmms-eval"
    include_paths: Annotated[Folders, Field(max_length=1)] = ()
    model: NonEmptyText = "huggingface"
    allowed_models: Texts = MODEL_TYPES
    """Shell patterns of other types of model that clients may choose, as `profile:type`."""

    @property
    def client_models(self) -> tuple[str, ...]:
        """Its type of model, and the types that the profile allows."""
        guarded = GUARDED_TYPES if self.allowed_models == MODEL_TYPES else ()
        return (self.model, *self.allowed_models, *guarded)

    def with_model(self, model: str, *, name: str) -> Self:
        """Return the profile with a type of model, which must be its own or an allowed one."""
        if model == self.model:
            return self
        if not _MODEL.fullmatch(model) or not matches(model, self.client_models[1:]):
            raise UsageError(
                f"profile {name}: model {model!r:.200} is not allowed",
                expected=", ".join([self.model, *self.allowed_models]),
                hint="other types may run code of a checkpoint: the profile can allow them by "
                "`allowed_models`",
            )
        key = CHECKPOINT_KEYS.get(model, "pretrained")
        changed: dict[str, object] = {"model": model, "checkpoint_key": key}
        if not matches(model, self.allowed_models):
            changed["model_args"] = {**self.model_args, "trust_remote_code": False}
        return self.model_copy(update=changed)

    def command_line(self, work: EvalInput) -> list[str]:
        """Return the command; each option is one argument, so no value can become another option.

        lmms-eval appends the output to its own comma-separated arguments, so it is checked as well.
        """
        model = work.model
        if has_separator(str(model)):  # `runs/lr=1e-5,bs=8` would be three arguments
            model = work.directory / "model"
            model.symlink_to(work.model)
        join_arguments({"output_path": str(work.output)}, what=work.program)
        joined = join_arguments(self.model_args_of(work, model), what=f"{work.program}: model_args")
        generation = join_arguments(generation_args(work), what=f"{work.program}: gen_kwargs")
        chosen = work.arguments.options()
        options: dict[str, object] = {
            "model": self.model,
            "model_args": joined,
            "tasks": ",".join(work.request.tasks),
            "output_path": work.output,
            **{name: value for name, value in chosen.items() if value is not False},
            "gen_kwargs": generation or None,
            "include_path": next(iter(self.include_paths), None),
            "device": None if work.gpus else "cpu",
        }
        flags = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return [*self.module_command(work, self.module), *flags, "--log_samples"]

    def list_untaken(self, chosen: Arguments) -> Iterator[UsageError]:
        """Yield also arguments that lmms-eval, whose models apply templates themselves, ignores.

        With `--apply_chat_template` it calls methods that none of its models has
        (lmms_eval/evaluator.py), and it passes no metadata to tasks.
        """
        yield from super().list_untaken(chosen)
        if chosen.apply_chat_template:
            yield not_accepted(
                "apply_chat_template",
                chosen.apply_chat_template,
                expected="false, or nothing: lmms-eval's types of model apply the template of a "
                "chat model themselves",
            )
        if chosen.metadata:
            yield not_accepted("metadata", chosen.metadata, expected="nothing: lmms-eval has none")

    def read_scores(self, work: EvalInput, returncode: int) -> Scores:
        """Return the numbers of all tasks and groups."""
        file = find_newest(work.output, "*_results.json")
        if file is None:
            self.check_known(work)
        document = read_results(work, file, returncode, expected="TIME_results.json")
        # Its "version" is the commit of the directory in which it runs.
        document["lmms_eval_version"] = self.version
        return check_tasks(document, work.request.tasks, program=work.program, file=file)
