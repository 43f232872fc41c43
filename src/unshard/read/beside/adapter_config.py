"""Reads the settings of a LoRA adapter that its tensors do not show: alpha, rank, scaling.

verl writes `lora_train_meta.json` (rank, alpha, task type) next to its shards; PEFT writes
`adapter_config.json`, with everything. Some versions of verl wrote an alpha of 0 and a task type of
"TaskType.CAUSAL_LM"; a 0 counts as unknown.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.containers.json_file import JsonFields, json_object
from unshard.errors import CorruptError
from unshard.read.format import Location
from unshard.read.hub_files import RECORD_NAME
from unshard.read.model_config import Fields
from unshard.read.step_names import holds_steps


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of an adapter.

    Attributes:
        alpha: the numerator of its scale; None if missing or 0.
        rank: of most of its pairs; None if missing.
        use_rslora: the scale is alpha / sqrt(rank), not alpha / rank.
        use_dora: it is a DoRA adapter.
        rank_pattern: ranks of modules that differ, by PEFT's pattern of their names.
        alpha_pattern: alphas likewise.
        target_modules: the modules that have pairs: names, or one pattern.
        target_parameters: bare parameters that have pairs.
        modules_to_save: modules that were trained whole.
        task_type: "CAUSAL_LM" and the like.
        base_model_name_or_path: the model it was trained on.
        fan_in_fan_out: whether weights are stored as (in, out); None if missing.
        fields: all fields of adapter_config.json, unchanged, or those of verl's file.
        source: the file.
    """

    alpha: float | None = None
    rank: int | None = None
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: tuple[str, ...] | str | None = None
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    fan_in_fan_out: bool | None = None
    fields: Fields = field(default_factory=dict)
    source: str = ""


def read_adapter_config(location: Location) -> AdapterConfig | None:
    """Return the settings of a checkpoint's adapter; None if no file has any.

    adapter_config.json has more and decides; verl's file fills in missing values.

    Raises:
        CorruptError: a file is malformed, or the two contradict one another.
    """
    meta, config = (None if path is None else _settings(path) for path in adapter_files(location))
    if meta is None or config is None:
        return config or meta
    for key, of_meta, of_config in (
        ("r", meta.rank, config.rank),
        ("lora_alpha", meta.alpha, config.alpha),
    ):
        if of_meta is not None and of_config is not None and of_meta != of_config:
            raise CorruptError(
                f"{meta.source} and {config.source} contradict one another",
                expected=f"one {key}",
                found=f"{of_meta} and {of_config}",
                hint="remove the file that belongs to another run",
            )
    return replace(
        config,
        alpha=meta.alpha if config.alpha is None else config.alpha,
        rank=meta.rank if config.rank is None else config.rank,
        task_type=config.task_type or meta.task_type,
    )


def adapter_files(location: Location) -> tuple[Path | None, Path | None]:
    """Return the `lora_train_meta.json` and the `adapter_config.json` of a checkpoint, or None."""
    roots, step = location.roots, location.step_dir
    inside = [root / name for root in roots for name in ("", "huggingface")]
    meta = _first("lora_train_meta.json", [*inside, step])
    inside = [root / name for root in roots for name in ("", "lora_adapter", "huggingface")]
    of_run = [] if location.step is None else [step.parent]
    if of_run and holds_steps(step.parent.name):  # VeOmni: RUN/checkpoints/STEP, and RUN/STEP
        of_run.append(step.parent.parent / step.name)
    return meta, _first("adapter_config.json", [*inside, step, step / "lora_adapter", *of_run])


def lora_names(names: Iterable[str]) -> list[str]:
    """Return the names of a LoRA adapter's matrices among those of tensors."""
    return [name for name in names if ".lora_" in name]


def find_adapter(location: Location) -> Path | None:
    """Return the adapter in a file next to weights, where transformers or a trainer reads it.

    The adapter in an output of `--lora both` does not count: the weights contain it already.
    """
    step = location.step_dir
    above = [folder for folder in location.weights_dir.parents if folder.is_relative_to(step)]
    for folder in (*location.roots, *([] if location.role else above)):
        for place in (folder, folder / "lora_adapter", folder / "huggingface"):
            names = ("adapter_model.safetensors", "adapter_model.bin") if place.is_dir() else ()
            for name in names:
                path = place / name
                if path.is_file() and path != location.file and not _is_fused(path):
                    return path
    return None


def _is_fused(adapter: Path) -> bool:
    record = adapter.parent.parent / RECORD_NAME
    if adapter.parent.name != "lora_adapter" or not record.is_file():
        return False
    return JsonFields(record, json_object(record)).inside("options").text("lora") == "both"


def _first(name: str, places: Iterable[Path]) -> Path | None:
    return next((place / name for place in places if (place / name).is_file()), None)


def _settings(path: Path) -> AdapterConfig:
    fields = json_object(path)
    reader = JsonFields(path, fields)
    for key in ("peft_type", "bias"):  # checked here, but read from `fields` where they matter
        reader.text(key)
    targets = fields.get("target_modules")
    ranks, alphas = reader.inside("rank_pattern"), reader.inside("alpha_pattern")
    # verl wrote the repr of PEFT's enum, or of None.
    task_type = (reader.text("task_type") or "").rpartition(".")[2]
    return AdapterConfig(
        alpha=reader.number("lora_alpha") or None,
        rank=reader.count("r") or None,
        use_rslora=reader.flag("use_rslora") or False,
        use_dora=reader.flag("use_dora") or False,
        rank_pattern={key: ranks.count(key) or 0 for key in ranks.fields},
        alpha_pattern={key: alphas.number(key) or 0.0 for key in alphas.fields},
        target_modules=(
            targets if isinstance(targets, str) else reader.names("target_modules") or None
        ),
        target_parameters=reader.names("target_parameters"),
        modules_to_save=reader.names("modules_to_save"),
        task_type=None if task_type in {"", "None"} else task_type,
        base_model_name_or_path=reader.text("base_model_name_or_path"),
        fan_in_fan_out=reader.flag("fan_in_fan_out"),
        fields=fields,
        source=str(path),
    )
