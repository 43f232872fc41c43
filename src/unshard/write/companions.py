"""Write the files next to the weights: config.json, adjusted; everything else, as it is."""

import json
import shutil
from pathlib import Path

from unshard.read.beside.companions import Companions
from unshard.read.beside.model_config import ModelConfig

__all__ = ["write_companions"]


def write_companions(
    companions: Companions, config: ModelConfig | None, directory: Path
) -> list[str]:
    """Write config.json and copy all other companions; return the names written."""
    names = []
    if config is not None:
        text = json.dumps(config.fields, indent=2, ensure_ascii=False) + "\n"
        (directory / "config.json").write_text(text, encoding="utf-8")
        names.append("config.json")
    for name, source in companions.files.items():
        target = directory / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
        names.append(name)
    return names
