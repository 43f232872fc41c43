"""A model's config.json: its fields, and their meaning for several stages.

Resolves nested configs, precedence and defaults. Families that read their own fields do so where
they are listed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from unshard.containers.json_file import JsonFields, json_object
from unshard.errors import CorruptError
from unshard.tensors.dtypes import CASTS

Fields = Mapping[str, object]

TIED_BY_DEFAULT = frozenset(
    """
    aya_vision bart bert bloom cohere cohere2 ctrl ernie4_5 ernie4_5_moe falcon falcon_mamba gemma
    gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text got_ocr2 gpt2 gpt_bigcode
    gpt_neo instructblip internvl lfm2 lfm2_moe lfm2_vl longt5 mamba marian mbart mistral3 mpt mt5
    opt ovis2 paligemma pegasus recurrent_gemma roberta smollm3 starcoder2 t5 t5gemma umt5
    vaultgemma whisper xglm xlm-roberta zamba zamba2
    """.split()
)
"""Model types whose weights are tied by default; a test compares them with transformers."""

_NOTHING: Fields = MappingProxyType({})
_TIE = "tie_word_embeddings"
_DTYPES = ("dtype", "torch_dtype")


class Library(NamedTuple):
    """The library that a config was written for, and that loads the model.

    Attributes:
        name: of the Python package; "" if unknown.
        weights: the stem of its files of weights.
        loads: whether it loads our outputs; None if that could not be tried.
    """

    name: str
    weights: str = "model"
    loads: bool | None = True


TRANSFORMERS = Library("transformers")
SENTENCES = Library("sentence_transformers")
_LIBRARIES = (  # by fields: the first row whose fields a config has
    (("model_type",), TRANSFORMERS),
    (("architectures",), TRANSFORMERS),
    (("transformers_version",), TRANSFORMERS),
    (("architecture", "pretrained_cfg"), Library("timm", loads=None)),
    (("model_cfg", "preprocess_cfg"), Library("open_clip", loads=None)),
    (("type", "input_features", "output_features"), Library("lerobot", loads=None)),
)
NO_LIBRARY = Library("", loads=False)
_DIFFUSERS = Library("diffusers", "diffusion_pytorch_model")
_LMMS_ENGINE = Library("lmms_engine", loads=None)
OF_TRANSFORMERS = ("transformers", "lmms_engine")
"""Libraries whose configs are those of transformers."""
TYPES_OF_LMMS_ENGINE = frozenset(
    "aero aero_realtime bagel dream_dllm llada_dllm llavaonevision1_5 nanovlm qwen3_dllm "
    "rae_siglip sit wanvideo".split()
)
"""Model types that transformers has only after `import lmms_engine`; a test compares them."""


@dataclass(frozen=True, eq=False)
class ModelConfig:
    """The fields of a config.json, and the file that they were read from, if it was a file."""

    fields: Fields
    path: Path = Path("config.json")

    @cached_property
    def nested(self) -> tuple[Fields, ...]:
        """This config, then all configs inside it, at any depth and under any key."""
        return self.fields, *_inside(self.fields)

    @property
    def library(self) -> Library:
        """The library that loads a model with this config."""
        if self.fields.get("model_type") in TYPES_OF_LMMS_ENGINE and "auto_map" not in self.fields:
            return _LMMS_ENGINE
        name = self.fields.get("_class_name")
        if isinstance(name, str) and "_diffusers_version" in self.fields:
            is_model = not name.endswith(("Pipeline", "Scheduler"))
            return _DIFFUSERS if is_model else NO_LIBRARY
        matching = (library for keys, library in _LIBRARIES if self.fields.keys() >= {*keys})
        return next(matching, NO_LIBRARY)

    @property
    def types(self) -> tuple[str, ...]:
        """The model types of this config and of those inside it; "" for a config without one."""
        return tuple(str(fields.get("model_type", "")) for fields in self.nested)

    @property
    def text(self) -> Fields:
        """The config of the text model inside; empty without one."""
        text = self.fields.get("text_config")
        return text if isinstance(text, dict) else {}

    @property
    def dtype(self) -> str | None:
        """The dtype of the config, or else of its text model; None if neither has one."""
        for fields in (self.fields, self.text):
            for key in _DTYPES:
                value = fields.get(key)
                if isinstance(value, str):
                    return value.removeprefix("torch.")
        return None

    @property
    def is_tied(self) -> bool:
        """Whether head and embedding are one tensor: by the config, or else its text model's."""
        tie = self.fields.get(_TIE, self.text.get(_TIE))
        if tie is None:
            types = {self.fields.get("model_type"), self.text.get("model_type")}
            return bool(types & TIED_BY_DEFAULT)
        return tie is True

    @property
    def may_be_tied(self) -> bool:
        """Whether the config or its text model's, each by itself, ties head and embedding.

        Versions of transformers differ in which of the two counts.
        """
        for fields in (self.fields, self.text):
            tie = fields.get(_TIE)
            if tie is True or (tie is None and fields.get("model_type") in TIED_BY_DEFAULT):
                return True
        return False

    def untied(self) -> "ModelConfig":
        """Return the config without ties, also in the config of the text model."""
        return self.changed({_TIE: False}, {_TIE: False} if _TIE in self.text else {})

    def with_vocabulary(self, size: int, rows: int) -> "ModelConfig":
        """Return the config with `rows` in place of this size of the vocabulary."""
        key = "vocab_size"
        own = {key: rows} if self.fields.get(key) == size else {}
        return self.changed(own, {key: rows} if self.text.get(key) == size else {})

    def changed(self, fields: Fields, text: Fields = _NOTHING) -> "ModelConfig":
        """Return the config with other fields of its own, and of the text model inside."""
        inner = {"text_config": {**self.text, **text}} if text else {}
        return replace(self, fields={**self.fields, **inner, **fields})

    def as_written(self, dtype: str | None) -> "ModelConfig":
        """Return a config that is true of the output.

        If a dtype is given, it replaces those of the config and of nested configs; `architectures`
        loses the `FSDP` that FSDP2 puts before class names. The config of another library is
        unchanged: none of them has a dtype.
        """
        if self.library.name not in OF_TRANSFORMERS and self.library.name:
            return self
        fields = dict(self.fields)
        architectures = fields.get("architectures")
        if isinstance(architectures, list):
            fields["architectures"] = [
                name.removeprefix("FSDP") if isinstance(name, str) else name
                for name in architectures
            ]
        if dtype is not None:
            if self.library.name and not any(key in fields for key in _DTYPES):
                # Version 5 of transformers writes `dtype`, version 4 `torch_dtype`.
                major = str(fields.get("transformers_version", "")).partition(".")[0]
                is_new = major.isdigit() and int(major) >= 5
                fields["dtype" if is_new else "torch_dtype"] = dtype
            fields = _with_dtype(fields, dtype)
        return replace(self, fields=fields)


