"""What the drop-in commands share: how they end, what they advise, what they add to an output."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from unshard.cli import running
from unshard.errors import ConversionError, UnknownFormatError, UsageError, speaking
from unshard.fronts import Call, Command, Front
from unshard.progress import Listener
from unshard.showing import listening

if TYPE_CHECKING:
    from unshard.api import MergeOptions, Report
    from unshard.api.inspecting import ShardCounts
    from unshard.api.making import Prepared
    from unshard.read.model_config import Fields
    from unshard.tensors.catalog import Catalog

_DTYPES = ("float32", "float16", "bfloat16")

_GENERATION_CONFIG = "generation_config.json"

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_TEXT_CONFIGS = ("decoder", "generator", "text_config")
_SINCE_5 = {"output_attentions": False, "output_hidden_states": False, "use_cache": True}


class SavesItself(Protocol):
    """A config of transformers."""

    def save_pretrained(self, save_directory: str, /) -> object:
        """Write config.json into a directory."""


def path_argument(text: str) -> Path:
    """Return the path that an argument is; an empty variable of a shell is none.

    Raises:
        argparse.ArgumentTypeError: it is empty.
    """
    if not text:  # `Path` would take it for the current directory
        raise argparse.ArgumentTypeError("it is an empty path; for the current directory, give .")
    return Path(text)


def add_options(parser: argparse.ArgumentParser, *, output: str, folder: str, dtype: str) -> None:
    """Add the options that both conversion scripts have, by the names that each gives them."""
    parser.add_argument(output, type=path_argument, help="default: CHECKPOINT_PATH_merged")
    about = "folder of the shards; default: actor"
    parser.add_argument(folder, type=path_argument, default="actor", help=about)
    about = "default: bfloat16"
    parser.add_argument(dtype, default="bfloat16", choices=_DTYPES, help=about)


def run(main: Callable[[], None], *, failed: str = "error: ") -> NoReturn:
    """Run a command as this process; exit with 1 if it fails, as the originals do.

    `failed` is printed before the message of an error.
    """
    running.run(main, failed=failed, failure=1)


@contextmanager
def showing(front: Front) -> Iterator[Listener]:
    """Show the progress, the warnings and the errors of a command in the words of a front."""
    with speaking(front), listening(quiet=False, front=front) as listener:
        yield listener


def merge_line(checkpoint: Path, output: Path, options: "MergeOptions") -> Call:
    """Return the line of `unshard merge` that does what a drop-in does."""
    return Call("unshard merge", (str(checkpoint), str(output)), options.chosen)


def as_transformers_saves(prepared: "Prepared") -> "Prepared":
    """Return what is to be made, with the generation_config.json that `save_pretrained` writes.

    Raises:
        ConversionError: there is no config, where the originals stop, too.
    """
    if prepared.config is None:
        location = prepared.checkpoint.location
        places = dict.fromkeys((location.weights_dir, location.step_dir))
        shown = " or ".join(f"{one} or its huggingface/" for one in places)
        raise ConversionError(
            f"{location.place}: there is no config.json, without which the output is not a model",
            expected=f"config.json in {shown}",
            hint="give it with ⟦--config FILE|DIR⟧ or ⟦--base MODEL⟧",
        )
    text = generation_config(prepared.config.fields)
    if text is None or _GENERATION_CONFIG in prepared.checkpoint.companions.files:
        return prepared
    return replace(prepared, files={**prepared.files, _GENERATION_CONFIG: text})


def generation_config(config: "Fields") -> bytes | None:
    """Return `generation_config.json` as `save_pretrained` derives it from config.json.

    It names the tokens that begin, end and pad a text and, since transformers 5, what a forward
    pass returns. None for a model whose config says that it does not generate.
    """
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    generates = any(isinstance(name, str) and name.endswith(_GENERATES) for name in names)
    if names and not generates:
        return None
    nested = (config.get(key) for key in _TEXT_CONFIGS)
    inner = next((one for one in nested if isinstance(one, dict)), {})
    version = str(config.get("transformers_version", ""))
    major = version.partition(".")[0]
    fields: dict[str, object] = {"_from_model_config": True, "transformers_version": version}
    known: dict[str, object] = dict.fromkeys(_TOKENS)
    if major.isdigit() and int(major) >= 5:
        known |= _SINCE_5
    for key, default in known.items():
        found = [one[key] for one in (config, inner) if one.get(key) is not None]
        if found or default is not None:
            fields[key] = found[0] if found else default
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


@contextmanager
def as_file(config: SavesItself | str | Path | None) -> Iterator[Path | None]:
    """Yield a file with a config of transformers; a path, and None, as they are."""
    if config is None or isinstance(config, str | Path):
        yield None if config is None else Path(config)
        return
    with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
        config.save_pretrained(scratch)
        yield Path(scratch) / "config.json"


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a conversion script reads and writes: the step, its folder of shards, the output."""

    checkpoint: Path
    actor: Path
    output: Path


def find_paths(checkpoint: Path, subfolder: Path, output: Path | None) -> Paths:
    """Return the paths that a script's arguments name.

    Raises:
        UnknownFormatError: there is no such directory.
        UsageError: the default output would look like a checkpoint to a trainer.
    """
    step = checkpoint.resolve()
    if not step.exists():
        raise UnknownFormatError(f"Checkpoint path does not exist: {step}")
    actor = step / subfolder
    if not actor.exists():
        raise UnknownFormatError(f"Actor directory does not exist: {actor}")
    if output is None and step.name.startswith("checkpoint"):
        raise UsageError(
            f"{step}_merged: trainers would take the default output for one of their checkpoints",
            hint="give another output: --output",
        )
    return Paths(step, actor, Path(f"{step}_merged") if output is None else output.resolve())


def convert(
    paths: Paths,
    options: "MergeOptions",
    before: Callable[["Catalog", "ShardCounts"], None],
) -> "Report":
    """Make the output of a conversion script, and show the progress.

    `before` is called with what was read, before anything is written.
    """
    from unshard.api.inspecting import count_shards
    from unshard.api.making import Prepared
    from unshard.api.merging import merge_checkpoint

    def tell(prepared: Prepared) -> Prepared:
        saved = as_transformers_saves(prepared)
        catalog = saved.checkpoint.catalog
        before(catalog, count_shards(catalog))
        return saved

    front = Command({}, merge_line(paths.actor, paths.output, options))
    alone = replace(options, config="none")  # as the originals: no base is looked for
    with showing(front) as listener:
        return merge_checkpoint(paths.actor, paths.output, alone, listener, before=tell)


def print_how_to_load(output: Path) -> None:
    """Print how the output is loaded."""
    print("\nYou can now load this model with:")
    print("  from transformers import AutoModelForCausalLM")
    print(f"  model = AutoModelForCausalLM.from_pretrained({str(output)!r})")
