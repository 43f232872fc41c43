"""Finds the files that make weights a model: config, tokenizer, processor, chat template, code.

Never weights, optimizer or random state. Sources: transformers' file name constants; for the
places, verl's history (next to the shards in 0.4.0, in `huggingface/` before and after, nowhere in
0.3.0), lmms-engine (in the checkpoint's own directory), NeMo AutoModel (`.hf_metadata/`), NeMo-RL
(`tokenizer/`), VeOmni (`model_assets/`), and axolotl and others, which write them once, at the
start, into the run's directory.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.containers.file_states import FileStates
from unshard.errors import CorruptError, UsageError
from unshard.read.format import Location
from unshard.read.hub_files import MODULES
from unshard.read.model_config import ConfigFile, ModelConfig
from unshard.read.step_names import holds_steps

_CONFIG = "config.json"
_NAMES = frozenset(
    """
    generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
    added_tokens.json vocab.json merges.txt vocab.txt tokenizer.model spiece.model
    sentencepiece.bpe.model sentencepiece.model spm.model spm_char.model tiktoken.model
    ice_text.model tekken.json normalizer.json preprocessor_config.json
    video_preprocessor_config.json image_processor_config.json processor_config.json
    audio_tokenizer_config.json feature_extractor_config.json chat_template.jinja chat_template.json
    modules.json config_sentence_transformers.json sentence_bert_config.json
    """.split()
)
_SUFFIXES = (".tiktoken", ".py")
_OF_WEIGHTS = (".safetensors", ".bin", ".index.json")
_EXPORTS = ("hf_model", "hf_ckpt", "hf_meta")  # LLaMA-Factory, VeOmni
_OF_RUN = ("model_assets", "huggingface", "hf_meta")  # VeOmni
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class Companions:
    """The files that make weights a model: config, tokenizer, processor, custom code.

    Attributes:
        config_file: the model's config.json, or a config that was made in its place; or None.
        files: every other file to copy, by its name in the output.
        folder: of the model in the output: a component's folder with a slash, or "".
    """

    config_file: ConfigFile | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    folder: str = ""

    @property
    def config(self) -> Path | None:
        """The path of config.json; None if there is none, or if the config was made."""
        file = self.config_file
        return None if file is None or file.made is not None else file.path

    @property
    def model(self) -> ModelConfig | None:
        """The content of config.json: see `ConfigFile.model`; None without one."""
        return None if self.config_file is None else self.config_file.model

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of sentence-transformers' modules, with a slash; none for other models."""
        if MODULES not in self.files:
            return ()
        from unshard.read.beside.modules import modules_at

        modules = modules_at(self.files[MODULES])
        return tuple({f"{module.folder}/" for module in modules if module.folder})

    @property
    def paths(self) -> dict[str, Path]:
        """All files by name, config.json too."""
        config = {} if self.config is None else {f"{self.folder}{_CONFIG}": self.config}
        return {**config, **self.files}

    def note(self, states: FileStates) -> None:
        """Note the state of the files: they are copied later."""
        for path in self.paths.values():
            states.add(path)


def find_companions(location: Location, config: Path | None) -> Companions:
    """Return the companions of a checkpoint.

    The user's `config` may replace them: a directory for all of them, a file for config.json only.

    Raises:
        UsageError: the user's path is not a config.
    """
    quoted = shlex.quote(str(config))
    if config is not None and config.is_dir():
        if not (config / _CONFIG).is_file():
            raise UsageError(f"⟦--config {quoted}⟧: this directory has no {_CONFIG}")
        return companions_in(config)
    if config is not None and not config.is_file():
        raise UsageError(f"⟦--config {quoted}⟧: no such file or directory")
    companions = Companions()
    for folder, is_own in _places(location):
        here = companions_in(folder) if is_own else _in_run(folder)
        if here.config or (here.files and not companions.files):
            companions = here
        if here.config:
            break
    if not any(_kind(name) == "tokenizer" for name in companions.files):
        companions = completed(companions, _tokenizer_folder(location))
    return replace(companions, config_file=ConfigFile(config)) if config else companions


