"""Find the base model, with which training began; it is evaluated as step 0 of the run."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

from unshard.errors import UsageError
from unshard.stores.remote_path import is_url, path_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", re.ASCII)


def find_base(model: str) -> str:
    """Return the directory, or the address, of a base model.

    Args:
        model: a directory here, an absolute path on the server, an address in an object store, or
            the id of a downloaded model of the Hugging Face hub.

    Raises:
        UsageError: the model is in none of these places.
    """
    if is_url(model):
        return str(path_of(model))
    if Path(model).exists():
        return os.path.realpath(model)
    if Path(model).is_absolute():  # the server may see other disks
        return model
    is_id = _HUB_ID.fullmatch(model) is not None
    if is_id and (snapshot := _find_in_cache(model)) is not None:
        return str(snapshot)
    raise UsageError(
        f"base {model}: found neither here nor among the models downloaded from the hub",
        expected="a Hugging Face directory, or the id of a downloaded model",
        hint=f"download it with: hf download {model}" if is_id else "check the path",
    )


def _find_in_cache(model: str) -> Path | None:
    """Return the snapshot of a model of the hub, if its config and weights were downloaded."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    has_weights = any(snapshot.glob("*.safetensors")) or any(snapshot.glob("*.bin"))
    return snapshot if has_weights and (snapshot / "config.json").exists() else None
