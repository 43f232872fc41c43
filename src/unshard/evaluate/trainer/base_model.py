"""The model that a training began with, which is evaluated as step 0 of its run."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

from unshard.errors import UsageError
from unshard.stores.remote_path import is_url, path_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", re.ASCII)


def find_base(given: str) -> str:
    """Return the directory, or the address, of a base model.

    Args:
        given: a directory here or on the server (then from its root), an address in an object
            store, or the id of a model on the Hugging Face hub that was downloaded before.

    Raises:
        UsageError: the model is in none of these places.
    """
    if is_url(given):
        return str(path_of(given))
    if Path(given).exists():
        return os.path.realpath(given)
    if Path(given).is_absolute():  # the server may see other disks
        return given
    found = _find_in_cache(given)
    if found is None:
        raise UsageError(
            f"base {given}: found neither here nor among the models downloaded from the hub",
            expected="a Hugging Face directory, or the id of a downloaded model",
            hint=f"download it with: hf download {given}"
            if _HUB_ID.fullmatch(given)
            else "check the path",
        )
    return str(found)


def _find_in_cache(given: str) -> Path | None:
    """Return the snapshot of a model of the hub, if all of it was downloaded."""
    if not _HUB_ID.fullmatch(given) or find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(given, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    has_weights = any(found.glob("*.safetensors")) or any(found.glob("*.bin"))
    return found if has_weights and (found / "config.json").exists() else None