def _tokenizer_folder(location: Location) -> Companions:
    """Return the files in a folder for the tokenizer, which NeMo-RL writes next to the weights."""
    for folder in (location.weights_dir, *_between(location), location.step_dir):
        here = companions_in(folder / "tokenizer")
        if here.files:
            return replace(here, config_file=None)
    return Companions()


def _between(location: Location) -> list[Path]:
    """Return the directories between the weights and the step's directory, the nearest first."""
    step = location.step_dir
    return [p for p in location.weights_dir.parents if p != step and step in p.parents]


def _places(location: Location) -> Iterator[tuple[Path, bool]]:
    """Yield possible places of companions, and whether each belongs to this checkpoint alone."""
    for root in location.roots:
        yield root / "huggingface", True
        yield root / ".hf_metadata", True
        yield root, True
        yield root / "model" / "huggingface", True
    step = location.step_dir
    own = [path for path in (*_between(location), step) if path != location.weights_dir]
    for folder in own:
        yield folder / "huggingface", True
        yield folder, False
    yield from ((folder / name, True) for folder in (*own, step) for name in _EXPORTS)
    if location.step is not None:
        runs = [step.parent, *([step.parent.parent] if holds_steps(step.parent.name) else [])]
        for run in runs:
            yield run, False
            yield from ((run / name, False) for name in _OF_RUN)


def _in_run(folder: Path) -> Companions:
    """Return the companions in a directory with other files.

    Its config.json must be a model's; code belongs to the model only if that config refers to it.
    """
    here = companions_in(folder)
    try:
        config = here.model
    except CorruptError:
        return here  # using the config raises the error
    if config is None or not config.library.name:
        return Companions()
    if "auto_map" in config.fields:
        return here
    files = {name: path for name, path in here.files.items() if not name.endswith(".py")}
    return replace(here, files=files)


def companions_in(folder: Path) -> Companions:
    """Return the companions in a directory of a model."""
    if not folder.is_dir():
        return Companions()
    files = {
        child.name: child
        for child in sorted(folder.iterdir())
        if child.is_file() and (child.name in _NAMES or child.name.endswith(_SUFFIXES))
    }
    if MODULES in files:
        files = _with_modules(folder, files)
    templates = folder / _TEMPLATES
    if templates.is_dir():
        files |= {
            f"{_TEMPLATES}/{child.name}": child for child in sorted(templates.glob("*.jinja"))
        }
    config = folder / _CONFIG
    # A pipe is refused when it is read: if it were skipped, the output would lack a config.
    exists = config.exists() and not config.is_dir()
    return Companions(ConfigFile(config) if exists else None, files)


def _with_modules(folder: Path, files: dict[str, Path]) -> dict[str, Path]:
    """Return files with those in the folders of sentence-transformers' modules, but for weights.

    A modules.json of another tool is left out.
    """
    from unshard.read.beside.modules import modules_at

    if not (modules := modules_at(files[MODULES])):
        return {name: path for name, path in files.items() if name != MODULES}
    inside = (folder / module.folder for module in modules if module.folder)
    return files | {
        child.relative_to(folder).as_posix(): child
        for place in inside
        if place.is_dir()
        for child in sorted(place.iterdir())
        if child.is_file() and not child.name.endswith(_OF_WEIGHTS)
    }


_TOKENIZER = (
    *"tokenizer special_tokens added_tokens vocab merges spiece sentencepiece spm tiktoken".split(),
    *"ice_text tekken normalizer chat_template".split(),
    _TEMPLATES,
)


def completed(own: Companions, base: Companions) -> Companions:
    """Return a checkpoint's companions, completed by the base model's.

    A tokenizer, a processor, or code is taken as a whole: parts of two do not fit together. A
    pipeline's files are all taken.
    """
    if base.folder:
        return replace(base, config_file=own.config_file or base.config_file)
    own_kinds = {_kind(name) for name in own.files}
    added = {name: path for name, path in base.files.items() if _kind(name) not in own_kinds}
    return Companions(own.config_file or base.config_file, {**own.files, **added})


def _kind(name: str) -> str:
    if name.startswith(_TOKENIZER) or name.endswith(".tiktoken"):
        return "tokenizer"
    if "sentence" in name or name == MODULES or "/" in name:
        return "modules"
    if name.endswith(".py"):
        return "code"
    return "generation" if name.startswith("generation") else "processor"
