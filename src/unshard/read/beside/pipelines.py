"""Pipelines of diffusers: a folder for each component, and model_index.json with their classes.

Training changes one component: a transformer or a UNet. The others (text encoders, an autoencoder,
a scheduler) stay as they are.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from unshard.containers.json_file import json_object, shown
from unshard.errors import CorruptError, IncompleteError, UsageError
from unshard.read.hub_files import PIPELINE_INDEX, RECORD_NAME

_TRAINED = re.compile(r"(transformer|unet)(_\d+)?")


def is_pipeline(index: Path) -> bool:
    """Return whether a model_index.json is that of a pipeline: it has a class name."""
    return isinstance(json_object(index).get("_class_name"), str)


def component_of(pipeline: Path) -> Path:
    """Return the folder of the component that training changes, by its name.

    Raises:
        UsageError: there is none, or there are several.
        CorruptError: model_index.json is damaged.
        IncompleteError: a component of its list is missing.
    """
    components = list(filter(_TRAINED.fullmatch, _components(pipeline)))
    # By its convention the second of two (`transformer_2` of Wan 2.2) has a number.
    first = [name for name in components if not name[-1].isdigit()]
    if len(first) == 1:
        return pipeline / first[0]
    candidates = " or ".join(shlex.quote(str(pipeline / name)) for name in components)
    raise UsageError(
        f"{pipeline}: a pipeline, of which one component is needed",
        expected="one folder that is called transformer or unet, by model_index.json",
        found=", ".join(components) or "none",
        hint=f"pass {candidates or 'the folder of the component'}",
    )


def _components(pipeline: Path) -> list[str]:
    """Return the components that a pipeline has."""
    index = pipeline / PIPELINE_INDEX
    components = []
    for name, value in json_object(index).items():
        if not (isinstance(value, list) and len(value) == 2 and all(value)):
            continue  # a setting, or a component that was left out
        if "/" in name or name in ("", ".", ".."):
            raise CorruptError(f"{index}: a component outside of the pipeline", found=shown(name))
        if not (pipeline / name).is_dir():
            raise IncompleteError(
                f"{pipeline}: has no folder {name}, which {PIPELINE_INDEX} lists",
                hint="download or copy the whole pipeline",
            )
        components.append(name)
    return components


def others_of(component: Path) -> dict[str, Path]:
    """Return all other files of a component's pipeline, by their paths in it; not hidden files.

    Raises:
        IncompleteError: a link is broken.
    """
    pipeline = component.parent
    return {
        path.relative_to(pipeline).as_posix(): path
        for child in sorted(pipeline.iterdir())
        if child.name not in (component.name, RECORD_NAME)
        for path in _files_in(child, ())
    }


def _files_in(path: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield a file, or those in a folder; links are followed, which the hub's cache consists of."""
    if path.name.startswith("."):
        return
    if path.is_dir():
        place = path.resolve()
        for child in sorted(path.iterdir()) if place not in above else ():
            yield from _files_in(child, (*above, place))
    elif path.exists():
        yield path
    else:
        raise IncompleteError(f"{path}: a broken link")