def read_config(path: Path) -> ModelConfig:
    """Read a model's config.json.

    Raises:
        CorruptError: it is not a JSON object, or the type or the classes of the model, or of a
            nested model, are not text.
    """
    fields = json_object(path)
    whole = JsonFields(path, fields)
    nested = [key for key, value in fields.items() if isinstance(value, dict)]
    for config in (whole, *(whole.inside(key) for key in nested if key.endswith("_config"))):
        config.text("model_type")
        config.names("architectures")
    return ModelConfig(fields, path)


@dataclass(frozen=True)
class ConfigFile:
    """A config.json, read once for all users of this object.

    Attributes:
        path: the file.
        made: the config, if the file is of another form and need not be read.
    """

    path: Path
    made: ModelConfig | None = None

    @cached_property
    def model(self) -> ModelConfig:
        """The config, read at its first use: see `read_config`."""
        return read_config(self.path) if self.made is None else self.made


def config_at(path: Path, known: ConfigFile | None) -> ModelConfig | None:
    """Return the config at a path, from `known` if that is its file; None if it is damaged."""
    file = known if known is not None and known.path == path else ConfigFile(path)
    try:
        return file.model
    except CorruptError:
        return None  # the error is raised where the config is needed


def _inside(fields: Fields) -> Iterator[Fields]:
    for value in fields.values():
        if isinstance(value, dict):
            if "model_type" in value:
                yield value
            yield from _inside(value)


def _with_dtype(fields: Fields, written: str) -> dict[str, object]:
    changed = dict(fields)
    for key, value in fields.items():
        if key in _DTYPES and (value is None or str(value).removeprefix("torch.") in CASTS):
            changed[key] = written
        elif (
            isinstance(value, dict)
            and key != "quantization_config"
            and (key.endswith("_config") or "model_type" in value)
        ):
            changed[key] = _with_dtype(value, written)
    return changed
