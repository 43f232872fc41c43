"""Pipelines of diffusers: a folder for each component, and model_index.json with their classes.

Training changes one component: a transformer or a UNet. The others (text encoders, an autoencoder,
a scheduler) stay as they are.
"""

import re
import shlex
from pathlib import Path

from unshard.containers.json_file import json_object
from unshard.errors import UsageError
from unshard.read.hub_files import PIPELINE_INDEX

_TRAINED = re.compile(r"Transformer|UNet")


def component_of(pipeline: Path) -> Path:
    """Return the folder of the component that training changes.

    Raises:
        UsageError: there is none, or several may be meant.
        CorruptError: model_index.json is damaged.
    """
    stated = json_object(pipeline / PIPELINE_INDEX).items()
    found = [
        name
        for name, value in stated
        if isinstance(value, list) and len(value) == 2 and value[0] == "diffusers"
        if _TRAINED.search(str(value[1])) and (pipeline / name / "config.json").is_file()
    ]
    # By its convention the second of two (`transformer_2` of Wan 2.2) has a number.
    first = [name for name in found if not name[-1].isdigit()]
    if len(first) == 1:
        return pipeline / first[0]
    meant = " or ".join(shlex.quote(str(pipeline / name)) for name in found)
    raise UsageError(
        f"{pipeline}: a pipeline, of which one component is needed",
        expected="one folder of a transformer or UNet without a number, by model_index.json",
        found=", ".join(found) or "none",
        hint=f"give {meant}" if found else "",
    )


def others_of(component: Path) -> dict[str, Path]:
    """Return all other files of a component's pipeline, by their paths in it; none are hidden."""
    pipeline = component.parent
    paths = (path for path in sorted(pipeline.rglob("*")) if path.is_file())
    named = {path.relative_to(pipeline).as_posix(): path for path in paths}
    return {
        name: path
        for name, path in named.items()
        if not name.startswith((f"{component.name}/", ".", "unshard.json")) and "/." not in name
    }
