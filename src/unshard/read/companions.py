"""Find the files that make weights a model: config, tokenizer, processor, chat template, code.

Never weights, optimizer or random state. Sources: transformers' file name constants; for the
places, verl's history (beside the shards in 0.4.0, in `huggingface/` before and after, not at all
in 0.3.0) and lmms-engine (in the checkpoint's own directory).
"""

from collections.abc import Iterator
from pathlib import Path

from unshard.errors import UsageError
from unshard.read.discover import Location
from unshard.tensors.catalog import Companions

__all__ = ["find_companions"]

_CONFIG = "config.json"
_NAMES = frozenset(
    """
    generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
    added_tokens.json vocab.json merges.txt vocab.txt tokenizer.model spiece.model
    sentencepiece.bpe.model tekken.json preprocessor_config.json video_preprocessor_config.json
    image_processor_config.json processor_config.json audio_tokenizer_config.json
    feature_extractor_config.json chat_template.jinja chat_template.json
    """.split()
)
_SUFFIXES = (".tiktoken", ".py")
_TEMPLATES = "additional_chat_templates"


def find_companions(location: Location, config: Path | None) -> Companions:
    """Return the companions of a checkpoint.

    Args:
        location: where the weights lie.
        config: what the user gave instead: a directory for all of them, a file for config.json
            only.

    Raises:
        UsageError: what the user gave is no config.
    """
    if config is not None and config.is_dir():
        if not (config / _CONFIG).is_file():
            raise UsageError(f"--config {config}: no {_CONFIG} in this directory")
        return _in_directory(config)
    if config is not None and not config.is_file():
        raise UsageError(f"--config {config}: there is no such file or directory")
    found = Companions()
    for folder in _places(location):
        here = _in_directory(folder)
        if here.config or (here.files and not found.files):
            found = here
        if here.config:
            break
    return Companions(config, found.files) if config else found


def _places(location: Location) -> Iterator[Path]:
    weights, step = location.weights_dir, location.step_dir
    yield weights / "huggingface"
    yield weights
    yield weights / "model" / "huggingface"
    if step != weights:
        yield step / "huggingface"
        yield step


def _in_directory(folder: Path) -> Companions:
    if not folder.is_dir():
        return Companions()
    files = {
        child.name: child
        for child in sorted(folder.iterdir())
        if child.is_file() and (child.name in _NAMES or child.name.endswith(_SUFFIXES))
    }
    templates = folder / _TEMPLATES
    if templates.is_dir():
        files |= {
            f"{_TEMPLATES}/{child.name}": child for child in sorted(templates.glob("*.jinja"))
        }
    config = folder / _CONFIG
    return Companions(config if config.is_file() else None, files)
